"""`lowbit.calibrate(…, kv_cache="float8")`: static scales of keys and values, in memory, in folders, and in the classes
of compressed-tensors."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lowbit as lb
from lowbit.formats import FormatError
from lowbit.inference import GPTQ, Search
from lowbit.inference.calibration.finished import Finished
from lowbit.layers.cache_scales import held_in
from tests.integrations.test_calibrate_folder import EXPERTS, batches, save

transformers = pytest.importorskip("transformers")

E4M3 = torch.float8_e4m3fn
SCHEME = lb.Int4WeightOnly(32)
SMALL = {"vocab_size": 96, "num_hidden_layers": 2}
LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4} | SMALL
LLAMA |= {"num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "Gemma3ForCausalLM": {**LLAMA, "head_dim": 16, "sliding_window": 8},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "GPTNeoXForCausalLM": {**LLAMA, "use_cache": False},
    "T5ForConditionalGeneration": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2}
    | {"num_heads": 4, "vocab_size": 96},
}


def build(name: str, **changes: Any) -> Any:
    architecture = getattr(transformers, name)
    torch.manual_seed(0)
    return architecture(architecture.config_class(**{**KINDS[name], **changes})).eval()


def of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Batches with padding; an encoder-decoder has other tokens for its decoder."""
    made = batches()
    if model.config.is_encoder_decoder:  # type: ignore[union-attr]
        return [
            {"input_ids": b["input_ids"], "decoder_input_ids": b["input_ids"][:, :7]} for b in made
        ]
    return made


def largest(model: nn.Module, found: list[dict[str, Tensor]]) -> dict[str, float]:
    """The largest key and value of each layer that counts, from what the model's own cache holds."""
    most: dict[str, float] = {}
    layer = "model.layers.{}.self_attn.{}_scale"
    for batch in found:
        with torch.no_grad():
            cache = model(**batch, use_cache=True).past_key_values
        mask = batch["attention_mask"].bool()
        for i, one in enumerate(cache.layers):
            for name, x in (("k", one.keys), ("v", one.values)):
                own = layer.format(i, name)
                most[own] = max(most.get(own, 0.0), float(x.transpose(1, 2)[mask].abs().max()))
    return most


def test_the_scales_are_those_of_the_cache() -> None:
    """With "minmax": what is largest among the tokens that count, by 448. "squared_error" is never wider."""
    model = build("LlamaForCausalLM")
    wanted, rounded = largest(model, of(model)), copy.deepcopy(model)
    lb.calibrate(model, SCHEME, of(model), steps=[], method="minmax", kv_cache="float8")
    found = held_in(model)
    assert found.keys() == wanted.keys() and len(found) == 4
    for name, scale in found.items():
        assert scale.dtype == torch.float32 and scale.shape == (1,)
        torch.testing.assert_close(float(scale), wanted[name] / 448, rtol=1e-6, atol=0)
    assert {*found} <= {*model.state_dict()}
    report = lb.calibrate(rounded, SCHEME, of(rounded), steps=[GPTQ()], kv_cache="float8")
    assert all(float(t) <= wanted[n] / 448 * (1 + 1e-6) for n, t in held_in(rounded).items())
    assert report.notes[0].startswith("float8 scales of the keys and values that model.layers.0")


def test_a_dequantized_model_has_none() -> None:
    """As the plain model that it is then, whose folder transformers reads without a word."""
    model = build("LlamaForCausalLM")
    names = [*model.state_dict()]
    lb.calibrate(model, SCHEME, of(model)[:1], steps=[], method="minmax", kv_cache="float8")
    lb.dequantize_(model, lambda module, name: name.endswith("q_proj"))
    assert held_in(model)
    lb.dequantize_(model)
    assert not held_in(model) and [*model.state_dict()] == names
    lb.calibrate(model, SCHEME, of(model)[:1], steps=[], method="minmax", kv_cache="float8")
    assert held_in(model)


def test_a_cast_leaves_them_in_float32(tmp_path: Path) -> None:
    """In the model, a copy of it, and the folder. Its other buffers are cast."""
    model = build("LlamaForCausalLM")
    lb.calibrate(model, SCHEME, of(model)[:1], steps=[], method="minmax", kv_cache="float8")
    attention = model.model.layers[1].self_attn
    attention.register_buffer("other", torch.ones(1))
    before = {name: scale.clone() for name, scale in held_in(model).items()}
    cast = copy.deepcopy(model).half()
    for own in (cast, copy.deepcopy(cast).to(torch.bfloat16), model.bfloat16().float()):
        found = held_in(own)
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], scale) for name, scale in before.items())
        assert {t.dtype for t in found.values()} == {torch.float32}
    assert cast.model.layers[1].self_attn.other.dtype == torch.float16
    moved = cast.to("meta")
    assert {(t.dtype, t.device.type) for t in held_in(moved).values()} == {(torch.float32, "meta")}
    lb.export(model.bfloat16(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], scale) for name, scale in before.items())
    lb.dequantize_(model)
    assert type(attention) is transformers.models.llama.modeling_llama.LlamaAttention
    assert type(model.model.layers[0].self_attn) is type(attention)


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_with_a_cache(kind: str) -> None:
    """Also where the config or a batch says not to use it, which then hold again."""
    model = build(kind)
    given = of(model)
    given[0] = {**given[0], "use_cache": False}
    uses, update = model.config.use_cache, transformers.Cache.update
    lb.calibrate(model, SCHEME, given, steps=[], method="minmax", kv_cache="float8")
    found = held_in(model)
    assert len(found) == (8 if model.config.is_encoder_decoder else 4)
    assert all(bool(t.isfinite().all() and t > 0) for t in found.values())
    assert model.config.use_cache == uses and transformers.Cache.update is update


