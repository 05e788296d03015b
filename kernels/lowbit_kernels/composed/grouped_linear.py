"""Tokens sorted by expert, each multiplied by its expert's weight of 4 or 8 bits.

    out[m] = the product of `weight_linear` of x[m] and expert e's weight,  for offsets[e - 1] <= m < offsets[e]

    x           bfloat16, float16 or float32 [M, K]
    codes       4 bits: uint8 [E, N, ceil(Kp / 2)];  8 bits: int8 [E, N, Kp]
    scale       float32, bfloat16 or float16 [E, N, Kp / G]
    zero_point  int8 [E, N, Kp / G], or None for 0
    offsets     int32 [E], on x's device: ends of the experts' tokens, as in ``torch._grouped_mm``; ascending, 0 to M
    out         x's dtype [M, N], contiguous; rows from the last offset on are 0

G is `group_size`, and Kp is K padded to a multiple of it.

The op does not check the values of the offsets, because reading them waits for the GPU. With wrong values, tokens get
the weight of any expert, or zeros.

Implementations, as `launches` reports them:

    triton      GPUs, for groups of multiples of 32 or one scale a row: one launch, which never rounds the weight
    loop        CPUs and other groups: `weight_linear` expert by expert; on a GPU this waits for the offsets
    empty       no product: M, N, K or E is 0

The Triton grid covers the most tiles of tokens that any offsets can give. A program reads its expert from the offsets,
or finds that it has none. So nothing waits for the host, and offsets may change between replays of a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import (
    jit,
    runs_on,
    stored_dtype,
    tl,
    triton,
)
from lowbit_kernels.weight_only import weight_linear, weight_mm_triton
from lowbit_kernels.weight_only.codes_format import bits_of
from lowbit_kernels.weight_only.weight_mm_triton import sums_of_blocks
from lowbit_kernels.weight_only.weight_operands import (
    K_RULE,
    Description,
    all_described,
    all_layouts,
    group_rules,
)

MOST_ROWS = 64  # of a tile


@op(
    "empty(x.dtype, M, N)",
    by_layout=True,
    x="float [M, K]",
    codes="uint8|int8 [E, N, W]; uint8 holds two codes of 4 bits in a byte",
    scale="float [E, N, groups]",
    zero_point="int8 [E, N, groups]; it lies on the codes' grid",
    offsets="int32 [E]",
    rules={**group_rules(), **K_RULE},
)
def grouped_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    offsets: Tensor,
    *,
    group_size: int,
) -> Tensor:
    """Tokens times their experts' weights; the module's docstring has shapes, dtypes and the formula.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes that don't fit each other, or tensors on several devices.
    """
    return _loop(weight_linear.reference, x, codes, scale, zero_point, offsets, group_size)


reference, check = grouped_linear.reference, grouped_linear.check


def _loop(linear, x, codes, scale, zero_point, offsets, group_size) -> Tensor:
    out = x.new_zeros((x.shape[0], codes.shape[1]))
    start = 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            zero = None if zero_point is None else zero_point[e]
            out[start:end] = linear(x[start:end], codes[e], scale[e], zero, None, None, group_size)
        start = max(start, end)
    return out


@jit
def find_tile(offsets, m, experts, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's expert (`experts` where there is none), its index in the expert, and where its tokens begin and end."""
    every = tl.arange(0, EXPERTS)
    ends = tl.minimum(tl.load(offsets + every, mask=every < experts, other=0), m)
    inside = (every > 0) & (every < experts)
    starts = tl.minimum(tl.load(offsets + every - 1, mask=inside, other=0), m)
    tiles = tl.maximum(tl.where(every < experts, ends - starts, 0), 0)
    tiles = (tiles + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(every < expert, tiles, 0), 0)
    start = tl.sum(tl.where(every == expert, starts, 0), 0)
    end = tl.sum(tl.where(every == expert, ends, 0), 0)
    return expert, tile - first, start, end


