"""K-quants: fields to the bit, the search beside llama.cpp's, importance, extremes, mixes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import AffineTensor, LowbitTensor, quantize_
from lowbit.formats import FormatError, gguf_mix, gguf_scheme
from lowbit.formats.gguf.blocks import decode, encode
from lowbit.formats.gguf.format import SCHEMES
from lowbit.formats.gguf.mixes import MIXES
from lowbit.inference import GPTQ, Search
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.numerics.super_blocks import TABLE, SuperBlocks

KINDS = {f"Q{row.bits}_K": row for row in TABLE}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 300,
}
EXTREMES = {
    "zeros": lambda: torch.zeros(3, 512),
    "one value": lambda: torch.full((3, 512), -0.25),
    "above zero": lambda: torch.rand(3, 512) + 1,
    "below zero": lambda: -torch.rand(3, 512) - 1,
    "one large": lambda: torch.randn(3, 512).index_fill(1, torch.tensor([7]), 1e3),
    "many scales": lambda: torch.randn(3, 512) * torch.logspace(-9, 4, 512),
    "tiny": lambda: torch.randn(3, 512) * 1e-12,
}
THEIRS = {
    "normal": {"Q2_K": (0.05234, 0.03239), "Q3_K": (0.01408, 0.01037), "Q4_K": (0.003159, 0.002468),
               "Q5_K": (0.0008165, 0.0006514), "Q6_K": (0.0001849, 0.0001506)},
    "t(5)": {"Q2_K": (0.04836, 0.02914), "Q3_K": (0.01435, 0.0108), "Q4_K": (0.003123, 0.00244),
             "Q5_K": (0.0008319, 0.000675), "Q6_K": (0.0002037, 0.0001791)},
    "outliers": {"Q2_K": (0.01105, 0.01026), "Q3_K": (0.004721, 0.005279), "Q4_K": (0.001082, 0.001208),
                 "Q5_K": (0.0002883, 0.0003184), "Q6_K": (0.0001039, 0.0001457)},
}  # fmt: skip
"""The relative errors, as `error` has them, of llama.cpp's `ggml_quantize_chunk` (llama-cpp-py-sync 0.11739), without
importance and with that of `importance`."""


def draw(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1024, generator=generator)
    if kind == "t(5)":
        others = torch.randn(5, 64, 1024, generator=generator).square().mean(0).sqrt()
        return x / others
    if kind == "outliers":
        x[:, ::97] *= 12
    return x


def importance() -> torch.Tensor:
    return torch.rand(1024, generator=torch.Generator().manual_seed(1)).pow(4) + 0.01


def scheme_of(kind: str) -> Spec:
    return gguf_scheme(kind).weight


def error(x: torch.Tensor, spec: Spec, qparams: Any, h: torch.Tensor | None) -> float:
    codes, scale, zero = spec.quantize(x, torch.float32, qparams)
    wrong = (spec.dequantize(codes, scale, zero, x.shape, torch.float32) - x).square()
    return float((wrong * heaviness(x, h)).sum() / (x.square() * heaviness(x, h)).sum())


def heaviness(x: torch.Tensor, h: torch.Tensor | None) -> torch.Tensor:
    """What the search minimises: a weight counts by its size, and an input by its importance."""
    size = (x.square() + x.square().mean(-1, keepdim=True) / 2).sqrt()
    return size if h is None else size * h


def by_the_package(kind: str, rows: torch.Tensor) -> torch.Tensor:
    gguf = pytest.importorskip("gguf")
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", EXTREMES)
@pytest.mark.parametrize("kind", [*KINDS, "Q5_0", "Q5_1", "Q4_1", "MXFP4"])
def test_fields_are_exact(kind: str, values: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = EXTREMES[values]().to(dtype)
    for scales in ("minmax", "searched"):
        weight = AffineTensor.quantized(x, gguf_scheme(kind), scales)
        found, rows = encode(weight)
        assert found == kind
        assert torch.equal(by_the_package(kind, rows).to(dtype), weight.dequantize())
        again = decode(kind, rows, dtype)
        values_again = again.dequantize() if isinstance(again, LowbitTensor) else again
        assert torch.equal(values_again, weight.dequantize())
        if values in ("above zero", "below zero") and scales == "searched":
            own = (weight.dequantize() - x).norm() / x.norm()
            assert own < {"Q2_K": 0.1, "Q3_K": 0.2, "MXFP4": 0.15}.get(kind, 0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_written_again(kind: str) -> None:
    weight = AffineTensor.quantized(torch.randn(4, 512), gguf_scheme(kind))
    _, rows = encode(weight)
    again = decode(kind, rows, torch.float32)
    assert isinstance(again, AffineTensor) and again.spec == weight.spec
    assert torch.equal(encode(again)[1], rows)


@pytest.mark.parametrize("values", THEIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_below_llama_cpps(kind: str, values: str) -> None:
    x, spec = draw(values), scheme_of(kind)
    for h, theirs in zip((None, importance()), THEIRS[values][kind], strict=True):
        found = error(x, spec, spec.search_qparams(x, torch.float32, h), h)
        assert found < theirs
        assert found < error(x, spec, spec.choose_qparams(x, torch.float32), h) * 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_no_importance(kind: str) -> None:
    """They get values near their own, and the others are as good as without them."""
    x, spec = draw("normal")[:8], scheme_of(kind)
    h = torch.ones(1024)
    h[::2], h[256:512] = 0, 0
    found = spec.search_qparams(x, torch.float32, h)
    assert error(x, spec, found, h) < error(x, spec, spec.search_qparams(x, torch.float32), h)
    assert error(x, spec, found, 1 - h) < {2: 0.7, 3: 0.4, 4: 0.15}.get(spec.format.bits, 0.05)
    none = spec.search_qparams(x, torch.float32, torch.zeros(1024))
    assert error(x, spec, none, None) < 1.001 * error(
        x, spec, spec.search_qparams(x, torch.float32), None
    )


@pytest.mark.parametrize("kind", ["Q2_K", "Q6_K"])
def test_calibrated_scales_are_those_of_super_blocks(kind: str) -> None:
    torch.manual_seed(0)
    for step in (Search(), GPTQ()):
        model = torch.nn.Sequential(torch.nn.Linear(256, 48))
        x = torch.randn(400, 256) * torch.linspace(0.1, 3, 256)
        report = lowbit.calibrate(model, gguf_scheme(kind), [x], steps=[step])
        for name, layer in report.layers.items():
            assert layer.after < layer.before
            weight = model.get_parameter(name)
            found, rows = encode(weight)
            assert found == kind
            assert torch.equal(by_the_package(kind, rows), weight.dequantize())


def test_a_padded_row_and_stacks_keep_super_blocks() -> None:
    """In memory any row of whole groups does; a file takes multiples of 256."""
    for kind, row in KINDS.items():
        weight = AffineTensor.quantized(torch.randn(2, 3, 320), gguf_scheme(kind))
        assert weight.shape == (2, 3, 320) and weight.scale.shape == (2, 3, 320 // row.group)
        with pytest.raises(FormatError, match="super-blocks of 256 inputs, got 320"):
            encode(AffineTensor.quantized(torch.randn(3, 320), gguf_scheme(kind)))
        cut = AffineTensor.quantized(torch.randn(3, 512), gguf_scheme(kind))
        cut.scale[:, 0] *= math.pi
        with pytest.raises(FormatError, match="not those of super-blocks"):
            encode(cut)


def test_weights_that_are_not_finite_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 8))
    with torch.no_grad():
        model[0].weight[3, 5] = math.nan
    for run in (
        lambda: quantize_(model, gguf_scheme("Q4_K")),
        lambda: lowbit.calibrate(model, gguf_scheme("Q4_K"), [torch.randn(4, 256)]),
    ):
        with pytest.raises(ValueError, match=r"0\.weight"):
            run()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("scales", ["minmax", "searched"])
def test_weights_beyond_the_float16_of_super_blocks_are_refused(kind: str, scales: str) -> None:
    weight = torch.randn(4, 512)
    for size in (1e3, 1e9):
        model = torch.nn.Sequential(torch.nn.Linear(512, 4, bias=False))
        model[0].weight.data.copy_(weight * size)
        if size == 1e3:
            quantize_(model, gguf_scheme(kind), scales=scales)
            kept = model[0].weight.dequantize() / size
            assert (kept - weight).norm() < 0.4 * weight.norm()
        else:
            with pytest.raises(
                ValueError, match=r"8 of 8 super-blocks need a float16 scale of 65504"
            ):
                quantize_(model, gguf_scheme(kind), scales=scales)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_values_beyond_float16_are_refused_in_float16(kind: str) -> None:
    for size in (1e3, 1e6):
        model = nn.Sequential(nn.Linear(512, 4, bias=False))
        model[0].weight.data.copy_(torch.randn(4, 512) * size)
        quantize_(model, gguf_scheme(kind))
        name, rows = encode(model[0].weight)
        wide = decode(name, rows, torch.float32).dequantize()
        assert torch.equal(wide, model[0].weight.dequantize())
        if size == 1e3:
            assert decode(name, rows, torch.float16).dequantize().isfinite().all()
        else:
            with pytest.raises(FormatError, match=r"values are beyond 65504.* torch\.float16"):
                decode(name, rows, torch.float16)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_of_a_file_that_are_no_numbers_are_read(scale: float) -> None:
    model = nn.Sequential(nn.Linear(64, 4, bias=False))
    quantize_(model, gguf_scheme("Q8_0"))
    name, rows = encode(model[0].weight)
    rows[1, :2] = torch.tensor([scale]).half().view(torch.uint8)
    found, wide = (
        decode(name, rows, dtype).dequantize() for dtype in (torch.float16, torch.float32)
    )
    assert not found[1, :32].isfinite().any() and found.isfinite().sum() == 4 * 64 - 32
    assert torch.equal(found.isnan(), wide.isnan())


def test_specs_of_super_blocks() -> None:
    for scheme in SCHEMES.values():
        assert lowbit.Scheme.from_dict(scheme.to_dict()) == scheme
        assert lowbit.formats.grid("gguf", scheme) == scheme
    with pytest.raises(ValueError, match="3 bits, 16, 'symmetric'"):
        Spec(Int(3), PerGroup(32), scale_format="super_block")
    with pytest.raises(ValueError, match="without a scale_dtype"):
        Spec(Int(6), PerGroup(16), scale_format="super_block", scale_dtype=torch.float16)
    with pytest.raises(FormatError, match="unknown type 'Q7_K'; lowbit writes MXFP4"):
        gguf_scheme("Q7_K")
    with pytest.raises(FormatError, match="Q4_K_M, are those of gguf_mix"):
        gguf_scheme("Q4_K_M")
    with pytest.raises(
        FormatError, match=r"unknown mix 'Q4_K'; accepted: Q2_K.*gguf_scheme\('Q4_K'\)"
    ):
        gguf_mix("Q4_K", CONFIG)


def types_of(name: str, config: dict[str, Any]) -> dict[str, str]:
    names = {id(scheme): kind for kind, scheme in SCHEMES.items()}
    return {key: names[id(scheme)] for key, scheme in gguf_mix(name, config).items()}


def layers_with(found: dict[str, str], module: str, kind: str) -> list[int]:
    return [i for i in range(16) if found.get(f"model.layers.{i}.{module}") == kind]


def test_types_of_mixes() -> None:
    """Those of llama.cpp's quantizer for the same model of 16 layers."""
    found = types_of("Q4_K_M", CONFIG)
    for module in ("self_attn.v_proj", "mlp.down_proj"):
        assert layers_with(found, module, "Q6_K") == [0, 1, 4, 7, 10, 13, 14, 15]
    assert found["lm_head"] == "Q6_K" and found["model.embed_tokens"] == "Q4_K"
    found = types_of("Q2_K", CONFIG)
    assert (
        found["model.layers.3.self_attn.v_proj"] == "Q3_K" == found["model.layers.3.mlp.down_proj"]
    )
    assert found["model.layers.3.self_attn.o_proj"] == "Q3_K"
    assert found["model.layers.3.self_attn.q_proj"] == "Q2_K" == found["model.embed_tokens"]
    found = types_of("Q2_K", {**CONFIG, "num_key_value_heads": 2})
    assert found["model.layers.3.self_attn.v_proj"] == "Q4_K"
    found = types_of("Q3_K_M", CONFIG)
    assert layers_with(found, "self_attn.v_proj", "Q5_K") == [0, 1]
    assert layers_with(found, "mlp.down_proj", "Q5_K") == [0]
    assert (
        found["model.layers.5.self_attn.o_proj"] == "Q4_K" == found["model.layers.5.mlp.down_proj"]
    )
    found = types_of("Q4_K_S", CONFIG)
    assert layers_with(found, "self_attn.v_proj", "Q5_K") == [0, 1, 2, 3]
    assert layers_with(found, "mlp.down_proj", "Q5_K") == [0, 1]
    found = types_of("Q4_K_M", {**CONFIG, "hidden_size": 96, "tie_word_embeddings": True})
    assert found["model.embed_tokens"] == "Q8_0" and "lm_head" not in found
    assert found["model.layers.2.self_attn.q_proj"] == "Q5_0"
    assert found["model.layers.2.mlp.down_proj"] == "Q4_K"
    with pytest.raises(FormatError, match=r"mlp\.down_proj has 500 inputs"):
        gguf_mix("Q4_K_M", {**CONFIG, "intermediate_size": 500})


