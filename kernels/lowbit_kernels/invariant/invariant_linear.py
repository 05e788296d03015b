"""An int8 linear with the same bits on every device.

    q[m, k], t[m] = quantize_rowcol(x)
    out[m, n]     = (float(sum_k q[m, k] · codes[n, k]) · t[m]) · scale[n]  +  bias[n]        rounded to x's dtype

    x       float [..., K], K <= 131,071
    codes   int8 [N, K]
    scale   float32, bfloat16 or float16 [N] or [N, 1]
    bias    [N] in x's dtype, or None
    out     x's dtype [..., N], contiguous

The sum is int32, exact in any order. All else is float32, and each operation is rounded on its own. A GPU may flush
results below 2^-126 to 0.

Implementations, as `launches` reports them:

    decode     weight_mm_decode_sm90 with int32 sums, up to 16 tokens in 16 bits
    scaled_mm  `quantize_rowcol` and `scaled_mm`, whose sums are int32 and whose scales are multiplied in this order. A
               bias is added in a further pass, since the kernels fuse it with the last product
"""

from __future__ import annotations

import functools
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.composed.dynamic_linear import MOST_K as MOST_K  # a rule names it
from lowbit_kernels.matmul.scaled_mm import int8_sums, scaled_mm
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only import weight_mm_decode_sm90
from lowbit_kernels.weight_only.codes_format import format_of
from lowbit_kernels.weight_only.weight_operands import (
    ADDEND_TYPES,
    HALVES,
    Description,
    Product,
    WeightOperands,
    all_described,
    all_layouts,
)


@op(
    "empty(x.dtype, *x.shape[:-1], N)",
    x="float [..., K]",
    codes="int8 [N, K]",
    scale="float [N] or [N, 1]",
    bias="float [N]",
    rules={"K <= MOST_K": "int32 sums hold {MOST_K} products, got K = {K}; split K"},
    types={rule: message for rule, message in ADDEND_TYPES.items() if "bias" in rule},
)
def invariant_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times int8 codes [N, K] with scales, plus bias; the module's docstring has the formula.

    Raises TypeError for other dtypes, ValueError for shapes that don't fit each other and a K above 131,071.
    """
    shape, n = (*x.shape[:-1], codes.shape[0]), codes.shape[0]
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    if 0 in (*rows.shape, n):
        empty = x.new_zeros(shape)
        return empty if bias is None else empty + bias
    q, t, _, _ = quantize_rowcol.reference(rows, "int8", True, False, False)
    sums = int8_sums(q[:, : rows.shape[1]].contiguous(), codes)
    return scaled(sums, t, scale, bias, x.dtype).view(shape)


reference = invariant_linear.reference


def scaled(
    sums: Tensor, t: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The output [M, N] of int32 sums [M, N] and the scales of tokens, [M] or [M, 1], and of rows."""
    y = sums.float() * t.view(-1, 1) * scale.float().view(1, -1)
    return (y if bias is None else y + bias.float()).to(dtype)


@functools.lru_cache(maxsize=4096)
def _planned(tensors: tuple[Description | None, ...]) -> Product | None:
    """The decode kernel for x [M, K], codes, scale [N, 1] and bias that are `described` so; None for other operands."""
    x, codes, scale, bias = all_layouts(tensors)
    if x.device.type != "cuda" or x.dtype not in HALVES:
        return None
    format = format_of(codes.dtype, scale.dtype, None)
    last = None, codes.shape[1], x.dtype, format, None, torch.int8, True
    return weight_mm_decode_sm90.product(WeightOperands(x, codes, scale, None, bias, None, *last))


@invariant_linear.kernel
def _launch(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
    """The decode kernel, or the two ops; the reference on a CPU and for empty operands."""
    (n, k), m = codes.shape, prod(x.shape[:-1])
    if x.device.type != "cuda" or 0 in (m, n, k):
        return None
    rows = x.reshape(m, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if m <= weight_mm_decode_sm90.MAX_TOKENS:
        own_bias = None if bias is None else bias.contiguous()
        scales = scale.view(n, 1)
        product = _planned(all_described(rows, codes, scales, own_bias))
        if product is not None:
            ran("invariant_linear", "decode")
            tensors = (rows, codes, scales, None, own_bias, None, None, None)
            return product(tensors).view(*x.shape[:-1], n)
    ran("invariant_linear", "scaled_mm")
    q, t, _, _ = quantize_rowcol(rows, "int8", columns=False)
    codes = codes if k % 16 == 0 else F.pad(codes, (0, -k % 16))
    dtype = x.dtype if bias is None else torch.float32
    y = scaled_mm(q, codes, t, scale.reshape(-1).float(), out_dtype=dtype)
    y = y if bias is None else (y + bias.float()).to(x.dtype)
    return y.view(*x.shape[:-1], n)
