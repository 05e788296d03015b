"""Tokens times the weights of the experts that a router chose for them, in any format of codes.

    out[p] = weight_linear of x[p // (P / T)], the weight of expert ids[p] and its bias,     for each pair p
    gated:  the first half of out's columns is `gate`, the second `up`, and the result is silu(gate) * up

    x           bfloat16, float16 or float32 [T, K]: a row for each token, or for each pair
    codes, scale, zero_point   as in `weight_linear`, with a leading dimension E of experts
    global_scale, group_size, bits, table   as in `weight_linear`
    bias        x's dtype [E, N], or None
    ids         int64 [P], on x's device: the expert of each pair of a token and an expert; a token's pairs lie beside
                each other. Ids in any order, several times or not at all; the result for an id that no expert has is 0
    out         x's dtype [P, N], or [P, N / 2] where gated; contiguous

The op takes the pairs as the router gives them. Nothing is sorted or gathered before, and nothing waits for the host,
so ids may change between replays of a CUDA graph.

Implementations, as `launches` reports them:

    decode      weight_mm_experts_sm90: CUDA C++ for compute capability 9.0, where experts have few tokens
    large       weight_mm_experts_large_sm90: compute capability 9.0, for many tokens, in three launches
    triton      weight_mm_experts_triton: GPUs, for many tokens, in two launches
    loop        CPUs, other formats, and K = 0: `weight_linear` expert by expert; on a GPU this waits for the ids
    empty       no result, or no expert: T, P, N or E is 0

Only the result is rounded; in "loop" the products are rounded before silu.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.runtime import launcher
from lowbit_kernels.runtime.launch_plan import Composition, LaunchPlan
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only import (
    weight_linear,
    weight_mm_experts_large_sm90,
    weight_mm_experts_sm90,
    weight_mm_experts_triton,
)
from lowbit_kernels.weight_only.codes_format import format_of
from lowbit_kernels.weight_only.expert_operands import OF_EXPERTS, ExpertOperands, Tensors
from lowbit_kernels.weight_only.weight_operands import (
    FORMAT_RULES,
    K_RULE,
    Description,
    all_described,
    all_layouts,
)

FEW = 5
"""The most pairs an expert, on average, for which the decode kernel is faster: of an H200, 4 and not 8."""


@op(
    "empty(x.dtype, P, N // 2 if gated else N)",
    by_layout=True,
    planned=True,
    flops="2 * P * N * K",
    x="float [T, K]",
    **OF_EXPERTS,
    ids="int64 [P]",
    bias="float [E, N]",
    rules={
        **FORMAT_RULES,
        **K_RULE,
        "P % T == 0 if T else P == 0": "{P} ids are not a multiple of the {T} rows of x",
        "not gated or N % 2 == 0": "a gated product takes an even N, got {N}",
    },
    types={
        "bias is None or bias.dtype == x.dtype": "bias must be of x's dtype, {x.dtype}; got {bias.dtype}"
    },
)
def expert_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    ids: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
    gated: bool = False,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    """Tokens times the weights of their experts; see the module's docstring."""
    floats = None if bias is None else bias.float()
    tensors = x.float(), codes, scale, zero_point, floats, ids, global_scale
    return _loop(weight_linear.reference, tensors, gated, group_size, bits, table).to(x.dtype)


reference, check = expert_linear.reference, expert_linear.check


