"""`from_pretrained(…, quantization_config=LowbitConfig(…))`, `save_pretrained` and back, with transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.tensor.core.base import LowbitTensor
from tests.integrations.models import TOKENS, gpt_oss, llama, logits, mixtral, qwen3_moe
from tests.schemes import relative_error

transformers = pytest.importorskip("transformers")

from lowbit.hf import LowbitConfig  # noqa: E402

INT4 = lb.Int4WeightOnly(32)


def tied() -> Any:
    return llama(tie_word_embeddings=True)


MODELS = {"llama": llama, "tied": tied, "mixtral": mixtral, "qwen3-moe": qwen3_moe}
every_model = pytest.mark.parametrize("name", MODELS)
CONFIGS = {
    "int4": LowbitConfig("int4", group_size=32),
    "int8": LowbitConfig("int8"),
    "searched": LowbitConfig(lb.IntxWeightOnly(3, 32), scales="searched"),
    "asymmetric": LowbitConfig(lb.Int4WeightOnly(32, "asymmetric")),
    "float8": LowbitConfig("float8"),
    "int8_int8": LowbitConfig("int8_int8"),
    "nf4": LowbitConfig("nf4", group_size=32, double_quantization=True),
    "nvfp4": LowbitConfig("nvfp4"),
    "patterns": LowbitConfig({"lm_head": "int8", "re:.*[qk]_proj": None, "*": INT4}),
}


def source(folder: Path, model: Any, **options: Any) -> Path:
    """A folder of plain weights in several shards."""
    model.save_pretrained(folder, max_shard_size="40KB", **options)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def read(folder: Path, config: LowbitConfig | None = None, **options: Any) -> Any:
    given = {} if config is None else {"quantization_config": config}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given, **options)


def low(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if isinstance(p, LowbitTensor)}


def assert_same_tensors(found: nn.Module, wanted: nn.Module) -> None:
    own = dict(found.named_parameters(remove_duplicate=False))
    for name, t in wanted.named_parameters(remove_duplicate=False):
        assert type(own[name]) is type(t) and own[name].dtype == t.dtype, name
        if isinstance(t, LowbitTensor):
            for part, value in t.inner_tensors().items():
                assert torch.equal(own[name].inner_tensors()[part], value), (name, part)
        else:
            assert torch.equal(own[name], t), name


# ---- loading -------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_quantized_while_loading_is_the_one_quantized_afterwards(
    name: str, config: str, tmp_path: Path
) -> None:
    settings = CONFIGS[config]
    model = MODELS[name]()
    found = read(source(tmp_path / "plain", model), settings)
    takes_head = "lm_head" in settings.patterns

    def selected(module: nn.Module, fqn: str) -> bool:
        is_linear = isinstance(module, nn.Linear) and (takes_head or fqn != "lm_head")
        return is_linear or fqn.endswith("experts")

    report = lb.quantize_(model, settings.patterns, selected, scales=settings.scales)
    assert_same_tensors(found, model)
    assert torch.equal(logits(found), logits(model))
    assert not any(p.requires_grad for p in found.parameters() if isinstance(p, LowbitTensor))
    assert found.hf_quantizer.report.left.keys() == report.left.keys()
    assert set(found.hf_quantizer.report.converted) == set(report.converted) == low(model)
    assert found.hf_quantizer.report.low_bit_nbytes == report.low_bit_nbytes
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == (name == "tied")


def test_groups_that_became_zero_are_logged_and_reported(tmp_path: Path, monkeypatch: Any) -> None:
    model, logged = llama(), []
    name = "model.layers.0.self_attn.o_proj.weight"
    weight = model.get_parameter(name)
    weight.data[:3] *= 1e-12
    config = LowbitConfig(lb.IntxWeightOnly(4, 32, scale_dtype=torch.float16))
    warn = "lowbit.interop.hf.quantizer.logger.warning"
    monkeypatch.setattr(warn, lambda text, *given: logged.append(text % given))
    report = read(
        source(tmp_path / "plain", model), config, dtype=torch.float32
    ).hf_quantizer.report
    groups = weight.shape[1] // 32
    said = f"{3 * groups} of {weight.shape[0] * groups} groups became 0, since scales in float16"
    assert [e.fqn for e in report.entries if said in e.note] == [name]
    assert len(logged) == 1 and logged[0].startswith(f"{name}: {said}")


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_the_report_names_the_share_of_the_experts(name: str, tmp_path: Path) -> None:
    folder = source(tmp_path / "plain", MODELS[name]())
    shares = []
    for experts in (True, False):
        report = read(folder, LowbitConfig("int8", experts=experts)).hf_quantizer.report
        assert sum(".experts." in n for n in report.converted) == 2 * experts
        share = report.low_bit_nbytes / report.nbytes
        assert f"take {100 * share:.1f}% of the bytes" in str(report)
        shares.append(share)
        reasons = {why for n, why in report.left.items() if ".experts." in n}
        assert reasons == (set() if experts else {"of experts, and experts=False"})
    assert shares[0] > shares[1] + 0.2
    assert report.left["model.layers.0.mlp.gate.weight"].startswith("a router")


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_in_low_bits_run_in_the_stock_paths(
    name: str, implementation: str, tmp_path: Path
) -> None:
    model = MODELS[name]()
    found = read(
        source(tmp_path / "plain", model),
        LowbitConfig("int4", group_size=32),
        experts_implementation=implementation,
    )
    assert isinstance(found.model.layers[0].mlp.experts.down_proj, LowbitTensor)
    expected = logits(found)
    found.dequantize()
    assert 0 < relative_error(expected, logits(model)) < 0.2
    assert relative_error(expected, logits(found)) < 1e-5


@pytest.mark.parametrize("scheme", ["int4(group_size=32)", "int8_int8", "float8", "mxfp4", "nvfp4"])
def test_experts_that_are_stored_transposed(scheme: str, tmp_path: Path) -> None:
    """Groups run along the inputs, as in a linear, in memory and in the folder."""
    model = gpt_oss()
    found = read(source(tmp_path / "plain", model), LowbitConfig(scheme))
    experts, plain = found.model.layers[0].mlp.experts, model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight, like = getattr(experts, name), getattr(plain, name)
        wanted = lb.AffineTensor.from_float(like.mT.contiguous(), LowbitConfig(scheme).scheme)
        assert weight.shape == like.shape
        assert torch.equal(weight.dequantize(), wanted.dequantize().mT)
        assert not isinstance(getattr(experts, f"{name}_bias"), LowbitTensor)
    found.save_pretrained(tmp_path / "saved")
    lb.export(found, tmp_path / "exported", format="lowbit")
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        found.set_experts_implementation(implementation)
        model.set_experts_implementation(implementation)
        expected = logits(found)
        assert 0 < relative_error(expected, logits(model)) < 0.2
        for folder in ("saved", "exported"):
            again = read(tmp_path / folder, experts_implementation=implementation)
            assert torch.equal(logits(again), expected)
            assert torch.equal(
                again.model.layers[0].mlp.experts.down_proj.codes, experts.down_proj.codes
            )
    assert relative_error(logits(found.dequantize()), expected) < (
        0.1 if "_" in scheme[:6] else 1e-5
    )


def test_a_pattern_that_names_embeddings_and_routers_converts_them(tmp_path: Path) -> None:
    folder = source(tmp_path / "plain", mixtral())
    found = read(folder, LowbitConfig({"*embed_tokens": "int8", "*.mlp.gate": "int8"}))
    assert low(found) == {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"}
    saved = tmp_path / "saved"
    found.save_pretrained(saved)
    assert torch.equal(logits(read(saved)), logits(found))


def test_weights_take_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    folder = source(tmp_path / "plain", llama())
    found = read(folder, LowbitConfig("int8"), dtype=torch.bfloat16)
    model = llama().bfloat16()
    lb.quantize_(
        model, lb.Int8WeightOnly(), lambda m, n: isinstance(m, nn.Linear) and n != "lm_head"
    )
    assert_same_tensors(found, model)
    found.save_pretrained(tmp_path / "saved")
    assert read(tmp_path / "saved").dtype == torch.bfloat16
    other = read(tmp_path / "saved", dtype=torch.float32)
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    weight = "model.layers.0.self_attn.q_proj.weight"
    codes = other.get_parameter(weight).codes
    assert torch.equal(codes, found.get_parameter(weight).codes)


def test_a_head_that_the_checkpoint_lacks_stays_plain(tmp_path: Path) -> None:
    llama().model.save_pretrained(tmp_path / "plain")
    kind = transformers.AutoModelForSequenceClassification
    config = LowbitConfig({"score": "int8", "*": "int8"})
    found = kind.from_pretrained(tmp_path / "plain", quantization_config=config)
    report = found.hf_quantizer.report
    assert report.left["score.weight"] == "not in the checkpoint, so plain"
    assert len(report.converted) == 7


@every_model
def test_transformers_learns_the_size_of_each_weight(name: str, tmp_path: Path) -> None:
    """It distributes a model over devices, and reserves memory, by these sizes."""
    found = read(source(tmp_path / "plain", MODELS[name]()), CONFIGS["patterns"])
    found.save_pretrained(tmp_path / "saved")
    again = read(tmp_path / "saved")
    for model in (found, again):
        quantizer, total = model.hf_quantizer, 0.0
        for fqn, param in model.named_parameters():
            total += param.numel() * quantizer.param_element_size(model, fqn, param)
        assert total == pytest.approx(quantizer.report.nbytes)


@pytest.mark.parametrize("given", [(), (None,)], ids=["before 5.21", "from 5.21 on"])
def test_releases_of_transformers_ask_for_conversions_with_and_without_the_model(given) -> None:
    from lowbit.interop.hf.quantizer import LowbitQuantizer

    joined = ["a conversion of the model"]
    quantizer = LowbitQuantizer(LowbitConfig("int8"), pre_quantized=False)
    assert quantizer.update_weight_conversions(joined, *given) == joined


def test_one_config_serves_two_models(tmp_path: Path) -> None:
    config = LowbitConfig("int8")
    before = config.to_dict()
    for name in ("llama", "mixtral"):
        found = read(source(tmp_path / name, MODELS[name]()), config)
        tensors = found.config.quantization_config.to_dict()["tensors"]
        assert set(tensors) == low(found)
    assert config.to_dict() == before


# ---- saving and reading back ---------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("config", ["int4", "int8_int8", "patterns", "nf4"])
def test_save_pretrained_and_back(name: str, config: str, tmp_path: Path) -> None:
    found = read(source(tmp_path / "plain", MODELS[name]()), CONFIGS[config])
    found.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    again = read(tmp_path / "saved")
    assert_same_tensors(again, found)
    assert torch.equal(logits(again), logits(found))
    assert set(again.hf_quantizer.report.converted) == {
        n for n, _ in found.named_parameters()
    } & low(found)
    again.save_pretrained(tmp_path / "again")
    assert_same_tensors(read(tmp_path / "again"), found)


@every_model
def test_save_pretrained_writes_the_folder_of_export(name: str, tmp_path: Path) -> None:
    found = read(source(tmp_path / "plain", MODELS[name]()), CONFIGS["patterns"])
    found.save_pretrained(tmp_path / "saved")
    lb.export(found, tmp_path / "exported", format="lowbit")
    settings, names = [], []
    for folder in (tmp_path / "saved", tmp_path / "exported"):
        settings.append(json.loads((folder / "config.json").read_text())["quantization_config"])
        names.append(dict(lb.formats.tensors(folder)).keys())
        for again in (read(folder), lb.load_pretrained(folder)):
            assert torch.equal(logits(again), logits(found))
            assert_same_tensors(again, found)
    assert settings[0] == settings[1] and names[0] == names[1]


@every_model
def test_a_folder_that_export_quantized_is_read(name: str, tmp_path: Path) -> None:
    """One that was written layer by layer, and no model was built."""
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "plain", save_original_format=False)
    lb.export(tmp_path / "plain", tmp_path / "low", format="lowbit", scheme=INT4)
    found = read(tmp_path / "low")
    assert torch.equal(logits(found), logits(lb.load_pretrained(tmp_path / "low")))
    expected = read(tmp_path / "plain", LowbitConfig(INT4, experts=False))
    assert torch.equal(logits(found), logits(expected))


def test_a_model_that_was_quantized_in_memory_is_read(tmp_path: Path) -> None:
    model = llama()
    lb.quantize_(model, {"lm_head": None, "*": INT4})
    lb.export(model, tmp_path / "low", format="lowbit")
    assert_same_tensors(read(tmp_path / "low"), model)


def test_the_base_of_a_saved_model_is_read(tmp_path: Path) -> None:
    found = read(source(tmp_path / "plain", llama()), LowbitConfig("int4", group_size=32))
    found.save_pretrained(tmp_path / "saved")
    base = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert len(low(base)) == 7
    with torch.no_grad():
        assert torch.equal(base(TOKENS)[0], found.model(TOKENS)[0])
    base.save_pretrained(tmp_path / "base")
    whole = read(tmp_path / "base")
    assert_same_tensors(whole.model, found.model)


@every_model
def test_dequantize_gives_a_plain_model(name: str, tmp_path: Path) -> None:
    found = read(source(tmp_path / "plain", MODELS[name]()), LowbitConfig("int4", group_size=32))
    expected = logits(found)
    plain = found.dequantize()
    assert not low(plain) and relative_error(logits(plain), expected) < 1e-5
    assert not getattr(plain.config, "quantization_config", None) and not plain.is_quantized
    assert not hasattr(plain, "hf_quantizer")
    source(tmp_path / "again", plain)
    names = {n for n, _ in lb.formats.tensors(tmp_path / "again")}
    assert names == {n for n, _ in lb.formats.tensors(tmp_path / "plain")}
    assert torch.equal(logits(read(tmp_path / "again")), logits(plain))


def test_dequantize_gives_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    found = read(source(tmp_path / "plain", llama()), LowbitConfig("int8"))
    plain = found.dequantize(dtype=torch.bfloat16)
    weights = dict(plain.named_parameters())
    assert weights["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert weights["lm_head.weight"].dtype == torch.float32


# ---- generation ----------------------------------------------------------------------------------------------------


@pytest.mark.cover("values")
@pytest.mark.parametrize("scheme", ["int4(group_size=32)", "nf4(group_size=32)"])
@pytest.mark.parametrize("name", [*MODELS, "gpt-oss"])
def test_generate_with_a_static_cache_under_compile(name: str, scheme: str, tmp_path: Path) -> None:
    make = {**MODELS, "gpt-oss": gpt_oss}[name]
    found = read(source(tmp_path / "plain", make()), LowbitConfig(scheme))
    if hasattr(found.model.layers[0].mlp, "experts"):
        found.set_experts_implementation("batched_mm")
    expected = found.generate(TOKENS, max_new_tokens=6, do_sample=False)
    compiles = transformers.CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager")
    compiles._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = found.generate(
        TOKENS,
        max_new_tokens=6,
        do_sample=False,
        cache_implementation="static",
        compile_config=compiles,
    )
    assert torch.equal(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_generate_compiles_once_for_200_tokens_and_two_prompts(name: str) -> None:
    """Each forward of a token runs the same graph, whose inputs are plain tensors."""
    model = MODELS[name]()
    lb.quantize_(model, {"lm_head": None, "*": INT4})
    if hasattr(model.model.layers[0].mlp, "experts"):
        model.set_experts_implementation("batched_mm")
    inputs: list[set[type]] = []

    def counted(graph: Any, examples: list[Any], **options: Any) -> Any:
        inputs.append({type(x) for x in examples})
        return graph

    torch._dynamo.reset()
    compiles = transformers.CompileConfig(fullgraph=True, dynamic=False, backend=counted)
    compiles._compile_all_devices = True
    settings: dict[str, Any] = {"max_length": 212, "do_sample": False, "eos_token_id": None}
    for prompt in (TOKENS, TOKENS[:, :5]):
        static = {**settings, "cache_implementation": "static"}
        got = model.generate(prompt, **static, compile_config=compiles)
        assert torch.equal(got, model.generate(prompt, **static, disable_compile=True))
    assert len(inputs) == 1, "recompiled"
    assert inputs[0] <= {torch.Tensor, nn.Parameter, int, torch.SymInt}
    assert model.generate(TOKENS, **settings).shape == (2, 212)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_loading_to_a_gpu(name: str, tmp_path: Path) -> None:
    folder = source(tmp_path / "plain", MODELS[name]())
    config = LowbitConfig("int4", group_size=32)
    found = read(folder, config, device_map="cuda", dtype=torch.bfloat16)
    assert {p.device.type for p in found.parameters()} == {"cuda"}
    found.save_pretrained(tmp_path / "saved")
    again = read(tmp_path / "saved", device_map="cuda")
    assert_same_tensors(again, found)
    tokens = TOKENS.cuda()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, found(tokens).logits)
    expected = again.generate(tokens, max_new_tokens=8, do_sample=False)
    got = again.generate(tokens, max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert got.shape == expected.shape
