"""Activations to int8 or float8, each row with its own scale, as lowbit's dynamic schemes compute them.

    int8:   scale[m] = max(-min_k x[m, k] / 128, max_k x[m, k] / 127, 0)
    e4m3:   scale[m] = max_k |x[m, k]| / 448
            scale    = max(scale, 2**-126)
            codes[m, k] = round(clamp(x[m, k] * (1 / scale[m]))),  to nearest even, within -128 .. 127 or +-448

    x       float32, bfloat16 or float16 [M, K], any strides
    codes   int8 or float8_e4m3fn [M, K rounded up to a multiple of 16], 0 in the padding
    scale   float32 [M]

Each float32 operation is rounded once. So codes and scales equal, to the bit, those of ``Spec.quantize`` for
``Int8DynamicActivationInt8Weight`` and ``Float8DynamicActivationFloat8Weight``. (`quantize_rowcol`, for training,
differs: codes within +-127, division by the scale, scale 1 for zeros.)

``tensorwise`` (e4m3): one scale for the matrix, [1]. A row with a NaN has scale NaN, a row with an infinity has an
infinite scale; the codes of such rows have no meaning.

Where each implementation runs:

    compute capability 9.0           quantize_tokens_sm90.cu, compiled at first use: rows of bfloat16 and float16 of a
                                     multiple of 16 elements, up to 65,536. It reads a row once, into registers
    other GPUs, and ``tensorwise``   Triton, a program a row: rows of up to 8,192 elements are read once, longer ones
                                     twice; ``tensorwise`` takes another launch before
    CPU                              PyTorch
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.quantize import quantize_tokens_sm90
from lowbit_kernels.quantize.quantize_rowcol_triton import rounded_to_float8, takes
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import (
    jit,
    launch,
    runs_on,
    stored_dtype,
    tl,
    triton,
)

FORMATS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
SMALLEST = 2.0**-126
MOST_KEPT = 8192
"""Elements of a row that a Triton program keeps in registers."""


@op(
    "empty(FORMATS[format], M, K + -K % 16), empty(torch.float32, 1 if tensorwise else M)",
    planned=True,
    x="float [M, K]; flatten leading dimensions first",
    rules={
        "format in FORMATS": "format must be one of {', '.join(FORMATS)}, got {repr(format)}",
        'not (tensorwise and format == "int8")': 'tensorwise takes "e4m3", got "int8"; leave it out',
    },
)
def quantize_tokens(x: Tensor, format: str, *, tensorwise: bool = False) -> tuple[Tensor, Tensor]:
    """codes, scale; shapes, dtypes and the formula are in the module's docstring.

    Args:
        x: [M, K].
        format: "int8" or "e4m3".
        tensorwise: one scale for all; "e4m3" only.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: an unknown format, a shape other than [M, K], or int8 with ``tensorwise``.
    """
    values = x.to(torch.float32)
    low, high = (values.new_zeros(len(x)) for _ in range(2))
    if x.numel():
        low, high = values.amin(1).clamp(max=0.0), values.amax(1).clamp(min=0.0)
    if format == "int8":
        largest = torch.maximum(low.double() / -128, high.double() / 127)
    else:
        largest = torch.maximum(-low, high).double() / 448
        if tensorwise:
            largest = largest.amax().reshape(1) if len(x) else largest.new_zeros(1)
    scale = largest.float().clamp(min=SMALLEST)
    q = values * (1 / scale.double()).float()[:, None]
    if format == "int8":
        codes = q.round().clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
    else:
        codes = q.clamp(-448, 448).to(torch.float8_e4m3fn)
    extra = -x.shape[1] % 16
    return F.pad(codes.view(torch.int8), (0, extra)).view(codes.dtype) if extra else codes, scale


reference = quantize_tokens.reference


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
def _scale(low, high, IS_INT8: tl.constexpr):
    negative = low.to(tl.float32, bitcast=True)
    positive = high.to(tl.float32, bitcast=True)
    if IS_INT8:
        scale = tl.maximum(_divided(negative, 128.0), _divided(positive, 127.0))
    else:
        scale = _divided(tl.maximum(negative, positive), 448.0)
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    return tl.where(tl.maximum(low, high) > 0x7F800000, float("nan"), scale)


@jit
def _codes(values, inverse, IS_INT8: tl.constexpr):
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
    s = _scale(low, high, IS_INT8)
    inverse = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    if TENSORWISE:
        tl.store(scale, s, mask=row == 0)
    else:
        tl.store(scale + row, s)
    for start in tl.range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        if not KEPT:
            values = _load(x, row, column, k, row_stride, column_stride)
        result = _codes(values, inverse, IS_INT8).to(codes.dtype.element_ty)
        tl.store(codes + row * width + column, result, mask=column < width)


def codes_of(
    x: Tensor, format: str, dtype: torch.dtype, tensorwise: bool = False
) -> tuple[Tensor, Tensor]:
    """`quantize_tokens` of checked arguments, with the codes as numbers of `dtype`.

    `dtype` must represent them exactly: float16 does; bfloat16 does for "int8".
    """
    return _implementation(x, format, tensorwise)[1](x, format, dtype, tensorwise, None)


def _implementation(
    x: Tensor, format: str, tensorwise: bool
) -> tuple[str, Callable[..., tuple[Tensor, Tensor]]]:
    if x.numel():
        if not tensorwise and quantize_tokens_sm90.takes(x):
            return "sm90", _by_sm90
        if runs_on(x.device) and takes(format, x.device):
            return "triton", _by_triton
    return "torch", _by_torch


def _by_sm90(
    x: Tensor, format: str, dtype: torch.dtype, tensorwise: bool, op: str | None
) -> tuple[Tensor, Tensor]:
    codes, scale = x.new_empty(x.shape, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)
    quantize_tokens_sm90.quantize(x, codes, scale, format, op)
    return codes, scale


def _by_torch(
    x: Tensor, format: str, dtype: torch.dtype, tensorwise: bool, op: str | None
) -> tuple[Tensor, Tensor]:
    codes, scale = reference(x, format, tensorwise)
    return codes.to(dtype), scale


def _by_triton(
    x: Tensor, format: str, dtype: torch.dtype, tensorwise: bool, op: str | None
) -> tuple[Tensor, Tensor]:
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
    launch(
        op,
        (x,),
        (codes, scale),
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


@quantize_tokens.kernel
def _launch(x: Tensor, format: str, tensorwise: bool) -> tuple[Tensor, Tensor]:
    name, quantize = _implementation(x, format, tensorwise)
    ran("quantize_tokens", name)
    return quantize(x, format, FORMATS[format], tensorwise, "quantize_tokens")
