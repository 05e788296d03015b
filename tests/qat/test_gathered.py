"""The form that FSDP2 gathers of a QAT weight has the products and gradients of the weight itself, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit
from lowbit import FakeQuantizedTensor, Float8, Int, PerGroup, PerRow, Scheme, Spec
from lowbit.linear import fused_rounding
from lowbit.numerics.affine import MAPPINGS
from lowbit.tensor.trained.learned_scales import scales_of
from lowbit.tensor.trained.packed_codes import packed, unpacked
from lowbit.tensor.trained.quantizers import PRESENT, PresentScales
from lowbit.testing.comparison import same_bits, values
from lowbit_kernels.runtime.launches import counted
from tests.as_sent import as_sent

FORMATS = {
    f"{'int' if signed else 'uint'}{bits}": Int(bits, signed)
    for bits in range(2, 9)
    for signed in (True, False)
}


PACKED = PresentScales(packs=True)


def _check(spec: Spec, packs: bool = False, shape: tuple[int, ...] = (9, 40)) -> torch.Tensor:
    """Returns the codes that travel."""
    weight = FakeQuantizedTensor(values(shape), Scheme(spec))
    if packs:
        weight.quantizer = PACKED
    sent = as_sent(weight)
    own, gathered = nn.Parameter(weight), nn.Parameter(sent)
    assert type(gathered) is not type(own)
    assert same_bits(gathered.dequantize(), own.dequantize())
    x = torch.randn(5, shape[-1])
    expected = torch.autograd.grad(F.linear(x, own).square().sum(), own)[0]
    found = torch.autograd.grad(F.linear(x, gathered).square().sum(), gathered)[0]
    assert torch.equal(found, expected) and found.any()
    return sent.codes


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_codes_that_clip_are_distinguished(fmt: Int, mapping) -> None:
    for granularity in (PerRow(), PerGroup(16)):
        spec = Spec(fmt, granularity, mapping)
        codes = _check(spec)
        words = _check(spec, packs=True)
        assert (words.dtype is torch.int64) == (fmt.bits <= 6)
        if fmt.bits <= 6:
            size, clips = codes.shape[-1], spec.may_clip(torch.float32)
            assert same_bits(unpacked(words, spec, clips, size), codes)


@pytest.mark.parametrize("mapping", ["symmetric", "symmetric_no_clipping_err"])
def test_packed_tables(mapping) -> None:
    """Tables travel as codes only when packed; with the values of "symmetric" many clip. -0.0 keeps its sign."""
    tables = (lowbit.MXFP4WeightOnly(mapping), lowbit.NF4WeightOnly(16))
    for scheme in tables:
        weight = FakeQuantizedTensor(torch.randn(9, 40), scheme)
        assert as_sent(weight) is weight
        for shape in ((9, 40), (1, 32), (64, 96)):
            assert _check(scheme.weight, True, shape).dtype is torch.int64
        for bad in (torch.nan, torch.inf, -torch.inf):
            weight.weight[1, 20] = bad
            weight.quantizer = PACKED
            found, own = as_sent(weight).dequantize(), weight.dequantize()
            torch.testing.assert_close(found, own, rtol=0, atol=0, equal_nan=True)
    e2m1 = tables[0].weight
    codes = torch.tensor([[*e2m1.format.values, torch.inf, -torch.inf]])
    assert same_bits(unpacked(packed(codes, e2m1, True), e2m1, True, 18), codes)


def test_packed_words_hold_what_63_bits_can() -> None:
    for bits, clips, digits in ((4, True, 15), (4, False, 15), (2, False, 31), (1, False, 63)):
        spec = Spec(Int(bits, signed=False), PerRow(), "asymmetric")
        codes = torch.arange(-clips, 2**bits + clips).repeat(63)[None].to(torch.int8)
        words = packed(codes, spec, clips)
        assert words.shape[1] == -(-codes.shape[1] // digits) and bool((words >= 0).all())
        assert torch.equal(unpacked(words, spec, clips, codes.shape[1]).to(torch.int8), codes)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_float8(dtype: torch.dtype) -> None:
    _check(Spec(Float8(dtype), PerRow()))


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_values_are_float32_whatever_the_dtype_of_the_scales(mapping, scales: torch.dtype) -> None:
    spec = Spec(Int(4), PerGroup(16), mapping, scale_dtype=scales)
    _check(spec)
    model = nn.Sequential(nn.Linear(40, 9))
    lowbit.qat.prepare_(model, Scheme(spec), scales="learned")
    layer = model[0]
    scale, zero = scales_of(layer, "weight")
    values = layer.weight.quantized_by(scale, zero)
    gathered = as_sent(layer.weight, layer).decoded_values()
    assert gathered.dtype is torch.float32 and torch.equal(gathered, values)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_kernel_of_codes(fmt: Int, mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op runs on a CPU by PyTorch's operations. It serves whole groups; others are padded before."""
    monkeypatch.setattr(fused_rounding, "runs", lambda *_: True)
    for granularity, shape in (
        (PerRow(), (9, 40)),
        (PerGroup(8), (9, 40)),
        (PerGroup(8), (2, 3, 40)),
        (PerGroup(16), (9, 40)),
    ):
        spec, weight = Spec(fmt, granularity, mapping), torch.randn(shape)
        for dtype in (torch.float32, torch.bfloat16):
            with counted() as calls:
                found = fused_rounding.unclamped_codes(weight, spec, dtype)
            by_op = granularity != PerGroup(16)
            assert dict(calls) == ({("fake_quantize_codes", "torch"): 1} if by_op else {})
            for own, wanted in zip(found, spec.unclamped_codes(weight, dtype), strict=True):
                assert (own is None) == (wanted is None)
                if own is not None:
                    assert own.dtype is wanted.dtype and torch.equal(own, wanted)
    _check(Spec(fmt, PerGroup(8), mapping))


def test_one_byte_an_element() -> None:
    weight = FakeQuantizedTensor(torch.randn(8, 64), lowbit.Int4WeightOnly(group_size=32))
    codes = as_sent(weight).codes
    assert codes.dtype is torch.int8 and codes.shape == (8, 64)
    weight = FakeQuantizedTensor(torch.randn(8, 64), lowbit.Int8DynamicActivationInt8Weight())
    assert as_sent(weight).codes.dtype is torch.int8  # of which none clips


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("quantizer", [PRESENT, PACKED], ids=["bytes", "packed"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_nan_and_infinity_are_the_same(
    fmt: Int, mapping, bad: float, quantizer: PresentScales
) -> None:
    """The values and the gradient of a weight that diverged in training."""
    weight = FakeQuantizedTensor(torch.randn(3, 40), Scheme(Spec(fmt, PerGroup(16), mapping)))
    weight.weight[1, 20] = bad
    weight.quantizer = quantizer
    own, gathered = nn.Parameter(weight), nn.Parameter(as_sent(weight))
    values = own.dequantize()
    broken = torch.zeros(3, 40, dtype=torch.bool)
    broken[1, 16:32] = True
    assert torch.equal(~values.isfinite(), broken)
    torch.testing.assert_close(gathered.dequantize(), values, rtol=0, atol=0, equal_nan=True)
    expected = torch.autograd.grad(own.fake_quantized().sum(), own)[0]
    found = torch.autograd.grad(gathered.fake_quantized().sum(), gathered)[0]
    assert torch.equal(found, expected)
