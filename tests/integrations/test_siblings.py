"""NVFP4's global scales in every way from a model of transformers to a folder that a server merges layers of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit.convert.siblings import family_of
from lowbit.formats import FormatError
from tests.integrations.models import by_compressed_tensors, llama, logits

transformers = pytest.importorskip("transformers")
NVFP4 = lowbit.NVFP4WeightOnly()
FLOAT8 = lowbit.Float8WeightOnly(lowbit.PerTensor())
SCHEMES = {"nvfp4": (NVFP4, "weight_global_scale"), "float8 tensor": (FLOAT8, "weight_scale")}
OVER = pytest.mark.parametrize(("scheme", "part"), SCHEMES.values(), ids=SCHEMES)


def uneven() -> Any:
    """A Llama whose q is four times larger than k and v, and whose gate is four times smaller than up."""
    model = llama(num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(4)
            layer.mlp.gate_proj.weight.div_(4)
    return model


def mixtral() -> Any:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=2,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.model.layers[0].mlp.experts.parameters():
            parameter[:, : parameter.shape[1] // 2].mul_(4)
            parameter[0].mul_(3)
    return model


def stored(folder: Path, part: str) -> dict[str, float]:
    from safetensors.torch import load_file

    found = {}
    for file in folder.glob("*.safetensors"):
        parts = {n: t for n, t in load_file(file).items() if n.endswith(f".{part}")}
        found |= {name: t.item() for name, t in parts.items()}
    return found


def assert_shared(folder: Path, part: str, families: int) -> None:
    by_family: dict[str, set[float]] = {}
    for name, value in stored(folder, part).items():
        family = family_of(name.removesuffix(part) + "weight")
        if family is not None:
            by_family.setdefault(family, set()).add(value)
    assert len(by_family) == families and all(len(values) == 1 for values in by_family.values())


def export_quantized(model: Any, scheme: Any, path: Path) -> None:
    lowbit.quantize_(model, {"lm_head": None, "*": scheme})
    lowbit.export(model, path / "out")


def export_trained(model: Any, scheme: Any, path: Path) -> None:
    lowbit.qat.prepare_(model, {"lm_head": None, "*": scheme})
    expected = logits(model)
    lowbit.qat.convert_(model)
    assert torch.equal(logits(model), expected)
    lowbit.export(model, path / "out")


def export_folder(model: Any, scheme: Any, path: Path) -> None:
    model.save_pretrained(path / "plain", max_shard_size="50KB")
    lowbit.export(path / "plain", path / "out", scheme=scheme)


def export_loaded(model: Any, scheme: Any, path: Path) -> None:
    from lowbit.hf import LowbitConfig

    model.save_pretrained(path / "plain", max_shard_size="50KB")
    low = transformers.AutoModelForCausalLM.from_pretrained(
        path / "plain", quantization_config=LowbitConfig(scheme)
    )
    low.save_pretrained(path / "low")
    lowbit.export(path / "low", path / "out")


WAYS = [export_quantized, export_trained, export_folder, export_loaded]


@pytest.mark.parametrize("way", WAYS)
@OVER
def test_every_way_shares_them(scheme, part, way, tmp_path: Path) -> None:
    """And all of them give the same bits."""
    model = uneven()
    way(model, scheme, tmp_path)
    assert_shared(tmp_path / "out", part, families=4)
    expected = uneven()
    lowbit.quantize_(expected, {"lm_head": None, "*": scheme})
    found = lowbit.load_pretrained(tmp_path / "out")
    assert torch.equal(logits(found), logits(expected))
    theirs = logits(by_compressed_tensors(tmp_path / "out", torch.float32))
    assert (theirs - logits(found)).norm() < 3e-3 * theirs.norm()  # it rounds values to bfloat16


@OVER
def test_searched(scheme, part, tmp_path: Path) -> None:
    """One search over all siblings, with the same result from memory, a folder, and transformers."""
    from safetensors.torch import load_file

    from lowbit.hf import LowbitConfig

    model, plain = uneven(), tmp_path / "plain"
    model.save_pretrained(plain)
    lowbit.export(plain, tmp_path / "folder", scheme=scheme, scales="searched")
    config = LowbitConfig(scheme, scales="searched")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    lowbit.export(loaded, tmp_path / "loaded")
    lowbit.quantize_(model, {"lm_head": None, "*": scheme}, scales="searched")
    lowbit.export(model, tmp_path / "memory")
    ways = [tmp_path / way for way in ("memory", "folder", "loaded")]
    for way in ways:
        assert_shared(way, part, families=4)
    wanted, *others = (load_file(way / "model.safetensors") for way in ways)
    for found in others:
        assert found.keys() == wanted.keys()
        for name, t in found.items():
            assert torch.equal(t.view(torch.uint8), wanted[name].view(torch.uint8)), name


@pytest.mark.filterwarnings("ignore:transformers 5.23 leaves out the global scales")
@pytest.mark.parametrize("way", [export_folder, export_loaded])
def test_experts(way, tmp_path: Path) -> None:
    way(mixtral(), NVFP4, tmp_path)
    assert_shared(tmp_path / "out", "weight_global_scale", families=3)  # q, k and v; two experts
    scales = stored(tmp_path / "out", "weight_global_scale")
    assert len({v for name, v in scales.items() if ".w1." in name}) == 2


@pytest.mark.filterwarnings("ignore:transformers 5.23 leaves out the global scales")
@pytest.mark.parametrize("scheme", [NVFP4, lowbit.MXFP4WeightOnly()], ids=["nvfp4", "mxfp4"])
def test_searched_experts(scheme, tmp_path: Path) -> None:
    """The same bits from the stacks of memory, from the experts of a folder, and from transformers."""
    from lowbit.hf import LowbitConfig

    model, plain = mixtral(), tmp_path / "plain"
    model.save_pretrained(plain)
    lowbit.export(plain, tmp_path / "folder", scheme=scheme, scales="searched")
    config = LowbitConfig(scheme, scales="searched")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    lowbit.quantize_(model, {"lm_head": None, "*": scheme}, scales="searched")
    folder = lowbit.load_pretrained(tmp_path / "folder").state_dict()
    memory, theirs = model.state_dict(), loaded.state_dict()
    names = [n for n, t in memory.items() if ".experts." in n or "_proj" in n]
    assert len(names) > 5
    for name in names:
        values = memory[name].dequantize()
        assert torch.equal(folder[name].dequantize(), values), name
        assert torch.equal(theirs[name].dequantize(), values), name


def alone(scheme: Any) -> Any:
    """Quantized layer by layer, as earlier releases did."""
    model = uneven()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            lowbit.quantize_(module, scheme)
    return model


@pytest.mark.parametrize("source", ["memory", "folder"])
@OVER
def test_models_that_were_quantized_otherwise(scheme, part, source, tmp_path: Path) -> None:
    model = alone(scheme)
    given = model
    if source == "folder":
        lowbit.export(model, tmp_path / "own", "lowbit")
        given = tmp_path / "own"
    with pytest.raises(FormatError) as error:
        lowbit.export(given, tmp_path / "out")
    message = str(error.value)
    weight = model.model.layers[0].self_attn.q_proj.weight
    scale = weight.global_scale if scheme is NVFP4 else weight.scale
    assert all(f"layers.0.self_attn.{n}_proj" in message for n in "qkv")
    assert f"one {part}" in message and f"{scale.item():.6g}" in message
    assert "quantize the model again" in message and "lossy=True" in message
    assert not (tmp_path / "out").exists()
    report = lowbit.export(given, tmp_path / "out", lossy=True)
    assert_shared(tmp_path / "out", part, families=4)
    assert len(report.snr) == 10 and min(report.snr.values()) > 20
    assert "by one scale for k_proj, q_proj, v_proj" in str(report)
    found, expected = logits(lowbit.load_pretrained(tmp_path / "out")), logits(model)
    assert (found - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("activation", ["symmetric", "asymmetric"])
def test_static_scales_of_inputs(activation: Any, tmp_path: Path) -> None:
    """Calibrated together they agree; learned ones differ, and vLLM takes the largest."""
    spec = lowbit.Spec(lowbit.Int(8), lowbit.PerTensor(), activation, static=True)
    scheme = lowbit.Scheme(lowbit.Int8WeightOnly().weight, spec)
    model, patterns = uneven(), {"lm_head": None, "*": scheme}
    with lowbit.calibrate(model, patterns):
        logits(model)
    lowbit.quantize_(model, patterns)
    lowbit.export(model, tmp_path / "calibrated")
    assert_shared(tmp_path / "calibrated", "input_scale", families=4)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.input_scale.mul_(1.5)
    with pytest.raises(FormatError, match=r"one input_scale.*and theirs differ"):
        lowbit.export(model, tmp_path / "out")
    report = lowbit.export(model, tmp_path / "out", lossy=True)
    assert "joint range of k_proj, q_proj, v_proj" in str(report)
    assert_shared(tmp_path / "out", "input_scale", families=4)
    if activation == "symmetric":
        largest = model.model.layers[0].self_attn.k_proj.weight.input_scale.item()
        assert (
            stored(tmp_path / "out", "input_scale")["model.layers.0.self_attn.q_proj.input_scale"]
            == largest
        )
    found, expected = logits(lowbit.load_pretrained(tmp_path / "out")), logits(model)
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_a_sibling_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    """The others do not wait for ever."""
    from safetensors.torch import load_file, save_file

    from lowbit.hf import LowbitConfig

    uneven().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.self_attn.v_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    low = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=LowbitConfig(NVFP4)
    )
    attention = low.model.layers[0].self_attn
    q, k = attention.q_proj.weight, attention.k_proj.weight
    assert torch.equal(q.global_scale, k.global_scale)
    expected = state["model.layers.0.self_attn.q_proj.weight"]
    assert (q.dequantize() - expected).norm() < 0.2 * expected.norm()


@OVER
@pytest.mark.parametrize("fits", [True, False], ids=["small", "large"])
def test_adapters_that_layers_merge_one_by_one(scheme, part, fits: bool, tmp_path: Path) -> None:
    """`layer.merge()` of PEFT knows no siblings. Their shared part stays while it reaches the sums; after larger ones
    the export names the ways that keep it, and they do."""
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = uneven()
        lowbit.quantize_(model, {"lm_head": None, "*": scheme})
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj", "gate_proj"]))
        for name, weight in model.named_parameters():
            if "lora_" in name:  # k and gate are a fourth of q and up
                nn.init.normal_(weight, std=0.02 if fits else 1.0)
        return model

    model = adapted()
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.Linear):
            layer.merge()
    model = model.unload()
    if fits:
        lowbit.export(model, tmp_path / "out")
    else:
        with pytest.raises(FormatError, match=r"model\.merge_adapter\(\) or lowbit\.peft\.merge_"):
            lowbit.export(model, tmp_path / "no")
        model = adapted()
        model.merge_adapter()
        lowbit.export(model.unload(), tmp_path / "out")
    assert_shared(tmp_path / "out", part, families=4)