@jit
def _kernel(
    x,
    codes,
    scale,
    zero_point,
    offsets,
    out,
    m,
    n,
    k,
    experts,
    width,
    x_stride,
    codes_expert,  # stride of experts
    codes_stride,
    scale_expert,
    scale_stride,
    zero_expert,
    zero_stride,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    expert, tile, start, end = find_tile(offsets, m, experts, tile, EXPERTS, BLOCK_M)
    if expert < experts:
        rows = start.to(tl.int64) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        row_inside, column_inside = rows < end, columns < n
        e = expert.to(tl.int64)
        zero_rows = zero_point
        if zero_point is not None:
            zero_rows = zero_point + e * zero_expert + columns * zero_stride
        sums = sums_of_blocks(
            x + rows * x_stride,
            row_inside,
            codes + e * codes_expert + columns * codes_stride,
            scale + e * scale_expert + columns * scale_stride,
            zero_rows,
            column_inside,
            0,
            k,
            k,
            width,
            GROUP_SIZE,
            BITS,
            WORD,
            BLOCK_K,
        )
        at = rows[:, None] * n + columns[None, :]
        wanted = row_inside[:, None] & column_inside[None, :]
        tl.store(out + at, tl.trans(sums).to(out.dtype.element_ty), mask=wanted)


class GroupedLinearPlan(NamedTuple):
    """How calls with operands of the same layouts run; all but the first two are for "triton"."""

    implementation: Literal["triton", "loop", "empty"]
    shape: tuple[int, int]  # of the result
    grid: tuple[int, int] = (0, 0)
    word: int = 0  # codes of a word
    options: Mapping[str, Any] = {}


@functools.lru_cache(maxsize=8192)
def planned(tensors: tuple[Description | None, ...], group_size: int) -> GroupedLinearPlan:
    """The plan for x, codes, scale, zero_point and offsets that are `described` so; errors as of `grouped_linear`."""
    layouts = all_layouts(tensors)
    check(*layouts, group_size)
    x, codes, scale, *_ = layouts
    (m, k), (experts, n, groups) = x.shape, scale.shape
    block = weight_mm_triton.block_of_k(group_size, groups)
    if 0 in (m, n, k, experts):
        return GroupedLinearPlan("empty", (m, n))
    if not (runs_on(x.device) and block):
        return GroupedLinearPlan("loop", (m, n))
    bits = bits_of(codes.dtype)
    codes = codes if codes.strides[-1] == 1 else codes.copied()  # as `_launch` copies it
    word = weight_mm_triton.codes_of_word(codes, bits, block)
    rows = max(16, min(MOST_ROWS, triton.next_power_of_2(-(-m // experts))))
    options = {
        "GROUP_SIZE": 0 if groups == 1 else group_size,
        "BITS": bits,
        "WORD": word,
        "EXPERTS": triton.next_power_of_2(experts),
        "BLOCK_M": rows,
        "BLOCK_N": 64,
        "BLOCK_K": block,
        "num_warps": 4,
        "num_stages": 3,
    }
    grid = (min(m, m // rows + experts), -(-n // 64))
    return GroupedLinearPlan("triton", (m, n), grid, word, options)


@grouped_linear.kernel
def _run(x, codes, scale, zero_point, offsets, group_size) -> Tensor:
    plan = planned(all_described(x, codes, scale, zero_point, offsets), group_size)
    ran("grouped_linear", plan.implementation)
    if plan.implementation == "empty":
        return x.new_zeros(plan.shape)
    if plan.implementation == "loop":
        return _loop(weight_linear.run, x, codes, scale, zero_point, offsets, group_size)
    return _launch(plan, x, codes, scale, zero_point, offsets)


def _launch(plan: GroupedLinearPlan, x, codes, scale, zero_point, offsets) -> Tensor:
    (m, k), (experts, n, groups), dtype = x.shape, scale.shape, x.dtype
    if x.device.type == "cpu":  # the interpreter has no bfloat16
        x = x.float()
    x, codes, scale = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, codes, scale))
    zeros = None if zero_point is None else zero_point.contiguous()
    words = weight_mm_triton.in_words(codes, plan.word)
    out = x.new_zeros(plan.shape, dtype=stored_dtype(dtype, x.device))
    with torch.cuda.device_of(x):
        _kernel[plan.grid](
            *(x, words, scale, zeros, offsets.contiguous(), out),
            *(m, n, k, experts, words.shape[2], x.stride(0)),
            *(*words.stride()[:2], *scale.stride()[:2], *(n * groups, groups)),
            **plan.options,
        )
    return out.to(dtype)
