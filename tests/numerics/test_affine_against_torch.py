"""lowbit.numerics.affine equals torch's own quantized ops and observers to the last bit, wherever torch has them.

One order everywhere in lowbit: round(x · 1/scale) + zero_point. torch's per-token and per-group ops round after adding
the zero point, so there, with an odd zero point, an exact tie may fall to the neighbour: see the test of that name.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from torch import Tensor
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

from lowbit.numerics.affine import (
    choose_qparams_affine,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
)

ops = torch.ops.quantized_decomposed
EPS = torch.finfo(torch.float32).eps
RANGES = {
    "int8": (torch.int8, -128, 127),
    "uint8": (torch.uint8, 0, 255),
    "int4": (torch.int8, -8, 7),
    "uint4": (torch.uint8, 0, 15),
    "int2": (torch.int8, -2, 1),
    "int16": (torch.int16, -32768, 32767),
}
N, K, GROUP = 37, 96, 32

ranges = pytest.mark.parametrize("kind", RANGES)


def inputs(scale: Tensor | float) -> dict[str, Tensor]:
    """[N, K] inputs: plain, beyond the range on both sides, at exact ties of `scale`, and short of precision."""
    x = torch.randn(N, K)
    half_steps = torch.randint(-40, 40, (N, K)) / 2
    return {
        "normal": x * 3,
        "wide": x * 1000,
        "ties": half_steps * scale,
        "bf16": x.bfloat16(),
        "fp16": x.half(),
        "columns": (x * 3).t().contiguous().t(),
    }


INPUTS = list(inputs(1.0))


def make(kind: str, name: str, count: int, zero: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """An input, `count` scales (for ties: powers of two, so that ties are exact) and `count` zero points."""
    _, low, high = RANGES[kind]
    scale = torch.rand(count) * 0.2 + 0.01
    if name == "ties":
        scale = torch.full((count,), 0.25)
    zero_point = torch.zeros(count, dtype=torch.int32)
    if not zero:
        zero_point = torch.randint(max(low, -100), min(high, 100) + 1, (count,), dtype=torch.int32)
    return inputs(0.25)[name], scale, zero_point


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert torch.equal(ours, theirs), f"{(ours != theirs).sum().item()} of {ours.numel()} differ"


@ranges
@pytest.mark.parametrize("name", INPUTS)
def test_per_tensor(kind: str, name: str) -> None:
    dtype, low, high = RANGES[kind]
    x, scale, zp = make(kind, name, 1)
    s, z = scale.item(), int(zp)
    codes = quantize_affine(x, (N, K), scale, zp, dtype, low, high)
    assert_same(codes, ops.quantize_per_tensor(x, s, z, low, high, dtype))
    back = dequantize_affine(codes, (N, K), scale, zp, low, high)
    assert_same(back, ops.dequantize_per_tensor(codes, s, z, low, high, dtype))


@pytest.mark.cover("pairs")
@ranges
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_per_channel(kind: str, name: str, axis: int) -> None:
    dtype, low, high = RANGES[kind]
    x, scale, zp = make(kind, name, (N, K)[axis])
    block = (1, K) if axis == 0 else (N, 1)
    codes = quantize_affine(x, block, scale, zp, dtype, low, high)
    assert_same(codes, ops.quantize_per_channel(x, scale, zp, axis, low, high, dtype))
    back = dequantize_affine(codes, block, scale, zp, low, high)
    assert_same(back, ops.dequantize_per_channel(codes, scale, zp, axis, low, high, dtype))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_per_channel_of_four_dimensions(axis: int) -> None:
    shape = [5, 3, 2, 7]
    x = torch.randn(shape)
    scale, zp = torch.rand(shape[axis]) + 0.01, torch.randint(-9, 9, (shape[axis],))
    block = [1 if d == axis else size for d, size in enumerate(shape)]
    codes = quantize_affine(x, block, scale, zp, torch.int8, -128, 127)
    assert_same(codes, ops.quantize_per_channel(x, scale, zp, axis, -128, 127, torch.int8))


def per_token(x: Tensor, scale: Tensor, zp: Tensor, kind: str) -> Tensor:
    dtype, low, high = RANGES[kind]
    return ops.quantize_per_token(x.float(), scale[:, None], zp[:, None], low, high, dtype)


def per_group(x: Tensor, scale: Tensor, zp: Tensor, kind: str) -> Tensor:
    dtype, low, high = RANGES[kind]
    return ops.quantize_per_channel_group(x.float(), scale, zp, low, high, dtype, GROUP)


ROWWISE = {"token": (per_token, (1, K), N), "group": (per_group, (1, GROUP), N * K // GROUP)}
rowwise = pytest.mark.parametrize("op", ROWWISE)
Theirs = Callable[[Tensor, Tensor, Tensor, str], Tensor]


@pytest.mark.cover("pairs")
@ranges
@pytest.mark.parametrize("name", INPUTS)
@rowwise
def test_per_token_and_group_without_zero_point(kind: str, name: str, op: str) -> None:
    dtype, low, high = RANGES[kind]
    theirs, block, count = ROWWISE[op]
    x, scale, zp = make(kind, name, count, zero=True)
    codes = quantize_affine(x, block, scale, zp, dtype, low, high)
    assert_same(codes, theirs(x, scale, zp, kind))


@pytest.mark.cover("pairs")
@ranges
@pytest.mark.parametrize("name", INPUTS)
@rowwise
def test_per_token_and_group_differ_only_at_ties(kind: str, name: str, op: str) -> None:
    """torch rounds x/scale + zp, lowbit x/scale: unequal only at a tie to float32 precision, and by one code."""
    dtype, low, high = RANGES[kind]
    theirs, block, count = ROWWISE[op]
    x, scale, zp = make(kind, name, count)
    ours = quantize_affine(x, block, scale, zp, dtype, low, high).long()
    differ = ours != theirs(x, scale, zp, kind).long()
    if name == "normal" and kind != "int16":
        assert differ.float().mean() < 1e-3
    step = (ours - theirs(x, scale, zp, kind).long())[differ]
    assert step.abs().eq(1).all()
    spread = [t.reshape(-1, 1).expand(-1, x.numel() // count).reshape(N, K) for t in (scale, zp)]
    exact = (x.float() * (1.0 / spread[0])).double()
    from_tie = ((exact - exact.floor()) - 0.5).abs()
    allowed = EPS * (exact.abs() + spread[1].abs())
    assert (from_tie[differ] <= allowed[differ]).all()


@ranges
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dequantize_per_token_and_group(kind: str, output_dtype: torch.dtype) -> None:
    dtype, low, high = RANGES[kind]
    codes = torch.randint(low, high + 1, (N, K)).to(dtype)
    _, scale, zp = make(kind, "normal", N)
    ours = dequantize_affine(codes, (1, K), scale, zp, low, high, output_dtype=output_dtype)
    args = (low, high, dtype, output_dtype)
    assert_same(ours, ops.dequantize_per_token(codes, scale[:, None], zp[:, None], *args))
    _, scale, zp = make(kind, "normal", N * K // GROUP)
    ours = dequantize_affine(codes, (1, GROUP), scale, zp, low, high, output_dtype=output_dtype)
    args = (low, high, dtype, GROUP, output_dtype)
    assert_same(ours, ops.dequantize_per_channel_group(codes, scale, zp, *args))


OBSERVED = {
    "normal": lambda: torch.randn(N, K),
    "positive": lambda: torch.rand(N, K) + 1,
    "negative": lambda: -torch.rand(N, K) - 1,
    "zeros": lambda: torch.zeros(N, K),
    "tiny": lambda: torch.randn(N, K) * 1e-9,
    "large": lambda: torch.randn(N, K) * 1e30,
}


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("data", OBSERVED)
@pytest.mark.parametrize("kind", ["int8", "int4", "int2"])
@pytest.mark.parametrize("mapping", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_observers_choose_the_same(data: str, kind: str, mapping: str, per: str) -> None:
    dtype, low, high = RANGES[kind]
    x = OBSERVED[data]()
    scheme = getattr(torch, f"per_{per}_{'symmetric' if mapping == 'symmetric' else 'affine'}")
    observer = {"tensor": MinMaxObserver, "channel": PerChannelMinMaxObserver}[per](
        dtype=torch.qint8, qscheme=scheme, quant_min=low, quant_max=high, eps=EPS
    )
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    block = (N, K) if per == "tensor" else (1, K)
    ours, ours_zp = choose_qparams_affine(x, mapping, block, dtype, low, high, eps=EPS)
    assert ours_zp is not None
    assert torch.equal(ours.reshape(-1), scale.float())
    assert torch.equal(ours_zp.reshape(-1).long(), zero_point.long())


@pytest.mark.parametrize("data", OBSERVED)
@pytest.mark.parametrize("mapping", ["symmetric", "asymmetric"])
def test_observers_choose_the_same_unsigned(data: str, mapping: str) -> None:
    x = OBSERVED[data]()
    scheme = torch.per_channel_symmetric if mapping == "symmetric" else torch.per_channel_affine
    observer = PerChannelMinMaxObserver(dtype=torch.quint8, qscheme=scheme, eps=EPS)
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    ours, ours_zp = choose_qparams_affine(x, mapping, (1, K), torch.uint8, eps=EPS)
    assert ours_zp is not None
    assert torch.equal(ours, scale) and torch.equal(ours_zp.long(), zero_point.long())


@pytest.mark.parametrize("data", OBSERVED)
def test_dynamic_per_token_ops_choose_the_same(data: str) -> None:
    """torch's symmetric per-token op spans −127..127. Its asymmetric one takes XNNPACK's zero point, from the end of
    the range that is nearer: one code off at most, where the scale is not the least one."""
    x = OBSERVED[data]()
    theirs, _ = ops.choose_qparams_per_token(x, torch.int8)
    args = (x, "symmetric", (1, K), torch.int8, -127, 127)
    ours, _ = choose_qparams_affine(*args, eps=1e-5 / 127, keepdim=True)
    torch.testing.assert_close(ours, theirs, rtol=EPS, atol=0)
    theirs, theirs_zp = ops._choose_qparams_per_token_asymmetric_impl(x, torch.int8)
    ours, zp = choose_qparams_affine(
        x, "asymmetric", (1, K), torch.int8, -128, 127, eps=EPS, keepdim=True
    )
    assert zp is not None
    assert torch.equal(ours, theirs.float())
    assert ((zp - theirs_zp).abs() <= 1)[ours > EPS].all()


@ranges
@pytest.mark.parametrize("name", ["normal", "wide", "ties"])
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_fake_quantize_value_and_gradient(kind: str, name: str, per: str) -> None:
    """The gradient passes where the code lies in the range before the clamp; `wide` has most of them outside."""
    dtype, low, high = RANGES[kind]
    x, scale, zp = make(kind, name, 1 if per == "tensor" else N)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    block = (N, K) if per == "tensor" else (1, K)
    y = fake_quantize_affine(ours, block, scale, zp, dtype, low, high)
    if per == "tensor":
        expected = torch.fake_quantize_per_tensor_affine(theirs, scale.item(), int(zp), low, high)
    else:
        expected = torch.fake_quantize_per_channel_affine(theirs, scale, zp, 0, low, high)
    assert_same(y.detach(), expected.detach())
    upstream = torch.randn_like(x)
    y.backward(upstream)
    expected.backward(upstream)
    assert ours.grad is not None and theirs.grad is not None
    assert_same(ours.grad, theirs.grad)
    if name == "wide" and kind == "int8":
        assert 0 < ours.grad.count_nonzero() < ours.grad.numel() / 2