def test_the_mask_of_an_encoder_is_not_the_decoders() -> None:
    """Where both have as many tokens."""
    ids = of(build("LlamaForCausalLM"))[0]["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, 7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    rows = []
    for own in (batch, {**batch, "decoder_attention_mask": mask}):
        model, schemes = build("T5ForConditionalGeneration"), {"*.wi": SCHEME, "*": None}
        report = lb.calibrate(model, schemes, [own], steps=[Search()], blocks=[])
        rows.append({layer.rows for layer in report.layers.values()})
    assert rows == [{ids.numel()}, {int(mask.sum())}]


@pytest.mark.parametrize("kind", ["Llama", "Gemma3", "Qwen3Moe", "GPTNeoX"])
def test_a_folder_gives_the_scales_of_memory(kind: str, tmp_path: Path) -> None:
    """Block by block, where blocks get no cache of the model. GPT-NeoX's calls it `layer_past`."""
    changes = {"Qwen3Moe": EXPERTS, "Gemma3": {"head_dim": 16, "sliding_window": 8}}.get(kind, {})
    folder, out = save(tmp_path / "model", kind, **changes), tmp_path / "out"
    report = lb.calibrate(
        folder, SCHEME, batches(), steps=[], out=out, method="minmax", kv_cache="float8"
    )
    assert "scales of the keys" in report.notes[0] and report.written is not None
    model = lb.load_pretrained(folder)
    lb.calibrate(model, SCHEME, batches(), steps=[], method="minmax", kv_cache="float8")
    written = {n: t for f in out.glob("*.safetensors") for n, t in load_file(f).items()}
    wanted = held_in(model)
    assert len(wanted) == 6
    for name, scale in wanted.items():
        torch.testing.assert_close(written[name], scale, rtol=1e-6, atol=0)


def test_after_a_kill_the_scales_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, given = (
        save(tmp_path / "model"),
        {"steps": [], "method": "minmax", "kv_cache": "float8"},
    )
    lb.calibrate(folder, SCHEME, batches(), out=tmp_path / "whole", **given)
    write = Finished.write

    def dying(self: Finished, name: str, *args: Any) -> None:
        write(self, name, *args)
        if name == "1":
            raise KeyboardInterrupt

    monkeypatch.setattr(Finished, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        lb.calibrate(folder, SCHEME, batches(), out=tmp_path / "out", **given)
    monkeypatch.setattr(Finished, "write", write)
    with pytest.raises(FormatError, match="another kv_cache"):
        lb.calibrate(folder, SCHEME, batches(), steps=[], out=tmp_path / "out")
    report = lb.calibrate(folder, SCHEME, batches(), out=tmp_path / "out", **given)
    own, other = (load_file(tmp_path / p / "model.safetensors") for p in ("out", "whole"))
    assert own.keys() == other.keys() and all(torch.equal(own[n], other[n]) for n in own)
    assert "3 " not in report.notes[0] and "layers.2.self_attn cache" in report.notes[0]


def test_folders_hold_them(tmp_path: Path) -> None:
    """Each format that has a place reads back what it wrote; the others say that they leave them out."""
    model = build("LlamaForCausalLM").bfloat16()
    lb.calibrate(
        model,
        {"*_proj": SCHEME, "*": None},
        of(model),
        steps=[],
        method="minmax",
        kv_cache="float8",
    )
    wanted = held_in(model)

    def same(other: nn.Module) -> bool:
        found = held_in(other)
        return found.keys() == wanted.keys() and all(
            torch.equal(found[n], t) for n, t in wanted.items()
        )

    source: Any = model
    for name in (
        "compressed-tensors",
        "lowbit",
        "again",
    ):  # the second and third from the folder before
        format = "compressed-tensors" if name == "again" else name
        report = lb.export(source, tmp_path / name, format)
        source = tmp_path / name
        assert report.notes == [] and same(lb.load_pretrained(source))
        settings = json.loads((source / "config.json").read_text())["quantization_config"]
        assert settings["kv_cache_scheme"]["type"] == "float"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lowbit")
    assert same(loaded)
    loaded.save_pretrained(tmp_path / "saved")
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    for given in (model, tmp_path / "lowbit"):
        report = lb.export(given, tmp_path / "gptq", "gptq", lossy=True, overwrite=True)
        assert "4 scales of a KV cache" in report.notes[0]
        assert "kv_cache_scheme" not in (tmp_path / "gptq/config.json").read_text()
        assert held_in(lb.load_pretrained(tmp_path / "gptq")) == {}
    lb.export(lb.load_pretrained(tmp_path / "lowbit"), tmp_path / "like", like=tmp_path / "again")
    assert same(lb.load_pretrained(tmp_path / "like"))
    lb.save(model, tmp_path / "model.safetensors")
    state = lb.load(tmp_path / "model.safetensors")
    assert all(torch.equal(state[n], t) for n, t in wanted.items())
    assert same(copy.deepcopy(model))


def test_scales_of_another_kind_are_left_out(tmp_path: Path) -> None:
    """A scale for each head, which lowbit does not write."""
    model = build("LlamaForCausalLM")
    lb.calibrate(model, SCHEME, of(model), steps=[], method="minmax", kv_cache="float8")
    lb.export(model, tmp_path / "out", lossy=True)
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"]["strategy"] = "attn_head"
    path.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="4 scales of a KV cache"):
        assert held_in(lb.load_pretrained(tmp_path / "out")) == {}


def test_compressed_tensors_reads_and_runs_them(tmp_path: Path) -> None:
    """Its config parses; its model has the scales, and gives what ours gives where a cache rounds by them."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    folder, out = save(tmp_path / "model"), tmp_path / "out"
    lb.calibrate(
        folder,
        lb.Int8WeightOnly(),
        batches(),
        steps=[],
        out=out,
        method="minmax",
        kv_cache="float8",
    )
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(settings).kv_cache_scheme
    assert (
        parsed.num_bits == 8 and parsed.type == "float" and parsed.symmetric and not parsed.dynamic
    )
    assert parsed.strategy == "tensor" and parsed.pytorch_dtype() == E4M3
    taken = inspect.signature(transformers.LlamaModel.forward).parameters
    if "past_key_values" not in taken:  # transformers 5.24 names it cache
        pytest.skip("compressed-tensors finds attention layers by an argument past_key_values")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    own = lb.load_pretrained(out)
    scales = held_in(own)
    for name, scale in scales.items():
        assert torch.equal(theirs.get_parameter(name), scale)

    class Rounding(transformers.DynamicCache):
        def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any) -> Any:  # type: ignore[override]
            found = []
            for name, x in (("k", key), ("v", value)):
                scale = scales[f"model.layers.{layer_idx}.self_attn.{name}_scale"]
                found.append((x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale)
            return super().update(*found, layer_idx, *args)

    batch = batches()[0]
    with torch.no_grad():
        wanted = own(**batch, past_key_values=Rounding(config=own.config)).logits
        plain, found = own(**batch).logits, theirs(**batch).logits
    error = float((found - wanted).norm() / wanted.norm())
    assert error < 1e-3 < float((plain - wanted).norm() / wanted.norm()), error


def test_transformers_loads_and_finds_them(tmp_path: Path) -> None:
    from lowbit.hf import LowbitConfig

    folder = save(tmp_path / "model")
    config = LowbitConfig("int4", group_size=32, batches=batches(), steps=[], kv_cache="float8")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert len(held_in(model)) == 6
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(t, held_in(again)[n]) for n, t in held_in(model).items())
    with pytest.raises(ValueError, match="give batches="):
        LowbitConfig("int4", kv_cache="float8")


def test_what_is_refused(tmp_path: Path) -> None:
    model = build("LlamaForCausalLM")
    tokens = of(model)
    with pytest.raises(ValueError, match="accepted: 'float8'; leave it out"):
        lb.calibrate(model, SCHEME, tokens, kv_cache="int8")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="needs batches"):
        lb.calibrate(model, SCHEME, steps=[GPTQ()], kv_cache="float8")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="kv_cache: not read"):
        lb.calibrate(model, SCHEME, kv_cache="float8")  # type: ignore[call-overload]
    with pytest.raises(FormatError, match="gptq has no place for scales of a KV cache"):
        lb.calibrate(
            model,
            SCHEME,
            tokens,
            steps=[],
            format="gptq",
            lossy=True,
            method="minmax",
            kv_cache="float8",
        )
    plain = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 96))
    with pytest.raises(ValueError, match="wrote keys and values to a Cache"):
        lb.calibrate(
            plain,
            SCHEME,
            [t["input_ids"] for t in tokens],
            steps=[],
            method="minmax",
            kv_cache="float8",
        )
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.inf
    others = {"*.mlp.*": SCHEME, "*": None}
    with pytest.raises(ValueError, match=r"values of model.layers.1.self_attn have NaN"):
        lb.calibrate(model, others, tokens, steps=[], method="minmax", kv_cache="float8")
    assert held_in(model) == {}
    latent = copy.deepcopy(model)
    latent.config.kv_lora_rank = 16
    with pytest.raises(ValueError, match="the latent"):
        lb.calibrate(latent, SCHEME, tokens, kv_cache="float8")
    named = build("LlamaForCausalLM")
    named.model.layers[0].self_attn.k_scale = 2.0
    with pytest.raises(ValueError, match="k_scale of its own"):
        lb.calibrate(named, SCHEME, tokens, steps=[], method="minmax", kv_cache="float8")
