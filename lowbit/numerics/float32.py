"""Float32 operations with the same bits on every device, eager and compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.numerics.opaque import opaque


def divide(x: Tensor, divisor: float | Tensor) -> Tensor:
    """x / divisor in float32, rounded once on every device, eager and compiled.

    Division in float64 gives exactly the IEEE float32 quotient. CUDA and Triton approximate division in float32, and
    the last bit counts at ties of the codes.
    """
    if not isinstance(divisor, Tensor):
        divisor = torch.full_like(x, divisor, dtype=torch.float64)
    return (x.double() / divisor.double()).float()


def multiply_add(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """a · b + c in float32, where b is a code. It runs in float64, where the product is exact, fused or not."""
    wide = b.double() if isinstance(b, Tensor) else b
    return (a.double() * wide + c.double()).float()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


opaque("cast(Tensor x, ScalarType dtype) -> Tensor", _cast)(_cast)


def round_to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` as an opaque op, because torch.compile removes the rounding from `x.to(bfloat16).float()`."""
    return x if x.dtype == dtype else torch.ops.lowbit.cast(x, dtype)


def computed_again(x: Tensor) -> Tensor:
    """`x` for a backward pass that computes a value again. An opaque op in compiled code, since torch.compile would
    otherwise keep the value of the forward pass. `x` itself in eager code."""
    return torch.ops.lowbit.cast(x, x.dtype) if torch.compiler.is_compiling() else x


def nan_to(value: float, x: Tensor) -> Tensor:
    """`x` with `value` in place of NaN; overwrites `x`."""
    if torch.compiler.is_compiling():  # on CPUs Inductor vectorises a comparison, but not isnan
        return torch.where(x == x, x, value)
    return x.nan_to_num_(value, torch.inf, -torch.inf)
