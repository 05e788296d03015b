"""Code ranges: which codes a dtype and quant_min..quant_max allow, the clamp to them, and the cast.

Codes are computed in float32. float32 represents both ends of every range of 16 bits or fewer, but not of int32: it
rounds 2^31 − 1 to 2^31, which the cast wraps to −2^31. So int32 ranges are compared and clamped in float64.

Codes of float8 and of a `LookupTable` are the values themselves; the cast rounds to them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.lookup_table import LookupTable

CodeType = torch.dtype | LookupTable
"""The kind of a code: an integer or float8 dtype, or a value of a table."""
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_CODE_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)
_ZERO_POINT_DTYPES = (*_CODE_DTYPES, torch.int64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of scales, zero points that are values, and high-precision weights. Kernels take no float64:
`lowbit_kernels.runtime.library.FLOATS`."""


def is_value(dtype: CodeType) -> bool:
    """True if codes are values, to which the cast rounds, and not integers."""
    return isinstance(dtype, LookupTable) or dtype in FLOAT8_DTYPES


def quant_range(
    dtype: CodeType, quant_min: float | None, quant_max: float | None
) -> tuple[float, float]:
    """The given code range, or the whole range of `dtype`. The range of a table is symmetric and fixed.

    Raises ValueError where the range is empty, does not fit `dtype`, or ends between two of its numbers, and TypeError
    for an end that is not a number.
    """
    if isinstance(dtype, LookupTable):
        return -dtype.largest, dtype.largest
    info: Any
    is_float8 = dtype in FLOAT8_DTYPES
    if is_float8:
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
    try:
        fits = info.min <= low < high <= info.max
    except TypeError as error:
        raise TypeError(
            f"quant_min and quant_max must be numbers or None, got {quant_min!r} and {quant_max!r}"
        ) from error
    if not fits:
        raise ValueError(
            f"quant_min={low}, quant_max={high} is not a range within {dtype}'s {info.min}..{info.max}"
        )
    for name, end in (("quant_min", low), ("quant_max", high)):
        step = _step(dtype, end) if is_float8 else 1
        if end % step:
            below = end // step * step
            raise ValueError(
                f"{name}={end} is not a {dtype} number, so codes could exceed it; the nearest are {below} and "
                f"{below + step}"
            )
    return low, high


def _step(dtype: torch.dtype, number: float) -> float:
    """The distance from `number` to the next number of a float8 `dtype` of larger magnitude."""
    info = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(max(abs(number), info.tiny))) * info.eps


def within_range(codes: Tensor, dtype: CodeType, low: float, high: float) -> Tensor:
    """Where unclamped codes do not clip. A value within half a step of an end of the range rounds to that end."""
    if isinstance(dtype, LookupTable):
        return dtype.reaches(codes)
    if dtype is torch.int32:
        codes = codes.double()
    elif dtype in FLOAT8_DTYPES:
        low, high = low - _step(dtype, low) / 2, high + _step(dtype, high) / 2
    return (codes >= low) & (codes <= high)


def clamped(codes: Tensor, dtype: CodeType, low: float, high: float) -> Tensor:
    """Clamp float32 codes to low..high and cast them to `dtype`. Integer codes must be integral and free of NaN; for
    float8 the cast rounds, and a table gives its nearest values in float32."""
    if isinstance(dtype, LookupTable):
        return dtype.nearest(codes)
    if dtype is torch.int32:
        codes = codes.double()
    return codes.clamp(low, high).to(dtype)


def check_zero_point_dtype(
    dtype: torch.dtype, codes: tuple[float, float] | None, mapping: str
) -> None:
    """Raise ValueError for a dtype that cannot hold zero points.

    Args:
        dtype: of the zero points.
        codes: the smallest and largest zero point, which need an integer dtype; None for zero points that are values
            in the input's domain, which need a floating dtype.
        mapping: the mapping that the error names.
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
