"""Functions of float32 with the same bits on every device, in PyTorch operations and in Triton.

    2^x = 2^n · 2^f       n = x to nearest, |f| <= 1/2, 2^f by a polynomial of degree 5, relative error 2.3e-7
    e^x = 2^n · 2^(r / ln 2)      r = x - n ln 2, with ln 2 in two parts

Each product and each sum is rounded on its own. So a Triton kernel that calls these is launched with `EXACT`, which
keeps its compiler from fusing a product and a sum. PyTorch runs them as operations of their own.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.runtime.triton_runtime import jit, tl

EXACT = {"enable_fp_fusion": False}
"""The option of a launch that keeps products and sums apart."""
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000
"""1.5 * 2**23, whose unit in the last place is 1: adding it rounds to an integer, which its last bits then hold."""
_C0, _C1, _C2 = 1.0000001192092896, 0.6931471824645996, 0.2402210682630539
_C3, _C4, _C5 = 0.055503569543361664, 0.009676031768321991, 0.0013390863314270973
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950216293335, 0.693359375, -0.00021219444170128554


@functools.lru_cache(maxsize=1024)
def in_float32(x: float) -> float:
    """x rounded to float32, as kernels get their arguments on a GPU, but not in Triton's interpreter."""
    return torch.tensor(x, dtype=torch.float32).item()


def rounded(x: Tensor) -> Tensor:
    """float32 x, |x| <= 2**22, to the nearest integer, half to even: int32."""
    return (x + MAGIC).view(torch.int32) - MAGIC_BITS


def square_root(x: Tensor) -> Tensor:
    """The square root of float32 x > 0, rounded to nearest. PyTorch's own is not, on CPUs, in float32 and float64: it
    is off by one unit for a fifth of all float32 numbers (torch 2.13)."""
    s = x.double().sqrt().float()
    for step in (-1, 1):
        other = (s.view(torch.int32) + step).view(torch.float32)
        middle = (s.double() + other.double()) * 0.5  # exact, and so is its square
        is_nearer = (x.double() - middle * middle) * step > 0
        s = torch.where(is_nearer, other, s)
    return s


def exp2(x: Tensor) -> Tensor:
    """2^x of float32 x from -126 to 126."""
    shifted = x + MAGIC
    return _power(x - (shifted - MAGIC), shifted)


def exp(x: Tensor) -> Tensor:
    """e^x of float32 x from -87 to 88."""
    shifted = x * _LOG2E + MAGIC
    n = shifted - MAGIC
    return _power(((x - n * _LN2_HIGH) - n * _LN2_LOW) * _LOG2E, shifted)


def _power(f: Tensor, shifted: Tensor) -> Tensor:
    p = f * _C5 + _C4
    for c in (_C3, _C2, _C1, _C0):
        p = p * f + c
    n = shifted.view(torch.int32) - MAGIC_BITS
    return (p.view(torch.int32) + (n << 23)).view(torch.float32)


@jit
def triton_rounded(x):
    """`rounded` in Triton."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@jit
def _triton_power(f, shifted):
    p = f * 0.0013390863314270973 + 0.009676031768321991
    p = p * f + 0.055503569543361664
    p = p * f + 0.2402210682630539
    p = p * f + 0.6931471824645996
    p = p * f + 1.0000001192092896
    n = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    return (p.to(tl.int32, bitcast=True) + (n << 23)).to(tl.float32, bitcast=True)


@jit
def triton_exp2(x):
    """`exp2` in Triton."""
    shifted = x + 12582912.0
    return _triton_power(x - (shifted - 12582912.0), shifted)


@jit
def triton_exp(x):
    """`exp` in Triton."""
    shifted = x * 1.4426950216293335 + 12582912.0
    n = shifted - 12582912.0
    r = (x - n * 0.693359375) - n * -0.00021219444170128554
    return _triton_power(r * 1.4426950216293335, shifted)