@pytest.mark.parametrize(
    ("kind", "heads", "largest"),
    [("llama", 1, True), ("llama", 2, True), ("mistral", 4, True), ("llama", 8, False),
     ("qwen2", 2, True), ("qwen2", 8, True), ("qwen3", 2, False)],
)  # fmt: skip
def test_values_of_a_70b_model_have_more_bits(kind: str, heads: int, largest: bool) -> None:
    """As in llama.cpp, which knows a 70B model by its architecture, layers and heads: LLaMA 65B has 80 layers, too, and
    as many key heads as query heads."""
    sizes = {"num_hidden_layers": 80, "num_attention_heads": 8, "num_key_value_heads": heads}
    config = {**CONFIG, "model_type": kind, **sizes}
    for name, most in (("Q4_K_M", "Q4_K"), ("Q3_K_S", "Q3_K"), ("Q4_K_S", "Q4_K"), ("Q2_K", "")):
        found, other = types_of(name, config), types_of(name, {**config, "num_hidden_layers": 48})
        values = [found[f"model.layers.{i}.self_attn.v_proj"] for i in range(80)]
        usual = most or other["model.layers.20.self_attn.v_proj"]
        assert ("Q5_K" if largest else usual) == values[20]
        assert found["model.layers.20.self_attn.q_proj"] == (most or "Q2_K")
        assert "Q5_K" not in values[10:] or largest


