"""Kernels of `quantize_rowcol` that write rows alone, to nearest, and read them once: activations in inference.

compute capability 9.0           quantize_rows_sm90.cu, compiled at first use: rows of bfloat16 and float16 of a
                                 multiple of 16 elements, up to 65,536. It keeps a row in registers
other GPUs, and ``tensorwise``   Triton, a program a row: rows of up to 8,192 elements are read once, longer ones
                                 twice; ``tensorwise`` takes another launch before
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.quantize import quantize_rows_sm90
from lowbit_kernels.quantize.quantize_rowcol_triton import rounded_to_float8, takes
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, stored_dtype, tl, triton
from lowbit_kernels.weight_only.weight_operands import TensorLayout, described

MOST_KEPT = 8192
"""Elements of a row that a Triton program keeps in registers."""
Results = tuple[Tensor, Tensor]


@jit
def extremes(x):
    """The bits of the magnitudes of negative and of positive numbers. In the order of the bits, NaN is last."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(bits < 0, magnitude, 0), tl.where(bits < 0, 0, magnitude)


@jit
def _load(x, row, column, k, row_stride, column_stride):
    at = x + row * row_stride + column.to(tl.int64) * column_stride
    return tl.load(at, mask=column < k, other=0).to(tl.float32)


@jit
def _row_extremes(x, row, k, row_stride, column_stride, BLOCK: tl.constexpr):
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, k, BLOCK):
        values = _load(x, row, start + tl.arange(0, BLOCK), k, row_stride, column_stride)
        negative, positive = extremes(values)
        low = tl.maximum(low, negative)
        high = tl.maximum(high, positive)
    return tl.max(low, 0), tl.max(high, 0)


@jit
def _largest(x, found, k, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    low, high = _row_extremes(x, row, k, row_stride, column_stride, BLOCK)
    tl.atomic_max(found, tl.maximum(low, high))


@jit
def _divided(a, b: tl.constexpr):
    return tl.div_rn(a, tl.full(a.shape, b, tl.float32))


@jit
def scale_of_extremes(low, high, IS_INT8: tl.constexpr):
    negative = low.to(tl.float32, bitcast=True)
    positive = high.to(tl.float32, bitcast=True)
    if IS_INT8:
        scale = tl.maximum(_divided(negative, 128.0), _divided(positive, 127.0))
    else:
        scale = _divided(tl.maximum(negative, positive), 448.0)
    largest = tl.maximum(low, high)
    scale = tl.where(largest == 0, 1.0, tl.maximum(scale, 1.1754943508222875e-38))
    return tl.where(largest >= 0x7F800000, float("nan"), scale)


@jit
def rounded_codes(values, inverse, IS_INT8: tl.constexpr):
    """The codes as float32. The clamp between product and sum keeps compilers from fusing them into an FMA."""
    LIMIT: tl.constexpr = 127.0 if IS_INT8 else 448.0
    LEAST: tl.constexpr = -128.0 if IS_INT8 else -448.0
    q = values * inverse
    q = tl.where(q == q, tl.minimum(tl.maximum(q, LEAST), LIMIT), 0.0)
    if IS_INT8:  # 1.5 * 2**23, whose unit in the last place is 1
        q += 12582912.0
        q -= 12582912.0
    else:
        q = rounded_to_float8(q, q, False, 448.0)
    return q


@jit
def _kernel(
    x,
    found,  # int32 [1], bits of the largest magnitude; unused unless TENSORWISE
    codes,
    scale,
    k,
    width,  # columns of codes
    row_stride,
    column_stride,
    IS_INT8: tl.constexpr,
    TENSORWISE: tl.constexpr,
    KEPT: tl.constexpr,  # BLOCK holds a whole row
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if KEPT:
        values = _load(x, row, tl.arange(0, BLOCK), k, row_stride, column_stride)
    if TENSORWISE:
        low = tl.load(found)
        high = low
    elif KEPT:
        negative, positive = extremes(values)
        low, high = tl.max(negative, 0), tl.max(positive, 0)
    else:
        low, high = _row_extremes(x, row, k, row_stride, column_stride, BLOCK)
    s = scale_of_extremes(low, high, IS_INT8)
    inverse = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    if TENSORWISE:
        tl.store(scale, s, mask=row == 0)
    else:
        tl.store(scale + row, s)
    for start in tl.range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        if not KEPT:
            values = _load(x, row, column, k, row_stride, column_stride)
        result = rounded_codes(values, inverse, IS_INT8).to(codes.dtype.element_ty)
        tl.store(codes + row * width + column, result, mask=column < width)


def kernel_of(x: Tensor, format: str, tensorwise: bool) -> str | None:
    """The kernel for x, "sm90" or "triton"; None where there is none."""
    if format == "e5m2" or not x.numel():
        return None
    if not tensorwise and quantize_rows_sm90.takes(TensorLayout(*described(x))):
        return "sm90"
    return "triton" if runs_on(x.device) and takes(format, x.device) else None


def quantize(
    kernel: str, x: Tensor, format: str, dtype: torch.dtype, tensorwise: bool, op: str | None = None
) -> Results:
    """The codes of rows as numbers of `dtype`, and the scales, by this kernel of `kernel_of`.

    Args:
        dtype: the format's, or one that represents its codes exactly, as float16 and bfloat16 do.
        op: the planned op whose call this is all of, or None.
    """
    if kernel == "sm90":
        return quantize_rows_sm90.quantize(x, format, dtype, op)
    m, k = x.shape
    codes = x.new_empty((m, k + -k % 16), dtype=stored_dtype(dtype, x.device))
    scale = x.new_empty((1 if tensorwise else m,), dtype=torch.float32)
    block = min(triton.next_power_of_2(codes.shape[1]), MOST_KEPT)
    warps = {"num_warps": 4 if block < 4096 else 8}
    found = scale
    if tensorwise:
        found = torch.zeros(1, dtype=torch.int32, device=x.device)
        with torch.cuda.device_of(x):
            _largest[(m,)](x, found, k, *x.stride(), BLOCK=block, **warps)
    no_columns = codes.new_empty((0, 0)), scale.new_empty((0,))
    launch(
        op,
        (x, None, None),
        (codes, scale, *no_columns),
        _kernel,
        m,
        (x, found, codes, scale, k, codes.shape[1], *x.stride()),
        {
            "IS_INT8": format == "int8",
            "TENSORWISE": tensorwise,
            "KEPT": codes.shape[1] <= block,
            "BLOCK": block,
            **warps,
        },
    )
    return codes.to(dtype), scale
