"""The operations of a decode step besides linears, against float64: on a CPU, in Triton's interpreter, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.decode import ops
from tests.kernels.interpreted import interpreted
from tests.schemes import relative_error


def case(batch: int, heads: int, kv_heads: int, width: int, positions: int):
    """query, key, value, x, eps, cos, sin, and the two caches; the first three as slices of one tensor."""
    joint = torch.randn(batch, 1, (heads + 2 * kv_heads) * width)
    sizes = (heads * width, kv_heads * width, kv_heads * width)
    new = [t.view(batch, 1, -1, width).transpose(1, 2) for t in joint.split(sizes, -1)]
    angle = torch.rand(positions, width // 2) * 6
    caches = [torch.randn(batch, kv_heads, positions, width) for _ in range(2)]
    x = torch.randn(batch, 1, heads * width + 3) * torch.arange(1, batch + 1)[:, None, None]
    return [*new, x, 1e-5, angle.cos(), angle.sin(), *caches]


def factor(x: Tensor, eps: float) -> Tensor:
    return (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.double().chunk(2, -1)
    cos, sin = cos.to(x.dtype).double(), sin.to(x.dtype).double()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def exact(
    query, key, value, x, eps, cos, sin, keys, values, last: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the two caches, in float64."""
    keys, values = keys.double(), values.double()
    cos, sin, scale = cos[last], sin[last], factor(x, eps)[:, None]
    keys[:, :, last] = (rotated(key, cos, sin) * scale)[:, :, 0]
    values[:, :, last] = (value.double() * scale)[:, :, 0]
    shared = query.shape[1] // keys.shape[1]
    seen = [t[:, :, : last + 1].repeat_interleave(shared, 1) for t in (keys, values)]
    scores = rotated(query, cos, sin) * scale @ seen[0].transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ seen[1], keys, values


def check_attention(attend: Any, parts: list[Any], last: int, bound: float) -> None:
    """Check the result and the caches, of which the op must not read position `last` and beyond."""
    *new, keys, values = parts
    keys, values = keys.clone(), values.clone()
    keys[:, :, last:], values[:, :, last:] = 1e9, 1e9
    y, expected_keys, expected_values = exact(*new, keys, values, last)
    position = torch.tensor([last], device=keys.device)
    if keys.is_cuda:  # the caches must be older than the previous launch
        torch.cuda.synchronize()
    got = attend(*new, position, keys, values)
    assert relative_error(got, y) < bound
    for cache, expected in ((keys, expected_keys), (values, expected_values)):
        assert torch.equal(cache[:, :, :last].double(), expected[:, :, :last])
        assert relative_error(cache[:, :, last], expected[:, :, last]) < bound
        assert bool((cache[:, :, last + 1 :] == 1e9).all())


