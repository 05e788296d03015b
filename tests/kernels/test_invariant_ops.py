"""The ops with the same bits everywhere: errors against float64, bits in Triton's interpreter and on a GPU, and that a
token's attention depends only on what the token sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit_kernels.invariant import arithmetic
from tests.kernels.interpreted import interpreted
from tests.schemes import relative_error

NAMES = [name for name in kernels.__all__ if name.startswith("invariant_")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of rounding a result to each dtype."""
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def cases(name: str, large: bool = False) -> list[Any]:
    every = import_module(f"benchmarks.cases.{name}").CASES
    return [case for case in every if large or not case.large]


def called(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    getattr(kernels, name)
    found = getattr(torch.ops.lowbit, name)(*arguments)
    return [found] if isinstance(found, Tensor) else list(found)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> list[Tensor]:
    wide = x.double()
    y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return [y * (weight.double() + offset)]


def activation(x: Tensor, kind: str) -> list[Tensor]:
    wide = x.double()
    return [F.silu(wide) if kind == "silu" else F.gelu(wide, approximate="tanh")]


def rotary(position: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> list[Tensor]:
    angle = (position[..., None].float() * inv_freq).double()
    return [torch.cat([f(angle)] * 2, -1) * scale for f in (torch.cos, torch.sin)]


def linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> list[Tensor]:
    wide = x.double()
    t = torch.maximum(-wide.amin(-1) / 128, wide.amax(-1) / 127).clamp(min=1e-300)[..., None]
    weight = codes.double() * scale.double()
    y = (wide / t).round().clamp(-128, 127) * t @ weight.T
    return [y if bias is None else y + bias.double()]


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> list[Tensor]:
    group = query.shape[1] // key.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (key, value))
    sees = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    sees = sees.tril(len(key[0, 0]) - query.shape[2]) if causal else sees
    sees = sees if mask is None else sees & mask
    scores = (query.double() @ k.mT * scale).masked_fill(~sees, -math.inf)
    return [(scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)]


ORACLES: dict[str, tuple[Callable[..., list[Tensor]], float]] = {
    "invariant_activation": (activation, 2e-7),
    "invariant_attention": (attention, 0.015),
    "invariant_linear": (linear, 2e-6),
    "invariant_norm": (norm, 2e-7),
    "invariant_rotary": (rotary, 2e-7),
}
"""The formula in float64, and the error of float32 results. Attention rounds its inputs to int8."""


@every_dtype
@pytest.mark.parametrize("name", NAMES)
def test_the_error_against_float64(name: str, dtype: torch.dtype) -> None:
    oracle, limit = ORACLES[name]
    for case in cases(name):
        torch.manual_seed(0)
        arguments = case.arguments(dtype=dtype)
        more = 0.1 if getattr(case, "spread", 1.0) > 1 else 0.0  # scores of 30 lose more
        pairs = zip(called(name, arguments), oracle(*arguments), strict=True)
        for got, wanted in pairs:
            assert got.shape == wanted.shape and got.dtype is dtype, case.name
            assert relative_error(got, wanted) <= limit + more + ROUNDING[dtype], case.name


@pytest.mark.parametrize("name", NAMES)
def test_the_ops_are_sound(name: str) -> None:
    getattr(kernels, name)
    for case in cases(name)[::2]:
        torch.library.opcheck(getattr(torch.ops.lowbit, name).default, case.arguments())


def check_bits(name: str, device: str, large: bool = False) -> None:
    """The kernel on `device` has the bits of the formula on the CPU."""
    for number, case in enumerate(cases(name, large)):
        for dtype in DTYPES if large else DTYPES[: 2 if number == 0 else 1]:
            torch.manual_seed(0)
            arguments = case.arguments(dtype=dtype)
            own = (a.to(device) if isinstance(a, Tensor) else a for a in arguments)
            wanted = getattr(kernels, name).reference(*arguments)
            wanted = [wanted] if isinstance(wanted, Tensor) else wanted
            for a, b in zip(called(name, tuple(own)), wanted, strict=True):
                assert torch.equal(a.cpu(), b), (name, case.name, dtype)


INTERPRETED = """
from tests.kernels.test_invariant_ops import NAMES, check_bits, check_nan

for name in NAMES:
    check_bits(name, "cpu")
check_nan("cpu")
print("true")
"""


def test_the_kernels_have_the_bits_of_the_formulas_in_the_interpreter() -> None:
    assert interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_have_the_bits_of_the_formulas_on_a_gpu(name: str) -> None:
    check_bits(name, "cuda", large=True)


@pytest.mark.gpu
def test_nan_on_a_gpu() -> None:
    check_nan("cuda")


def check_nan(device: str) -> None:
    """Rows with a NaN or an infinity give NaN. Other rows, and queries that do not see it, keep their bits."""
    for bad in (math.nan, math.inf):
        x = torch.randn(4, 8, device=device)
        x[1, 3] = bad
        y = kernels.invariant_norm.invariant_norm(x, torch.ones(8, device=device), eps=1e-5)
        assert y.isnan().all(1).tolist() == [False, True, False, False]
        q, k, v = (torch.randn(1, 1, 6, 16, device=device) for _ in range(3))
        clean = kernels.invariant_attention.invariant_attention(q, k, v, scale=0.25, causal=True)
        for part in (k, v):
            kept, part[0, 0, 4, 2] = part.clone(), bad
            y = kernels.invariant_attention.invariant_attention(q, k, v, scale=0.25, causal=True)
            assert torch.equal(y[:, :4], clean[:, :4]) and y[:, 4:].isnan().all()
            part.copy_(kept)
        q[0, 0, 2, 5] = bad
        y = kernels.invariant_attention.invariant_attention(q, k, v, scale=0.25, causal=True)
        assert y.isnan().all(-1).flatten().tolist() == [False, False, True, False, False, False]


def test_nan() -> None:
    check_nan("cpu")
    silu = kernels.invariant_activation.invariant_activation
    y = silu(torch.tensor([math.nan, -200.0, 200.0, 0.0]), kind="silu")
    assert y[0].isnan() and y[1].abs() < 1e-35 and y[2:].tolist() == [200.0, 0.0]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_attention_depends_on_what_a_query_sees_alone(data: st.DataObject) -> None:
    """Other sequences, padding at either side, chunks of queries and the order of the keys leave no trace."""
    dtype = data.draw(st.sampled_from(DTYPES))
    tokens, kv_heads, group = (data.draw(st.integers(1, n)) for n in (12, 2, 3))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    query = torch.randn(1, kv_heads * group, tokens, 16).to(dtype) * 3
    key, value = (torch.randn(1, kv_heads, tokens, 16).to(dtype) for _ in range(2))
    attend = kernels.invariant_attention.invariant_attention
    alone = attend(query, key, value, scale=0.25, causal=True)

    left, right = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    other = data.draw(st.integers(0, 2))
    begin = data.draw(st.integers(0, tokens - 1))
    padded = [F.pad(t, (0, 0, left, right), value=7.0) for t in (key, value)]
    padded = [torch.cat([torch.randn_like(t) for _ in range(other)] + [t]) for t in padded]
    own = query[:, :, begin:].expand(other + 1, -1, -1, -1)
    sees = torch.zeros(tokens - begin, left + tokens + right, dtype=torch.bool)
    sees[:, left : left + tokens] = torch.ones(tokens, tokens).tril()[begin:].bool()
    order = torch.randperm(sees.shape[1])
    keys, values = (t[:, :, order] for t in padded)
    mask = sees[:, order].expand(other + 1, 1, -1, -1)
    found = attend(own, keys, values, mask, scale=0.25, causal=False)
    assert torch.equal(found[-1:], alone[:, begin:])


def test_square_roots_are_rounded_to_nearest() -> None:
    x = torch.cat([torch.rand(100_000) * 4, torch.tensor([1.0, 2.0, 1e-30, 1e30, 2.0**-126])])
    s = arithmetic.square_root(x)
    bits = s.view(torch.int32)
    for step in (-1, 1):  # the squares of points half a unit away are exact in float64
        middle = (s.double() + (bits + step).view(torch.float32).double()) / 2
        assert ((x.double() - middle.square()) * step < 0).all()


def test_wrong_arguments() -> None:
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 3, 2, 16)
    attend = kernels.invariant_attention.invariant_attention
    with pytest.raises(ValueError, match="multiple of the key/value heads, got 4 and 3"):
        attend(q, k, k, scale=1.0, causal=True)
    with pytest.raises(ValueError, match=r"mask must be \[1 or 1, 1 or 4, 2, 2\], got \(2, 2\)"):
        attend(q, q, q, torch.ones(2, 2, dtype=torch.bool), scale=1.0, causal=True)
    with pytest.raises(ValueError, match=r"kind must be one of .*, got relu"):
        kernels.invariant_activation.invariant_activation(q, kind="relu")
    with pytest.raises(ValueError, match="int32 sums hold 131071 products, got K = 131072"):
        codes = torch.zeros(1, 131072, dtype=torch.int8)
        kernels.invariant_linear.invariant_linear(torch.zeros(1, 131072), codes, torch.ones(1))
    with pytest.raises(ValueError, match="rows of at most 131072 columns, got 131073"):
        x = torch.zeros(1, 131073)
        kernels.invariant_norm.invariant_norm(x, x[0], eps=1e-5)
