"""The kernels of `attend_next`: attention of one new position.

Its positions are split over the GPU, then the parts put together. A program takes the queries of one key/value head
(they share its keys) and one of `splits` stretches of the positions that there are. It turns the queries; that of the
last stretch also turns the new key, takes it and the new value from where they came in, and writes both to the cache.
It keeps the running maximum m, the sum l of exp(s − m), and the sum of exp(s − m) · v. The second kernel weighs the
stretches by exp(m − largest m). Source: Flash-Decoding, and online softmax, arXiv 1805.02867.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.decode.kernels import factor_of, let_next_begin, overlapping, wait_for_previous

BLOCK = 64
WARPS, LONG_WARPS = 8, 4
"""Of a program whose stretch is one block, and of one that may have more."""
PROGRAMS = 264
"""Two for each multiprocessor of an H200."""
LEAST_ROWS = 16
"""Of a product in tensor cores: queries are repeated to it."""


@triton.jit
def _angle(cos, sin, position, columns, HALF: tl.constexpr, dtype: tl.constexpr):
    """cos and sin of a position for `_turned`, rounded to `dtype`: sin is negated for the first of a pair."""
    at = position * HALF + columns % HALF
    c = tl.load(cos + at).to(dtype).to(tl.float32)
    s = tl.load(sin + at).to(dtype).to(tl.float32)
    return c, tl.where(columns < HALF, -s, s)


@triton.jit
def _turned(own, partner, c, s, factor):
    """`factor` times elements turned with their partners, HALF apart."""
    turned = own.to(tl.float32) * c + partner.to(tl.float32) * s
    return (turned * factor).to(own.dtype)


@triton.jit
def _new_position(query, key, value, columns, c, s, factor, SAME: tl.constexpr, HALF: tl.constexpr):
    """The queries at `query` [PADDED, 1], each SAME times, and the key, turned; the value. All are loaded first."""
    partner = (columns + HALF) % (2 * HALF)
    q, q_partner = tl.load(query + columns[None, :]), tl.load(query + partner[None, :])
    k, k_partner, v = tl.load(key + columns), tl.load(key + partner), tl.load(value + columns)
    q = _turned(q, q_partner, c[None, :], s[None, :], factor)
    q = tl.broadcast_to(q[:, None, :], [q.shape[0], SAME, 2 * HALF])
    k, v = _turned(k, k_partner, c, s, factor), (v.to(tl.float32) * factor).to(v.dtype)
    return q.reshape(q.shape[0] * SAME, 2 * HALF), k, v


@triton.jit
def _stretch(position, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The last position; where a stretch, its last block, and what comes after begin; how many stretches are used."""
    last = tl.load(position).to(tl.int32)
    length = tl.cdiv(tl.cdiv(last + 1, SPLITS), BLOCK) * BLOCK
    begin, end = split * length, tl.minimum((split + 1) * length, last + 1)
    return last, begin, begin + (end - 1 - begin) // BLOCK * BLOCK, end, last // length + 1


@triton.jit
def _block(keys, values, at, columns, mask, other, WIDTH: tl.constexpr):
    of_cache = at[:, None] * WIDTH + columns[None, :]
    return tl.load(keys + of_cache, mask, other), tl.load(values + of_cache, mask, other)


@triton.jit
def _replaced(block, is_new, new):
    return tl.where(is_new[:, None], new[None, :], block)


