"""``grouped_scaled_mm`` in Triton, for GPUs that ``grouped_mm_sm90`` does not support and for the interpreter.

The grid covers the most tiles that any offsets can give. A program finds its expert in the offsets, or finds that it
has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.matmul.grouped_columns import STEP
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.triton_runtime import jit, stored_dtype, tl, triton


def takes(a: torch.dtype, b: torch.dtype, device: torch.device) -> bool:
    """True if Triton multiplies these formats on this device: int8, and on GPUs float8, both operands in one format."""
    if a == torch.int8:
        return True
    return a == b and device.type == "cuda" and nvrtc.capability(device) >= (8, 9)


@jit
def find_tile(
    offsets, m, experts, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, MORE: tl.constexpr = 0
):
    """A tile's expert (`experts` + MORE or more where there is none), its index in the expert, and where its tokens
    begin and end. MORE: 1 where the tokens after the last offset are those of one more expert."""
    every = tl.arange(0, EXPERTS)
    ends = tl.minimum(tl.load(offsets + every, mask=every < experts, other=m), m)
    inside = (every > 0) & (every <= experts)
    starts = tl.minimum(tl.load(offsets + every - 1, mask=inside, other=0), m)
    tiles = tl.maximum(tl.where(every < experts + MORE, ends - starts, 0), 0)
    tiles = (tiles + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(every < expert, tiles, 0), 0)
    start = tl.sum(tl.where(every == expert, starts, 0), 0)
    end = tl.sum(tl.where(every == expert, ends, 0), 0)
    return expert, tile - first, start, end


@jit
def _sums(a, b, row_inside, column_inside, begin, end, SUM: tl.constexpr, BLOCK_K: tl.constexpr):
    """The sums over columns `begin` to `end`; a and b point to the rows, [BLOCK_M] and [BLOCK_N]."""
    sums = tl.zeros((row_inside.shape[0], column_inside.shape[0]), SUM)
    for start in tl.range(begin, end, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = (at < end)[None, :]
        x = tl.load(a[:, None] + at[None, :], mask=row_inside[:, None] & inside, other=0.0)
        y = tl.load(b[:, None] + at[None, :], mask=column_inside[:, None] & inside, other=0.0)
        sums = tl.dot(x, tl.trans(y), sums, out_dtype=SUM)
    return sums


@jit
def _rows_kernel(
    a,  # [m, k]
    b,  # [experts, n, k]
    out,  # [m, n]
    a_scale,
    b_scale,
    offsets,
    m,
    n,
    k,
    experts,
    B_SCALES: tl.constexpr,
    SUM: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, tile, start, end = find_tile(offsets, m, experts, tl.program_id(0), EXPERTS, BLOCK_M)
    if expert < experts:
        rows = start.to(tl.int64) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        row_inside, column_inside = rows < end, columns < n
        own = expert.to(tl.int64) * n + columns
        sums = _sums(a + rows * k, b + own * k, row_inside, column_inside, 0, k, SUM, BLOCK_K)
        row_scale = tl.load(a_scale + rows, mask=row_inside, other=0)
        column_scale = tl.load(b_scale + own * B_SCALES, mask=column_inside, other=0)
        result = sums.to(tl.float32) * row_scale[:, None] * column_scale[None, :]
        wanted = row_inside[:, None] & column_inside[None, :]
        at = rows[:, None] * n + columns[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=wanted)


@jit
def _columns_kernel(
    a,  # [n, p]
    b,  # [k, p]
    out,  # [experts, n, k]
    a_scale,
    b_scale,
    offsets,
    n,
    k,
    p,
    experts,
    across,  # tiles of a row of out
    STEP: tl.constexpr,
    SUM: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    ends = tl.minimum(tl.load(offsets + every, mask=every < experts, other=0), p)
    before = (every > 0) & (every < experts)
    begins = tl.minimum(tl.load(offsets + every - 1, mask=before, other=0), p)
    tokens = tl.maximum(tl.where(every < experts, ends - begins, 0), 0)
    place = tl.sum(tl.where(every < expert, (tokens + STEP - 1) // STEP * STEP, 0), 0)
    count = tl.sum(tl.where(every == expert, tokens, 0), 0)
    rows = (tl.program_id(1) // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tl.program_id(1) % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_inside, column_inside = rows < n, columns < k
    end = tl.minimum(place + count, p)
    sums = _sums(a + rows * p, b + columns * p, row_inside, column_inside, place, end, SUM, BLOCK_K)
    of_rows = expert.to(tl.int64) * n + rows
    row_scale = tl.load(a_scale + of_rows, mask=row_inside, other=0)
    own = expert.to(tl.int64) * k + columns
    column_scale = tl.load(b_scale + own, mask=column_inside, other=0)
    result = sums.to(tl.float32) * row_scale[:, None] * column_scale[None, :]
    result = tl.where(count > 0, result, 0.0)  # scales of experts without tokens have any value
    wanted = row_inside[:, None] & column_inside[None, :]
    at = of_rows[:, None] * k + columns[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=wanted)


def grouped_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``lowbit::grouped_scaled_mm`` where Triton runs. The operands are checked; no size is 0."""
    a, b, a_scale, b_scale, offsets = (t.contiguous() for t in (a, b, a_scale, b_scale, offsets))
    experts, stored = offsets.shape[0], stored_dtype(out_dtype, a.device)
    options = {**_blocks(a.device), "EXPERTS": triton.next_power_of_2(experts)}
    options["SUM"] = tl.int32 if a.dtype == torch.int8 else tl.float32
    height, wide = options["BLOCK_M"], options["BLOCK_N"]
    with torch.cuda.device_of(a):
        if b.dim() == 2:
            (n, p), k = a.shape, b.shape[0]
            out = a.new_empty((experts, n, k), dtype=stored)
            spread = b_scale.expand(experts, k).contiguous()
            across = triton.cdiv(k, wide)
            _columns_kernel[experts, triton.cdiv(n, height) * across](
                a, b, out, a_scale, spread, offsets, n, k, p, experts, across, STEP=STEP, **options
            )
        else:
            (m, k), n = a.shape, b.shape[1]
            out = a.new_zeros((m, n), dtype=stored)
            grid = (m // height + experts, triton.cdiv(n, wide))
            per_row = int(b_scale.dim() > 1)
            _rows_kernel[grid](
                *(a, b, out, a_scale, b_scale, offsets, m, n, k, experts),
                B_SCALES=per_row,
                **options,
            )
    return out.to(out_dtype)


def _blocks(device: torch.device) -> dict[str, object]:
    if device.type == "cpu":  # the interpreter: small blocks
        return {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