def _loop(
    linear: Callable[..., Tensor],
    tensors: Tensors,
    gated: bool,
    group_size: int,
    bits: int,
    table: Sequence[float],
) -> Tensor:
    x, codes, scale, zero_point, bias, ids, global_scale = tensors
    out = x.new_zeros((ids.shape[0], codes.shape[1]))
    top = ids.shape[0] // max(x.shape[0], 1)
    for e in ids.unique().tolist():
        if 0 <= e < codes.shape[0]:
            pairs = torch.where(ids == e)[0]
            parts = [None if t is None else t[e] for t in (codes, scale, zero_point, bias)]
            format = group_size, global_scale, bits, table
            out[pairs] = linear(x[pairs // top], *parts, None, *format)
    if not gated:
        return out
    gate, up = out.float().chunk(2, 1)
    return (F.silu(gate) * up).to(x.dtype)


@dataclass
class ExpertLinearPlan:
    """How calls with operands of the same layouts run. `product`: None for "loop" and "empty"."""

    implementation: str
    product: Callable[[Tensors], Tensor] | None
    shape: tuple[int, int]  # of the result
    copies: bool = False  # the product copies an operand

    @functools.cached_property
    def launches(self) -> LaunchPlan | None:
        """The launch plan on the current device, after a first call; None where there is none, or it copies an
        operand."""
        found = None if self.copies else getattr(self.product, "launches", None)
        own = None if found is None else found()
        if own is None:
            return None
        whole = Composition(7, own.results)
        whole.add(own, (0, 1, 2, 3, 5, 4, 6), (7,))  # the op has ids before the bias
        return whole.plan()


@functools.lru_cache(maxsize=8192)
def planned(
    tensors: tuple[Description | None, ...],
    group_size: int,
    gated: bool = False,
    bits: int = 0,
    table: tuple[float, ...] = (),
    implementation: str | None = None,
) -> ExpertLinearPlan:
    """The plan for x, codes, scale, zero_point, ids, bias and global_scale that are `described` so.

    Args:
        implementation: "decode", "large", "triton" or "loop", for tests and benchmarks. ValueError where it doesn't
            take these.

    Raises: as `expert_linear`.
    """
    x, codes, scale, zero_point, ids, bias, global_scale = all_layouts(tensors)
    check(x, codes, scale, zero_point, ids, bias, group_size, gated, global_scale, bits, table)
    zeros = None if zero_point is None else zero_point.dtype
    format = format_of(codes.dtype, scale.dtype, zeros, bits, table)
    parts = (x, codes, scale, zero_point, bias, ids.shape[0], group_size, gated)
    operands = ExpertOperands(*parts, format, global_scale)
    shape = ids.shape[0], operands.results
    if 0 in (x.shape[0], codes.shape[0], *shape):
        return ExpertLinearPlan("empty", None, shape)
    if 0 in (*x.shape, *codes.shape):  # results are biases
        return ExpertLinearPlan("loop", None, shape)
    modules = {
        "decode": weight_mm_experts_sm90,
        "large": weight_mm_experts_large_sm90,
        "triton": weight_mm_experts_triton,
    }
    is_few = ids.shape[0] <= FEW * codes.shape[0]
    names = ("decode", "large", "triton") if is_few else ("large", "triton", "decode")
    for name in names if implementation is None else (implementation,):
        product = modules[name].product(operands) if name in modules else None
        if product is not None or name == "loop":
            as_they_are = (t is None or t.is_contiguous for t in (zero_point, bias, ids))
            copies = x.strides[1] != 1 or not (operands.has_aligned_scales and all(as_they_are))
            return ExpertLinearPlan(name, product, shape, copies)
    if implementation is not None:
        raise ValueError(f"{implementation} does not take {operands}; see its product()")
    return ExpertLinearPlan("loop", None, shape)


@expert_linear.kernel
def run(
    x,
    codes,
    scale,
    zero_point,
    ids,
    bias,
    group_size,
    gated,
    global_scale,
    bits,
    table,
    implementation: str | None = None,
) -> Tensor:
    """The op's kernel on every device, by the implementation that `planned` chooses or is given."""
    layouts = all_described(x, codes, scale, zero_point, ids, bias, global_scale)
    plan = planned(layouts, group_size, gated, bits, tuple(table), implementation)
    ran("expert_linear", plan.implementation)
    tensors: Any = (x, codes, scale, zero_point, bias, ids, global_scale)
    if plan.implementation == "empty":
        out = x.new_zeros(plan.shape)
    elif plan.product is None:
        out = _loop(weight_linear.run, tensors, gated, group_size, bits, table)
    else:
        out = plan.product(tensors)
    if x.is_cuda:
        with torch.cuda.device_of(x):
            launcher.learn("expert_linear", plan.launches)
    return out