@pytest.mark.parametrize("model", [None, "folder", nn.Linear(256, 256)])
def test_what_is_no_model_of_transformers_is_named(model: Any) -> None:
    with pytest.raises(
        FormatError, match=rf"given a {type(model).__name__}; .* config.json as a dict"
    ):
        gguf_mix("Q4_K_M", model)


@pytest.mark.parametrize("name", ["Q4_K_M", "MXFP4"])
def test_whole_files(name: str, tmp_path: Path) -> None:
    """From a folder by name, and from a module that was calibrated, read back to the bit."""
    gguf = pytest.importorskip("gguf")
    from tests.formats.test_gguf import llama, tokenizer

    sizes = {"hidden_size": 256, "intermediate_size": 256}
    model = llama(lowbit.Int8WeightOnly(), dtype=torch.float32, **sizes)
    lowbit.dequantize_(model)
    words = tokenizer(tmp_path / "plain")
    model.save_pretrained(words)
    schemes = gguf_mix(name, model)
    report = lowbit.export(words, tmp_path / "folder.gguf", "gguf", scheme=name)
    assert len(report.converted) == len(schemes) == 16
    lowbit.calibrate(model, schemes, [torch.randint(300, (4, 32))])
    lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    read = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    kinds = {t.name: t.tensor_type.name for t in read}
    assert kinds["blk.0.attn_q.weight"] == {"Q4_K_M": "Q4_K"}.get(name, name)
    assert kinds["output.weight"] == ("Q8_0" if name == "MXFP4" else "Q6_K")
    other, tokens = lowbit.load_pretrained(tmp_path / "model.gguf"), torch.arange(10)[None]
    wanted = model(tokens).logits
    assert (other(tokens).logits.float() - wanted).norm() / wanted.norm() < 0.01  # it is in float16
    lowbit.export(other, tmp_path / "again.gguf", "gguf", tokenizer=words)
    again = gguf.GGUFReader(tmp_path / "again.gguf").tensors
    for one, two in zip(read, again, strict=True):
        assert one.name == two.name and (one.data == two.data).all()
    with pytest.raises(FormatError, match="names a mix of gguf, got the format lowbit"):
        lowbit.export(words, tmp_path / "other", "lowbit", scheme=name)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_search_on_a_gpu(kind: str) -> None:
    x, spec, h = draw("t(5)"), scheme_of(kind), importance()
    own = error(x, spec, spec.search_qparams(x, torch.float32, h), h)
    scale, zero = spec.search_qparams(x.cuda(), torch.float32, h.cuda())
    found = (scale.cpu(), None if zero is None else zero.cpu())
    assert abs(error(x, spec, found, h) - own) < 2e-3 * own
    assert spec.super_blocks is not None and spec.super_blocks.fields(*found) is not None


def test_all_mixes_have_schemes() -> None:
    for name in MIXES:
        found = gguf_mix(name, CONFIG)
        assert len(found) == 16 * 7 + 2
        assert all(isinstance(s.weight.super_blocks, SuperBlocks | None) for s in found.values())
