"""The half-integer grid: its values by hand, its zero points, and that every path gives the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
bits_of_every_width = pytest.mark.parametrize("bits", range(1, 9))


def spec_of(bits: int, group: int = 8, signed: bool = True) -> lb.Spec:
    return lb.Spec(lb.Int(bits, signed), lb.PerGroup(group), "half_integer")


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_two_bits_by_hand(signed: bool) -> None:
    x = torch.tensor([[-3.0, -0.9, 1.1, 2.5, 0.1, -0.1, 1.9, 2.1]])
    codes, scale, zero_point = spec_of(2, signed=signed).quantize(x)
    assert scale.item() == 2 and zero_point is not None and zero_point.item() == 1
    low = -2 if signed else 0
    assert (codes - low).tolist() == [[0, 1, 2, 3, 2, 1, 2, 3]]
    values = spec_of(2, signed=signed).fake_quantize(x)
    assert values.tolist() == [[-3, -1, 1, 3, 1, -1, 1, 3]]


def test_one_bit_by_hand() -> None:
    x = torch.tensor([[-3.0, -0.9, 1.1, 2.5, 0.1, -0.1, 1.9, 2.1]])
    values = spec_of(1).fake_quantize(x)
    assert values.tolist() == [[-3, -3, 3, 3, 3, -3, 3, 3]]


@bits_of_every_width
def test_the_values_are_the_odd_multiples_of_half_a_step(bits: int) -> None:
    spec = spec_of(bits, group=2**bits)
    codes = torch.arange(2**bits).sub(2 ** (bits - 1)).to(torch.int8).view(1, -1)
    values = spec.dequantize(
        codes, torch.full((1, 1), 2.0), torch.ones(1, 1), codes.shape, torch.float32
    )
    assert torch.equal(values, codes * 2.0 + 1)
    assert torch.equal(values, -values.flip(1))  # symmetric around zero


def _signs(x: Tensor) -> Tensor:
    return torch.where(x < 0, -1.0, 1.0)


@bits_of_every_width
def test_nothing_clips_and_no_sign_changes(bits: int) -> None:
    x = torch.randn(64, 8)
    codes, _, _ = spec_of(bits).unclamped_codes(x, torch.float32)
    assert codes.min() >= -(2 ** (bits - 1)) and codes.max() <= 2 ** (bits - 1) - 1
    assert torch.equal(spec_of(bits).fake_quantize(x).sign(), _signs(x))


@dtypes
def test_a_zero_point_is_exactly_half_the_scale(dtype: torch.dtype) -> None:
    magnitudes = torch.logspace(-3, 3, 64)[:, None]
    _, scale, zero_point = spec_of(2).quantize((torch.randn(64, 8) * magnitudes).to(dtype), dtype)
    assert zero_point is not None and zero_point.dtype is scale.dtype is dtype
    assert torch.equal(zero_point.double() * 2, scale.double())


@dtypes
@bits_of_every_width
def test_the_prepared_weight_is_the_converted_one(bits: int, dtype: torch.dtype) -> None:
    """1,000 seeds over the widths and dtypes of odd shapes and many magnitudes, to the bit."""
    spec = spec_of(bits, group=5)
    for seed in range(42):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(3, 11, generator=generator) * 10.0 ** (seed % 9 - 6)
        x = x.to(dtype)
        codes, scale, zero_point = spec.quantize(x, dtype)
        values = spec.dequantize(codes, scale, zero_point, x.shape, dtype)
        assert torch.equal(spec.fake_quantize(x, dtype), values)
        weight = lb.AffineTensor.from_float(x, spec)
        assert torch.equal(weight.dequantize(), values)


def test_blocks_of_zeros_and_constants_are_finite() -> None:
    for dtype, value in itertools.product(DTYPES, (0.0, 1e-30, 3.0, -7.0)):
        x = torch.full((2, 8), value).to(dtype)
        values = spec_of(2).fake_quantize(x, dtype)
        assert values.isfinite().all()
        assert (values - x).abs().max() <= x.abs().max() * 0.01 + torch.finfo(dtype).tiny


def test_a_model_is_converted_described_saved_and_loaded(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8))
    schemes = {"0": lb.Int2WeightOnly(16), "1": lb.Int1WeightOnly()}
    report = lb.quantize_(model, schemes)
    assert "Int(bits=2, signed=True), PerGroup(group_size=16), half_integer" in str(report)
    x = torch.randn(3, 40)
    expected = F.linear(x, model[0].weight.dequantize(), model[0].bias)
    torch.testing.assert_close(model[0](x), expected)
    lb.save(model, tmp_path / "model.safetensors")
    again = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8))
    again.load_state_dict(lb.load(tmp_path / "model.safetensors"), assign=True)
    assert torch.equal(again(x), model(x))
    assert again[0].weight.spec == schemes["0"].weight
    state = {name: t.clone() for name, t in model.state_dict().items()}
    again.load_state_dict(state)
    assert torch.equal(again(x), model(x))


def test_qat_trains_and_converts_to_the_bit() -> None:
    model = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 8))
    lb.qat.prepare_(model, lb.Int2WeightOnly(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(16, 40)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared = model(x)
    lb.qat.convert_(model)
    assert torch.equal(model(x), prepared)
