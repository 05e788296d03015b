"""The kernels of `attend_last`: positions split over the GPU, then the parts put together.

A program takes the queries of one key/value head (they share its keys) and one of `splits` stretches of the positions
that there are, and keeps the running maximum m, the sum l of exp(s − m), and the sum of exp(s − m) · v. The second
kernel weighs the stretches by exp(m − largest m). Source: Flash-Decoding, and online softmax, arXiv 1805.02867.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
PROGRAMS = 264
"""Two for each multiprocessor of an H200."""
LEAST_ROWS = 16
"""Of a product in tensor cores: queries are padded to it."""


@triton.jit
def _stretches(
    query,
    keys,
    values,
    position,
    sums,
    stats,
    scale,
    capacity,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(position).to(tl.int32) + 1
    stretch = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    begin = split * stretch
    end = tl.minimum(begin + stretch, length)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    of_query = (head * GROUP + rows)[:, None] * WIDTH + columns[None, :]
    q = tl.load(query + of_query, mask=(rows < GROUP)[:, None], other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    cache = head * capacity * WIDTH
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        of_cache = cache + at[:, None] * WIDTH + columns[None, :]
        seen = at < end
        k = tl.load(keys + of_cache, mask=seen[:, None], other=0.0)
        v = tl.load(values + of_cache, mask=seen[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        share = tl.exp(score - new[:, None])
        kept = tl.exp(largest - new)
        total = total * kept + tl.sum(share, 1)
        mixed = mixed * kept[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        largest = new
    of_part = (head * SPLITS + split) * GROUP + rows
    real = rows < GROUP
    tl.store(sums + of_part[:, None] * WIDTH + columns[None, :], mixed, mask=real[:, None])
    tl.store(stats + of_part * 2, largest, mask=real)
    tl.store(stats + of_part * 2 + 1, total, mask=real)


@triton.jit
def _together(sums, stats, result, GROUP: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    head, row = query // GROUP, query % GROUP
    columns = tl.arange(0, WIDTH)
    part = (head * SPLITS + tl.arange(0, SPLITS)) * GROUP + row
    largest = tl.load(stats + part * 2)
    weight = tl.exp(largest - tl.max(largest, 0))
    total = tl.sum(weight * tl.load(stats + part * 2 + 1), 0)
    mixed = tl.load(sums + part[:, None] * WIDTH + columns[None, :])
    y = tl.sum(weight[:, None] * mixed, 0) / total
    tl.store(result + query * WIDTH + columns, y.to(result.dtype.element_ty))


def splits_for(heads: int, capacity: int) -> int:
    """A power of two: enough programs for the GPU, none without a block even of a full cache."""
    most = min(max(PROGRAMS // heads, 1), max(capacity // BLOCK, 1))
    return 1 << (most.bit_length() - 1)


def flash_decode(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """As `attend_last`. E must be a power of two of at least 16."""
    batch, heads, _, width = query.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    if width < 16 or width & (width - 1):
        raise ValueError(f"heads must be 16, 32, 64, … wide, got {width}")
    group, all_heads = heads // kv_heads, batch * kv_heads
    splits = splits_for(all_heads, capacity)
    query = query.contiguous()
    parts = (all_heads, splits, group)
    sums = torch.empty((*parts, width), dtype=torch.float32, device=query.device)
    stats = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)
    result = torch.empty_like(query)
    padded = max(triton.next_power_of_2(group), LEAST_ROWS)
    sizes = {"GROUP": group, "WIDTH": width, "SPLITS": splits}
    _stretches[(all_heads, splits)](
        *(query, keys, values, position, sums, stats, 1 / math.sqrt(width), capacity),
        **sizes,
        ROWS=padded,
        BLOCK=BLOCK,
    )
    _together[(batch * heads,)](sums, stats, result, **sizes)
    return result
