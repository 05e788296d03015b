"""Ranges of codes: which codes a dtype and quant_min..quant_max allow, and the last step to them.

Codes are computed in float32, which holds every end of a range of 16 bits or fewer, but not of int32: 2^31 − 1
rounds to 2^31 there, which wraps to −2^31 in the cast. So ranges of int32 are compared and clamped in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_CODE_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)
_ZERO_POINT_DTYPES = (*_CODE_DTYPES, torch.int64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of scales, zero points that are values, and high-precision weights."""


def quant_range(
    dtype: torch.dtype, quant_min: float | None, quant_max: float | None
) -> tuple[float, float]:
    """The code range: the one given, or the whole range of `dtype`.

    Raises ValueError where the range is empty, does not fit `dtype`, or ends between two of its numbers.
    """
    info: Any
    if dtype in FLOAT8_DTYPES:
        info = torch.finfo(dtype)
    elif dtype in _CODE_DTYPES:
        info = torch.iinfo(dtype)
    else:
        raise ValueError(
            f"cannot quantize to {dtype}; accepted: int8, uint8, int16, int32, float8_e4m3fn, float8_e5m2 "
            "(fewer bits are int8 or uint8 with a smaller quant_min and quant_max)"
        )
    low = info.min if quant_min is None else quant_min
    high = info.max if quant_max is None else quant_max
    if not info.min <= low < high <= info.max:
        raise ValueError(
            f"quant_min={low}, quant_max={high} is not a range within {dtype}'s {info.min}..{info.max}"
        )
    for name, end in (("quant_min", low), ("quant_max", high)):
        step = _step(dtype, end)
        if end % step:
            below = end // step * step
            raise ValueError(
                f"{name}={end} is no {dtype}, so codes could pass it; the nearest are {below} and {below + step}"
            )
    return low, high


def _step(dtype: torch.dtype, number: float) -> float:
    """From `number` to the next number of `dtype` that is larger in magnitude."""
    if dtype not in FLOAT8_DTYPES:
        return 1
    info = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(max(abs(number), info.tiny))) * info.eps


def within_range(codes: Tensor, dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Where unclamped codes do not clip. A float8 within half a step of an end of the range rounds to it."""
    if dtype is torch.int32:
        codes = codes.double()
    elif dtype in FLOAT8_DTYPES:
        low, high = low - _step(dtype, low) / 2, high + _step(dtype, high) / 2
    return (codes >= low) & (codes <= high)


def clamped(codes: Tensor, dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Float32 codes as `dtype`, within low..high: integral and without NaN, except float8, where the cast rounds."""
    if dtype is torch.int32:
        codes = codes.double()
    return codes.clamp(low, high).to(dtype)


def check_zero_point_dtype(
    dtype: torch.dtype, codes: tuple[float, float] | None, mapping: str
) -> None:
    """Raise ValueError for a dtype that cannot hold zero points.

    Args:
        dtype: of the zero points.
        codes: the least and the largest that they may be, for zero points that are codes; None for those that are
            values in the input's domain. The dtype tells the two apart, so neither takes the other's.
        mapping: named in the error.
    """
    if codes is None:
        if dtype not in FLOATS:
            raise ValueError(
                f"zero_point_dtype={dtype} does not hold the zero points of {mapping!r}, which are values, not "
                f"codes; accepted: {', '.join(map(str, FLOATS))}"
            )
        return
    low, high = codes
    fitting = [
        d for d in _ZERO_POINT_DTYPES if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max
    ]
    if dtype not in fitting:
        held = f"{low}" if low == high else f"{low}..{high}"
        raise ValueError(
            f"zero_point_dtype={dtype} does not hold the zero points of {mapping!r}, which are codes: {held}; "
            f"accepted: {', '.join(map(str, fitting))}"
        )