SIZES = [(1, 4, 2, 16, 48), (2, 6, 2, 32, 300), (1, 8, 8, 16, 130)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention_sees_the_positions_so_far(size: tuple[int, ...]) -> None:
    for last in (0, 1, size[-1] // 3, size[-1] - 1):
        check_attention(ops.decode_attention, case(*size), last, 1e-6)


def test_the_attention_op_is_sound() -> None:
    *new, keys, values = case(2, 6, 2, 16, 40)
    torch.library.opcheck(ops.decode_attention, (*new, torch.tensor([17]), keys, values))


def check_between(norm: Any, gate: Any, batch: int, width: int, like: Tensor, bound: float) -> None:
    """Rows with outliers, huge and tiny values, zeros and a NaN; gate and up as slices of one tensor."""
    x = torch.randn(batch, 1, width).to(like) * torch.tensor([1e-3, 1.0, 1e3])[
        :batch, None, None
    ].to(like)
    x[0, 0, 0] *= 100
    weight, eps = torch.randn(width).to(like), 1e-5
    exact = x.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    got = norm(x, weight, eps)
    assert got.dtype == x.dtype and got.is_contiguous()
    for row, expected in zip(got, exact, strict=True):
        assert relative_error(row, expected) < bound
    assert not norm(torch.zeros_like(x), weight, eps).any()
    both = torch.cat([x, torch.randn(batch, 1, width).to(like)], -1)
    first, second = both.split(width, -1)
    before = torch.randn(batch, 1, width // 2 + 3).to(like) * 3
    if like.is_cuda:  # it must be older than the previous launch
        torch.cuda.synchronize()
    got = gate(first, second, before, eps)
    assert got.dtype == x.dtype and got.is_contiguous()
    scale = factor(before, eps)
    exact = F.silu(first.double() * scale) * second.double() * scale
    for row, expected in zip(got, exact, strict=True):
        assert relative_error(row, expected) < bound
    x[-1, 0, -1] = torch.nan
    assert norm(x, weight, eps)[-1].isnan().all() and not norm(x, weight, eps)[:-1].isnan().any()
    assert gate(x, x, before, eps).isnan().sum() == 1


BETWEEN = [(1, 64), (3, 1031), (2, 1), (3, 4096)]


@pytest.mark.parametrize("size", BETWEEN, ids=str)
def test_rms_norm_and_silu_mul(size: tuple[int, int]) -> None:
    check_between(ops.rms_norm, ops.silu_mul, *size, torch.empty(0), 1e-6)
    check_between(ops.rms_norm, ops.silu_mul, *size, torch.empty(0).bfloat16(), 5e-3)
    x, weight = torch.randn(2, 1, 24), torch.randn(24)
    torch.library.opcheck(ops.rms_norm, (x, weight, 1e-5))
    torch.library.opcheck(ops.silu_mul, (x, torch.randn(2, 1, 48)[..., 24:], x, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("size", BETWEEN, ids=str)
def test_rms_norm_and_silu_mul_on_a_gpu(size: tuple[int, int]) -> None:
    check_between(ops.rms_norm, ops.silu_mul, *size, torch.empty(0).cuda(), 1e-5)
    like = torch.empty(0).cuda().bfloat16()
    check_between(ops.rms_norm, ops.silu_mul, *size, like, 5e-3)


def check_choice(choose: Any, logits: Tensor) -> None:
    """The first of equal logits is chosen; with NaNs, still a token of the vocabulary."""
    batch, device = logits.shape[0], logits.device
    token = torch.full((batch, 1), -1, device=device)
    position = torch.tensor([7], device=device)
    choose(logits, token, position)
    assert torch.equal(token, logits.argmax(-1)) and position.item() == 8
    choose(torch.full_like(logits, torch.nan), token, position)
    assert bool(((token >= 0) & (token < logits.shape[-1])).all()) and position.item() == 9


CHOICES = [1, 100, 1024, 5000]


@pytest.mark.parametrize("size", CHOICES)
def test_the_next_token(size: int) -> None:
    check_choice(ops.next_token, torch.randint(-9, 9, (3, 1, size)).float())
    token, position = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    torch.library.opcheck(ops.next_token, (torch.randn(2, 1, size), token, position))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*CHOICES, 128_256])
def test_the_next_token_on_a_gpu(size: int) -> None:
    logits = torch.randint(-9, 9, (3, 1, size), device="cuda").bfloat16()
    check_choice(ops.next_token, logits)


INTERPRETED = """
import torch
from recipes.decode.kernels import argmax_token, decode_attention, rms_norm, silu_mul
from tests.recipes.test_decode_ops import (
    BETWEEN, CHOICES, SIZES, case, check_attention, check_between, check_choice
)

torch.manual_seed(0)
for size in BETWEEN:
    check_between(rms_norm, silu_mul, *size, torch.empty(0), 1e-6)
for size in CHOICES:
    check_choice(argmax_token, torch.randint(-9, 9, (3, 1, size)).float())
for size in SIZES:
    for last in (0, 1, 63, 64, size[-1] // 3, size[-1] - 1):
        if last < size[-1]:
            check_attention(decode_attention, case(*size), last, 1e-6)
print("true")
"""


def test_the_kernels_in_the_interpreter() -> None:
    """In a separate process, because Triton reads TRITON_INTERPRET when it is imported."""
    assert interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 32, 8, 128, 1024), (16, 32, 8, 128, 2304), (3, 6, 2, 64, 77)])
def test_the_attention_kernels_on_a_gpu(size: tuple[int, ...]) -> None:
    parts = [t if isinstance(t, float) else t.cuda().bfloat16() for t in case(*size)]
    for last in (0, 5, size[-1] // 2, size[-1] - 1):
        check_attention(ops.decode_attention, parts, last, 5e-3)
