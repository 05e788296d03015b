"""Products of activations that are quantized on the fly and weights in the same 8-bit format.

    q[m, k], t[m] = quantize_rowcol(x)
    out[m, n]     = (sum_k q[m, k] * codes[n, k]) * t[m] * scale[n]  +  bias[n] + residual[m, n]

    x          bfloat16, float16 or float32 [..., K]
    codes      int8 or float8_e4m3fn [N, K]
    scale      float32, bfloat16 or float16 [N] or [N, 1]; for float8 also [1], for all rows
    bias       [N], residual [..., N]: x's dtype, or None; "scaled_mm" adds the residual after rounding the product
    out        x's dtype [..., N], contiguous

Codes and scales of x are bit for bit those of ``lowbit``'s dynamic schemes (`quantize_rowcol`), computed in one kernel.
int8 sums are exact in int32, which 131,071 products can't exceed; a longer K raises an error.

Implementations, as `launches` reports them:

    decode       weight_mm_decode_sm90, up to `MOST_NUMBERS` tokens
    large_batch  weight_mm_large_batch_sm90, up to `MOST_NUMBERS` tokens
    scaled_mm    `scaled_mm`, for more tokens and on other devices

A product of 8 bits by 8 bits has tiles of 128 tokens and takes as long for fewer. The first two kernels are faster for
small batches, since they are bound by the weight's bytes; `linear_table` chooses between them. They take the codes of x
as floating-point numbers, which hold them exactly: int8 codes in x's dtype, float8 codes in float16. Their float32 sums
of int8 are exact below 2**24. Larger sums (K over 1,040 at the earliest) round at 2**-23.

``tensorwise`` (float8) gives all tokens one scale. If the weight has one scale too, `scaled_mm` runs every batch size.
`scaled_mm` needs K as a multiple of 16; other weights are padded, in a copy, at every call.
"""

from __future__ import annotations

import functools
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.matmul.scaled_mm import scaled_mm
from lowbit_kernels.quantize import quantize_rowcol
from lowbit_kernels.quantize.quantize_rowcol import codes_of
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only import weight_mm_decode_sm90, weight_mm_large_batch_sm90
from lowbit_kernels.weight_only.codes_format import format_of
from lowbit_kernels.weight_only.linear_table import choose
from lowbit_kernels.weight_only.weight_operands import (
    ADDEND_TYPES,
    E4M3,
    HALVES,
    Description,
    Product,
    TensorLayout,
    WeightOperands,
    all_described,
    all_layouts,
)

MOST_NUMBERS = {torch.int8: 32, E4M3: 64}  # tokens whose codes are multiplied as floating point
MOST_K = (2**31 - 1) // 2**14  # int8 products that int32 sums hold
FORMATS = {torch.int8: "int8", E4M3: "e4m3"}  # as `quantize_rowcol` names them


@op(
    "empty(x.dtype, *x.shape[:-1], N)",
    by_layout=True,
    x="float [..., K]",
    codes="int8|float8_e4m3fn [N, K]",
    scale="float [N] or [N, 1] or [1]",
    bias="float [N]",
    residual="float [..., N]",
    rules={
        "codes.dtype != torch.int8 or scale.shape[0] == N": (
            "int8 codes take a scale for each row, ({N},) or ({N}, 1), got {tuple(scale.shape)}"
        ),
        "codes.dtype != torch.int8 or not tensorwise": (
            "int8 codes have a scale for each token; tensorwise takes float8 codes"
        ),
        "codes.dtype != torch.int8 or K <= MOST_K": (
            "int8 sums of more than {MOST_K} products may exceed int32, got K = {K}; split K"
        ),
    },
    types=ADDEND_TYPES,
)
def dynamic_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    tensorwise: bool = False,
) -> Tensor:
    """int8 by int8 or float8 by float8, as the codes are; the module's docstring has shapes, dtypes and the formula.

    Args:
        tensorwise: one scale for all of x; float8 only.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes that don't fit each other, tensors on several devices, or int8 with ``tensorwise``.
    """
    k = x.shape[-1]
    rows = x.reshape(prod(x.shape[:-1]), k)
    q, t, _, _ = quantize_rowcol.reference(rows, FORMATS[codes.dtype], True, False, tensorwise)
    sums = q[:, :k].double() @ codes.double().T
    out = sums * t.double().reshape(-1, 1) * scale.double().reshape(1, -1)
    out = out.view(*x.shape[:-1], codes.shape[0])
    for part in (bias, residual):
        out = out if part is None else out + part.double()
    return out.to(x.dtype)


