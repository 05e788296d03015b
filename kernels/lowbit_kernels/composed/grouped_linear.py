"""Tokens sorted by expert, each multiplied by its expert's weight, in any format of codes.

    out[m] = the product of `weight_linear` of x[m] and expert e's weight,  for offsets[e - 1] <= m < offsets[e]

    x           bfloat16, float16 or float32 [M, K]
    codes, scale, zero_point   as in `weight_linear`, with a leading dimension E of experts
    global_scale, group_size, bits, table   as in `weight_linear`
    offsets     int32 [E], on x's device: ends of the experts' tokens, as in ``torch._grouped_mm``; ascending, 0 to M
    out         x's dtype [M, N], contiguous; rows from the last offset on are 0

The op does not check the values of the offsets, because reading them waits for the GPU. With wrong values, tokens get
the weight of any expert, or zeros.

Implementations, as `launches` reports them:

    large       weight_mm_experts_large_sm90, for halves, on compute capability 9.0; one launch
    triton      weight_mm_experts_triton: GPUs, for groups of multiples of 32 or one scale a row; one launch
    loop        CPUs, other groups and formats: `weight_linear` expert by expert; on a GPU this waits for the offsets
    empty       no product: M, N, K or E is 0

Both are kernels of `expert_linear`, which never round the weight. They find the expert of a tile of tokens in the
offsets. So nothing waits for the host, and offsets may change between replays of a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch  # noqa: F401 for the rules of the declaration
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only import (
    weight_linear,
    weight_mm_experts_large_sm90,
    weight_mm_experts_triton,
)
from lowbit_kernels.weight_only.codes_format import format_of
from lowbit_kernels.weight_only.expert_operands import OF_EXPERTS, ExpertOperands, SortedPairs
from lowbit_kernels.weight_only.weight_mm_experts_large_sm90 import LargeExpertProduct
from lowbit_kernels.weight_only.weight_mm_experts_triton import ExpertsTriton
from lowbit_kernels.weight_only.weight_operands import (
    FORMAT_RULES,
    K_RULE,
    Description,
    all_described,
    all_layouts,
)


@op(
    "empty(x.dtype, M, N)",
    by_layout=True,
    flops="2 * M * N * K",
    x="float [M, K]",
    **OF_EXPERTS,
    offsets="int32 [E]",
    rules={**FORMAT_RULES, **K_RULE},
)
def grouped_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    offsets: Tensor,
    *,
    group_size: int,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    """Tokens times their experts' weights; see the module's docstring."""
    format = group_size, global_scale, bits, table
    return _loop(weight_linear.reference, x, codes, scale, zero_point, offsets, format)


reference, check = grouped_linear.reference, grouped_linear.check


def _loop(linear, x, codes, scale, zero_point, offsets, format) -> Tensor:
    out = x.new_zeros((x.shape[0], codes.shape[1]))
    start = 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            zero = None if zero_point is None else zero_point[e]
            out[start:end] = linear(x[start:end], codes[e], scale[e], zero, None, None, *format)
        start = max(start, end)
    return out


class GroupedLinearPlan(NamedTuple):
    """How calls with operands of the same layouts run."""

    implementation: Literal["large", "triton", "loop", "empty"]
    shape: tuple[int, int]  # of the result
    product: LargeExpertProduct | ExpertsTriton | None = None


@functools.lru_cache(maxsize=8192)
def planned(
    tensors: tuple[Description | None, ...],
    group_size: int,
    bits: int = 0,
    table: tuple[float, ...] = (),
) -> GroupedLinearPlan:
    """The plan for x, codes, scale, zero_point, offsets and global_scale that are `described` so; errors as of
    `grouped_linear`."""
    x, codes, scale, zero_point, offsets, global_scale = all_layouts(tensors)
    check(x, codes, scale, zero_point, offsets, group_size, global_scale, bits, table)
    shape = x.shape[0], codes.shape[1]
    if 0 in (*x.shape, *codes.shape):
        return GroupedLinearPlan("empty", shape)
    zeros = None if zero_point is None else zero_point.dtype
    format = format_of(codes.dtype, scale.dtype, zeros, bits, table)
    parts = (x, codes, scale, zero_point, None, x.shape[0], group_size, False)
    operands = ExpertOperands(*parts, format, global_scale)
    if (large := weight_mm_experts_large_sm90.product(operands)) is not None:
        return GroupedLinearPlan("large", shape, large)
    product = weight_mm_experts_triton.product(operands)
    return GroupedLinearPlan("loop" if product is None else "triton", shape, product)


@grouped_linear.kernel
def _run(x, codes, scale, zero_point, offsets, group_size, global_scale, bits, table) -> Tensor:
    described = all_described(x, codes, scale, zero_point, offsets, global_scale)
    plan = planned(described, group_size, bits, tuple(table))
    ran("grouped_linear", plan.implementation)
    if plan.implementation == "empty":
        return x.new_zeros(plan.shape)
    if plan.product is None:
        format = group_size, global_scale, bits, table
        return _loop(weight_linear.run, x, codes, scale, zero_point, offsets, format)
    pairs = (x, codes, scale, zero_point, None, None, offsets.contiguous(), global_scale)
    return plan.product.of_sorted(SortedPairs(*pairs))