@triton.jit
def _nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of an online softmax, before any key: the largest score, the sum of exp, the sum of values."""
    zeros = tl.zeros([ROWS], tl.float32)
    return zeros - float("inf"), zeros, tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def _added(q, k, v, scale, is_seen, largest, total, mixed):
    """An online softmax with more keys and their values, of which those that `is_seen` count; None: all."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if is_seen is not None:
        score = tl.where(is_seen[None, :], score, float("-inf"))
    new = tl.maximum(largest, tl.max(score, 1))
    share = tl.exp(score - new[:, None])
    kept = tl.exp(largest - new)
    mixed = mixed * kept[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
    return new, total * kept + tl.sum(share, 1), mixed


@triton.jit
def _stretches(
    query,
    key,
    value,
    x,
    cos,
    sin,
    keys,
    values,
    position,
    sums,
    stats,
    scale,
    eps,
    capacity,
    x_width,
    query_batch,  # strides
    query_head,
    key_batch,  # of value too
    key_head,
    HEADS: tl.constexpr,  # of keys, in a sequence
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    SAME: tl.constexpr,  # rows of a product for a query
    WIDTH: tl.constexpr,
    X_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LONG: tl.constexpr,  # whether a stretch can be more than a block
    OVERLAPS: tl.constexpr,
):
    """A stretch is its last block, read early, then the blocks before it.

    Position, angles, cache and x are read before the wait: older than the launch before, a linear, which lets this
    one begin after its own wait.
    """
    let_next_begin(OVERLAPS)
    head, split, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    batch, own_head = head // HEADS, head % HEADS
    last, begin, end_block, end, _ = _stretch(position, split, SPLITS, BLOCK)
    if begin > last:
        return
    keys, values = keys + head * capacity * WIDTH, values + head * capacity * WIDTH
    at = end_block + tl.arange(0, BLOCK)
    k, v = _block(keys, values, at, columns, (at < last)[:, None], 0.0, WIDTH)
    factor = factor_of(x, batch, x_width, eps, X_BLOCK)
    c, s = _angle(cos, sin, last, columns, WIDTH // 2, query.dtype.element_ty)
    row = own_head * GROUP + tl.minimum(tl.arange(0, PADDED), GROUP - 1)
    query += batch * query_batch + row[:, None] * query_head
    key += batch * key_batch + own_head * key_head
    value += batch * key_batch + own_head * key_head
    wait_for_previous(OVERLAPS)
    q, new_k, new_v = _new_position(query, key, value, columns, c, s, factor, SAME, WIDTH // 2)
    if end > last:
        tl.store(keys + last * WIDTH + columns, new_k)
        tl.store(values + last * WIDTH + columns, new_v)
    k, v = _replaced(k, at == last, new_k), _replaced(v, at == last, new_v)
    largest, total, mixed = _nothing(PADDED * SAME, WIDTH)
    largest, total, mixed = _added(q, k, v, scale, at <= last, largest, total, mixed)
    if LONG:
        for start in range(begin, end_block, BLOCK):
            k, v = _block(keys, values, start + tl.arange(0, BLOCK), columns, None, None, WIDTH)
            largest, total, mixed = _added(q, k, v, scale, None, largest, total, mixed)
    part = (head * SPLITS + split) * GROUP
    _leave(sums, stats, part, columns, largest, total, mixed, GROUP, PADDED, SAME, WIDTH)


@triton.jit
def _leave(
    sums,
    stats,
    part,
    columns,
    largest,
    total,
    mixed,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    SAME: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One of each query's rows, that are the same."""
    rows = tl.arange(0, PADDED * SAME)
    real = (rows % SAME == 0) & (rows // SAME < GROUP)
    part += rows // SAME
    tl.store(sums + part[:, None] * WIDTH + columns[None, :], mixed, mask=real[:, None])
    tl.store(stats + part * 2, largest, mask=real)
    tl.store(stats + part * 2 + 1, total, mask=real)


@triton.jit
def _together(
    sums,
    stats,
    result,
    position,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    query, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    head, row, columns = query // GROUP, query % GROUP, tl.arange(0, WIDTH)
    _, _, _, _, used = _stretch(position, 0, SPLITS, BLOCK)
    seen, part = split < used, (head * SPLITS + split) * GROUP + row
    wait_for_previous(OVERLAPS)
    largest = tl.load(stats + part * 2, mask=seen, other=float("-inf"))
    total = tl.load(stats + part * 2 + 1, mask=seen, other=0.0)
    of_part = part[:, None] * WIDTH + columns[None, :]
    mixed = tl.load(sums + of_part, mask=seen[:, None], other=0.0)
    weight = tl.exp(largest - tl.max(largest, 0))
    y = tl.sum(weight[:, None] * mixed, 0) / tl.sum(weight * total, 0)
    tl.store(result + query * WIDTH + columns, y.to(result.dtype.element_ty))


def splits_for(heads: int, capacity: int) -> int:
    """A power of two: enough programs for the GPU, none without a block even of a full cache."""
    most = min(max(PROGRAMS // heads, 1), max(capacity // BLOCK, 1))
    return 1 << (most.bit_length() - 1)


def flash_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    x: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """As `attend_next`. E must be a power of two of at least 16."""
    batch, heads, _, width = query.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    if width < 16 or width & (width - 1):
        raise ValueError(f"heads must be 16, 32, 64, … wide, got {width}")
    for name, one in (
        ("x", x),
        ("cos", cos),
        ("sin", sin),
    ):  # copies would be younger than they may be
        if not one.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {one.stride()}; pass it so")
    group, all_heads = heads // kv_heads, batch * kv_heads
    splits = splits_for(all_heads, capacity)
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    if key.stride() != value.stride():
        key, value = key.contiguous(), value.contiguous()
    parts = (all_heads, splits, group)
    sums = torch.empty((*parts, width), dtype=torch.float32, device=query.device)
    stats = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    is_long = splits * BLOCK < capacity
    sizes = {"GROUP": group, "WIDTH": width, "SPLITS": splits, "BLOCK": BLOCK}
    sizes |= overlapping(query.device)
    _stretches[(all_heads, splits)](
        *(query, key, value, x, cos, sin),
        *(keys, values, position, sums, stats),
        *(1 / math.sqrt(width), eps, capacity, x.shape[-1]),
        *(stride for t in (query, key) for stride in t.stride()[:2]),
        **sizes,
        HEADS=kv_heads,
        PADDED=triton.next_power_of_2(group),
        SAME=max(LEAST_ROWS // triton.next_power_of_2(group), 1),
        LONG=is_long,
        X_BLOCK=triton.next_power_of_2(x.shape[-1]),
        num_warps=LONG_WARPS if is_long else WARPS,
    )
    _together[(batch * heads,)](sums, stats, result, position, **sizes)
    return result
