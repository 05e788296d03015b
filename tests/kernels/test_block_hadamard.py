"""block_hadamard against float64: on a CPU, in Triton's interpreter, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit_kernels as kernels
from benchmarks.cases.block_hadamard import CASES, Case
from lowbit.granularity import PerToken
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit_kernels.elementwise.block_hadamard import hadamard
from lowbit_kernels.runtime import launches
from tests.kernels.interpreted import interpreted
from tests.schemes import relative_error

ops: Any = torch.ops.lowbit
SMALL = [case for case in CASES if not case.large]
every_case = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)


def by_hand(x: Tensor, size: int) -> Tensor:
    """The product, element by element of H: signs by the digits of both indices in base 4."""

    def sign(i: int, j: int) -> int:
        found, n = 1, size
        while n >= 4:
            found *= -1 if i % 4 == j % 4 else 1
            i, j, n = i // 4, j // 4, n // 4
        return found * (-1 if n == 2 and i and j else 1)

    signs = torch.tensor([[sign(i, j) for j in range(size)] for i in range(size)])
    return (x.double().unflatten(-1, (-1, size)) @ (signs.double() / size**0.5)).flatten(-2)


def rounded(y: Tensor, bits: int) -> Tensor:
    """One token after the other, float64."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    found = torch.zeros_like(y)
    for row, own in zip(found.flatten(0, -2), y.flatten(0, -2), strict=True):
        scale = max(float(own.min()) / low, float(own.max()) / high, 0.0)
        if scale:
            row.copy_((own / scale).round().clamp(low, high) * scale)
    return found


def check(case: Case, device: str, dtype: torch.dtype, bound: float) -> None:
    x, size, bits = case.arguments(device, dtype)
    got = ops.block_hadamard(x, size, bits)
    assert got.dtype == dtype and got.is_contiguous() and got.shape == x.shape
    if not x.numel():
        return
    exact = by_hand(x.cpu(), size)
    wanted = rounded(exact, bits) if bits else exact
    pairs = zip(got.cpu().reshape(-1, x.shape[-1]), wanted.reshape(-1, x.shape[-1]), strict=True)
    for row, own in pairs:
        if not own.any():
            assert not row.any()
        elif bits:  # a sum in another order may take a value over the middle of two codes
            step = max(
                float(own.min()) / -(2 ** (bits - 1)), float(own.max()) / (2 ** (bits - 1) - 1)
            )
            apart = (row.double() - own).abs()
            in_dtype = torch.finfo(dtype).eps / 2 * float(own.abs().max())
            assert float(apart.max()) <= step * 1.01 + in_dtype
            assert int((apart > step / 2).sum()) <= 1 + own.numel() // 500
        else:
            assert relative_error(row, own) < bound, case.name
    x[(-1,) * x.ndim] = torch.nan
    rows = ops.block_hadamard(x, size, bits).reshape(-1, x.shape[-1])
    assert rows[-1, -size:].isnan().all() and not rows[:-1].isnan().any()
    assert bool(rows[-1].isnan().all()) == (bool(bits) or size == x.shape[-1])


@every_case
def test_the_formula(case: Case) -> None:
    check(case, "cpu", torch.float64, 1e-14)
    check(case, "cpu", torch.float32, 1e-6)
    check(case, "cpu", torch.bfloat16, 4e-3)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128, 1024])
def test_the_matrix(size: int) -> None:
    matrix = hadamard(size, torch.float64)
    assert torch.allclose(matrix, matrix.T) and torch.allclose(matrix.abs(), matrix.abs()[0, 0])
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    if size.bit_length() % 2:  # powers of 4 keep the mean
        torch.testing.assert_close(matrix.sum(0), torch.ones(size, dtype=torch.float64))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_that_of_a_scheme(bits: int) -> None:
    """To the bit, so that a fused product equals one of two steps."""
    x = torch.randn(5, 192)
    spec = Spec(Int(bits), PerToken(), "symmetric_no_clipping_err")
    turned = ops.block_hadamard(x, 64)
    assert torch.equal(ops.block_hadamard(x, 64, bits), spec.fake_quantize(turned))


@every_case
def test_the_op_is_sound(case: Case) -> None:
    torch.library.opcheck(ops.block_hadamard.default, case.arguments())


def test_what_is_refused() -> None:
    function = kernels.block_hadamard.block_hadamard
    x = torch.randn(2, 48)
    for size, bits, match in (
        (12, 0, "power of two, got 12"),
        (32, 0, "multiple of size 32, got 48"),
        (16, 1, "2 to 8, got 1"),
        (16, 9, "2 to 8, got 9"),
    ):
        with pytest.raises(ValueError, match=match):
            function(x, size=size, bits=bits)
    with pytest.raises(TypeError, match="x"):
        function(x.long(), size=16)


INTERPRETED = """
import torch
from tests.kernels.test_block_hadamard import SMALL, check
from lowbit_kernels.runtime import launches

torch.manual_seed(0)
with launches.counted() as calls:
    for case in SMALL:
        check(case, "cpu", torch.float32, 1e-6)
        check(case, "cpu", torch.bfloat16, 4e-3)
print(calls["block_hadamard", "triton"])
"""


def test_the_kernel_in_the_interpreter() -> None:
    kernel_cases = [c for c in SMALL if c.size >= 16 and 0 not in c.shape]
    assert interpreted(INTERPRETED) == 4 * len(kernel_cases)


@pytest.mark.gpu
@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_the_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    with launches.counted() as calls:
        for case in CASES:
            check(case, "cuda", dtype, 1e-6 if dtype == torch.float32 else 4e-3)
    assert calls["block_hadamard", "triton"]
