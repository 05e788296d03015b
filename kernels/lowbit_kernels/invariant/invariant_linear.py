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

from lowbit_kernels.composed.dynamic_linear import MOST_K as MOST_K  # a rule names it
from lowbit_kernels.composed.dynamic_linear import DynamicLinearPlan, result_of
from lowbit_kernels.matmul.scaled_mm import int8_sums
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from lowbit_kernels.runtime import launcher
from lowbit_kernels.runtime.launch_plan import Composition, LaunchPlan
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only import weight_mm_decode_sm90
from lowbit_kernels.weight_only.codes_format import format_of
from lowbit_kernels.weight_only.weight_operands import (
    ADDEND_TYPES,
    HALVES,
    Description,
    WeightOperands,
    all_described,
    all_layouts,
)


@op(
    "empty(x.dtype, *x.shape[:-1], N)",
    planned=True,
    flops="2 * x.numel() * N",
    x="float [..., K]",
    codes="int8 [N, K]",
    scale="float [N] or [N, 1]",
    bias="float [N]",
    rules={"K <= MOST_K": "int32 sums hold {MOST_K} products, got K = {K}; split K"},
    types={rule: message for rule, message in ADDEND_TYPES.items() if "bias" in rule},
)
def invariant_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times int8 codes [N, K] with scales, plus bias; see the module's docstring."""
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
    """The output [M, N].

    Args:
        sums: int32 [M, N].
        t: the scales of tokens, [M] or [M, 1].
        scale: of the weight's rows, [N] or [N, 1].
        bias: [N], or None.
        dtype: of the output.
    """
    y = sums.float() * t.view(-1, 1) * scale.float().view(1, -1)
    return (y if bias is None else y + bias.float()).to(dtype)


@functools.lru_cache(maxsize=4096)
def planned(tensors: tuple[Description | None, ...]) -> DynamicLinearPlan:
    """The plan for x, codes, scale and bias on a GPU that are `described` so, none of them empty. "scaled_mm" is that
    of the product without the bias."""
    x, codes, scale, bias = all_layouts(tensors)
    assert x is not None and codes is not None and scale is not None
    (n, k), m = codes.shape, prod(x.shape[:-1])
    rows, product = x.rows() or x.copied((m, k)), None
    if m <= weight_mm_decode_sm90.MAX_TOKENS and x.dtype in HALVES:
        by_row = scale._replace(shape=(n, 1), strides=(scale.strides[0], 1))
        own_bias = bias and bias.contiguous((n,))
        last = None, k, x.dtype, format_of(codes.dtype, scale.dtype, None), None, torch.int8, True
        operands = WeightOperands(rows, codes, by_row, None, own_bias, None, *last)
        product = weight_mm_decode_sm90.product(operands)
    name = "scaled_mm" if product is None else "decode"
    own = x, codes, scale, None if product is None else bias, None, None, None
    numbers = torch.int8 if product is None else None
    shape = *x.shape[:-1], n
    return DynamicLinearPlan(name, product, numbers, (m, k), shape, own, False, -k % 16)


def launches(plan: DynamicLinearPlan, has_bias: bool) -> LaunchPlan | None:
    """The launch plan for the four operands of this op; None where a bias takes a pass of PyTorch."""
    own = None if plan.product is None and has_bias else plan.launches
    if own is None:
        return None
    whole = Composition(4, own.results)
    whole.add(own, (0, 1, 2, 3, None, None, None), (4,))
    return whole.plan()


@invariant_linear.kernel
def _launch(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
    """The decode kernel, or the two ops; the reference on a CPU and for empty operands."""
    if x.device.type != "cuda" or 0 in (*x.shape, *codes.shape):
        return None
    plan = planned(all_described(x, codes, scale, bias))
    ran("invariant_linear", plan.implementation)
    is_apart = bias is not None and plan.product is None
    own = x, codes, scale, None if is_apart else bias, None, None, None
    y = result_of(plan, own, torch.float32 if is_apart else x.dtype)
    if bias is not None and is_apart:
        y = (y + bias.float()).to(x.dtype)
    with torch.cuda.device_of(x):
        launcher.learn("invariant_linear", launches(plan, bias is not None))
    return y