reference, check = dynamic_linear.reference, dynamic_linear.check


class DynamicLinearPlan(NamedTuple):
    """How calls with operands of the same layouts run."""

    implementation: str
    product: Product | None  # of codes as numbers; None for "scaled_mm"
    numbers: torch.dtype  # of x's codes
    rows: tuple[int, int]  # x's shape as a matrix
    shape: tuple[int, ...]  # of the result
    padding: int  # of K, for "scaled_mm"


@functools.lru_cache(maxsize=8192)
def planned(tensors: tuple[Description | None, ...], tensorwise: bool) -> DynamicLinearPlan:
    """The plan for x, codes, scale, bias and residual that are `described` so; errors as of `dynamic_linear`."""
    layouts = all_layouts(tensors)
    check(*layouts, tensorwise)
    x, codes, scale, bias, residual = layouts
    (n, k), m = codes.shape, prod(x.shape[:-1])
    shape, has_one_scale = (*x.shape[:-1], n), prod(scale.shape) == 1
    if m * n * k and not (tensorwise and has_one_scale):
        numbers = x.dtype if codes.dtype == torch.int8 else torch.float16
        # as `codes_of` makes it
        q = TensorLayout((m, k), (k + -k % 16, 1), numbers, x.device, 0)
        step = 0 if has_one_scale and n > 1 else scale.strides[0]
        by_row = scale._replace(shape=(n, 1), strides=(step, 1))
        ends = bias and bias.contiguous((n,)), residual and residual.contiguous((m, n))
        format = format_of(codes.dtype, scale.dtype)
        operands = WeightOperands(q, codes, by_row, None, *ends, None, k, x.dtype, format)
        if found := of_numbers(operands):
            return DynamicLinearPlan(*found, numbers, (m, k), shape, 0)
    return DynamicLinearPlan("scaled_mm", None, codes.dtype, (m, k), shape, -k % 16)


def of_numbers(operands: WeightOperands) -> tuple[str, Product] | None:
    """The implementation and product for codes as numbers; None where there are too many tokens or no kernel."""
    m, n, k = operands.m, operands.n, operands.k
    if operands.x.device.type != "cuda" or operands.out not in HALVES:
        return None
    if m > MOST_NUMBERS[operands.codes.dtype]:
        return None
    is_decode = choose(m, n, k, 8, k) == "decode"
    kernel = weight_mm_decode_sm90 if is_decode else weight_mm_large_batch_sm90
    product = kernel.product(operands)
    return None if product is None else ("decode" if is_decode else "large_batch", product)


@dynamic_linear.kernel
def _run(x, codes, scale, bias, residual, tensorwise) -> Tensor:
    plan = planned(all_described(x, codes, scale, bias, residual), tensorwise)
    ran("dynamic_linear", plan.implementation)
    (m, k), n, format = plan.rows, codes.shape[0], FORMATS[codes.dtype]
    rows = x.reshape(m, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    bias = None if bias is None else bias.contiguous()
    q, t = codes_of(rows, format, plan.numbers, tensorwise)
    if plan.product is not None:
        by_row, t = scale.reshape(-1, 1).expand(n, 1), t.expand(m).contiguous()
        residual = None if residual is None else residual.reshape(m, n).contiguous()
        tensors = (q[:, :k], codes, by_row, None, bias, residual, t, None)
        return plan.product(tensors).view(plan.shape)
    if plan.padding:
        codes = F.pad(codes.view(torch.int8), (0, plan.padding)).view(codes.dtype)
    by_column = scale.reshape(-1).float()
    out = scaled_mm(q, codes, t, by_column, bias=bias, out_dtype=x.dtype).view(plan.shape)
    return out if residual is None else out.add_(residual)
