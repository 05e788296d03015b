"""QAT of plain float32, bfloat16 and float16 models on the grid of a format: exported as it was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit import (
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    MXFP4WeightOnly,
    NF4WeightOnly,
    Scheme,
    qat,
)
from lowbit.formats import FormatError, grid
from lowbit.formats.gguf import blocks as gguf_blocks
from lowbit.formats.registry import by_name
from tests.formats.codec_case import assert_same, through
from tests.formats.models import build, plain_folder

HELD = {
    "gptq": (Int4WeightOnly(64), Int8WeightOnly(), lowbit.Int2WeightOnly()),
    "gptq_v2": (IntxWeightOnly(4, 32, "asymmetric"),),
    "awq": (Int4WeightOnly(64), IntxWeightOnly(4, 32, "asymmetric")),
    "bitsandbytes-int8": (Int8WeightOnly(), Int8DynamicActivationInt8Weight()),
    "gguf": (Int4WeightOnly(32), IntxWeightOnly(4, 32, "asymmetric"), Int8WeightOnly(32)),
}
CASES = [(format, scheme) for format, schemes in HELD.items() for scheme in schemes]
KINDS = {"symmetric": "Q4_0", "asymmetric": "Q4_1"}


def trained(scheme: Scheme, dtype: torch.dtype, scales: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight after two steps of QAT, in low bits, and the values that its products had."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64)).to(dtype)
    qat.prepare_(model, scheme, scales=scales)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 128, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    values = model(torch.eye(128, dtype=dtype)) if scheme.activation is None else None
    bias = model[0].bias
    qat.convert_(model)
    weight = model[0].weight
    wanted = (model(torch.eye(128, dtype=dtype)) if values is None else values) - bias
    return weight, wanted.mT


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("format", "scheme"), CASES)
def test_exported_to_the_bit_after_qat(
    format: str, scheme: Scheme, dtype: torch.dtype, scales: str
) -> None:
    own = grid(format, scheme)
    weight, products = trained(own, dtype, scales)
    assert isinstance(weight, lowbit.AffineTensor)
    if dtype is torch.float32:  # elsewhere the bias rounds the products
        torch.testing.assert_close(products, weight.dequantize(), rtol=1e-2, atol=1e-3)
    if format != "gguf":
        assert_same(through(by_name(format), weight), weight)
        return
    kind, rows = gguf_blocks.encode(weight)
    bits, name = scheme.weight.format.bits, scheme.weight.mapping.removesuffix("_no_clipping_err")
    assert kind == ("Q8_0" if bits == 8 else KINDS[name])
    assert_same(gguf_blocks.decode(kind, rows, weight.dtype), weight)


def test_without_the_grid_a_float32_model_does_not_fit(tmp_path: Path) -> None:
    model = nn.ModuleDict({"up": nn.Linear(128, 64)})
    lowbit.quantize_(model, Int4WeightOnly(64))
    with pytest.raises(FormatError, match=r"which cannot.*formats.grid\('gptq', scheme\)"):
        lowbit.export(model, tmp_path / "out", "gptq")
    model = nn.ModuleDict({"up": nn.Linear(128, 64)})
    lowbit.quantize_(model, Int8DynamicActivationInt8Weight())
    with pytest.raises(FormatError, match=r"rounds no inputs.*lossy=True") as caught:
        lowbit.export(model, tmp_path / "out", "gptq")
    assert "formats.grid" not in str(caught.value)


def test_what_a_grid_says() -> None:
    assert grid("compressed-tensors", Int4WeightOnly()) == Int4WeightOnly()
    assert grid("awq", Int4WeightOnly()) == Int4WeightOnly(scale_dtype=torch.float16)
    chosen = grid("gptq", {"lm_head": None, "*": Int8WeightOnly()})
    assert chosen == {"lm_head": None, "*": Int8WeightOnly(scale_dtype=torch.float16)}
    own = Int4WeightOnly(scale_dtype=torch.float32)
    assert grid("executorch", own) is own
    assert grid("executorch", Int4WeightOnly()).weight.scale_dtype is torch.bfloat16
    assert grid("mxfp4", MXFP4WeightOnly()).weight.granularity == lowbit.PerBlock(32, 1)
    static = lowbit.Int8StaticActivationInt8Weight()
    assert grid("compressed-tensors", static) == static


@pytest.mark.parametrize(
    ("format", "scheme", "why"),
    [
        ("gptq", IntxWeightOnly(5), "gptq cannot hold weights of this scheme"),
        ("awq", Float8WeightOnly(), "awq holds integers"),
        ("gguf", Int4WeightOnly(48), "groups of 32"),
        ("fp8", Int4WeightOnly(), "128 x 128"),
        ("compressed-tensors", NF4WeightOnly(), "compressed-tensors cannot hold"),
        ("gptq", Int4WeightOnly(scale_dtype=torch.float32), "float16"),
        ("ggml", Int4WeightOnly(), "unknown format 'ggml'; accepted"),
    ],
)
def test_refused_before_anything_is_trained(format: str, scheme: Scheme, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        grid(format, {"*": scheme})
    assert "\n" not in str(caught.value)


def test_no_scheme_is_a_type_error() -> None:
    for given in ("int4", {"*": "int4"}):
        with pytest.raises(TypeError, match="unknown scheme 'int4'; accepted: a Scheme"):
            grid("gptq", given)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="unknown scheme None"):
        grid("gptq", None)  # type: ignore[type-var]


@pytest.mark.parametrize("format", ["gptq", "awq", "bitsandbytes-int8"])
def test_a_float32_folder_is_quantized_on_the_grid(format: str, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "plain", build(dtype=torch.float32), dtype="float32")
    scheme = Int8WeightOnly() if format.startswith("bits") else Int4WeightOnly(64)
    report = lowbit.export(folder, tmp_path / "out", format, scheme={"*_proj": scheme})
    assert sorted(report.converted) == ["down_proj.weight", "up_proj.weight"]
    assert min(report.snr.values()) > 15
