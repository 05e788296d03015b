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
WARPS = 4
PROGRAMS = 264
"""Two for each multiprocessor of an H200."""
LEAST_ROWS = 16
"""Of a product in tensor cores: queries are repeated to it."""


@triton.jit
def _with_partner(x, columns, HALF: tl.constexpr):
    """The elements `columns` of rows at `x` [.., 1], and those that they are turned with."""
    return tl.load(x + columns), tl.load(x + (columns + HALF) % (2 * HALF))


@triton.jit
def _turned(own, partner, c, s, factor):
    """`factor` times pairs (i, i + HALF) turned by their angle; `s` is −sin for the first of a pair."""
    turned = own.to(tl.float32) * c + partner.to(tl.float32) * s
    return (turned * factor).to(own.dtype)


@triton.jit
def _stretch(position, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The last position, the first and the end of a stretch, and how many stretches there are."""
    last = tl.load(position).to(tl.int32)
    length = tl.cdiv(tl.cdiv(last + 1, SPLITS), BLOCK) * BLOCK
    return last, split * length, tl.minimum((split + 1) * length, last + 1), last // length + 1


@triton.jit
def _added(q, k, v, scale, is_seen, largest, total, mixed):
    """An online softmax with more keys and their values."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
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
    key_batch,
    key_head,
    value_batch,
    value_head,
    HEADS: tl.constexpr,  # of keys, in a sequence
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LONG: tl.constexpr,  # whether a stretch can be more than a block
    OVERLAPS: tl.constexpr,
):
    """Position, angles, cache and x are read before the wait: older than the launch before, a linear, which lets this
    one begin after its own wait."""
    let_next_begin(OVERLAPS)
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, own_head = head // HEADS, head % HEADS
    last, begin, end, _ = _stretch(position, split, SPLITS, BLOCK)
    if begin > last:
        return
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    SAME: tl.constexpr = ROWS // PADDED  # rows of the products that are the same
    HALF: tl.constexpr = WIDTH // 2
    cache = head * capacity * WIDTH
    end_block = begin + (end - 1 - begin) // BLOCK * BLOCK
    at = end_block + tl.arange(0, BLOCK)
    of_cache = cache + at[:, None] * WIDTH + columns[None, :]
    k = tl.load(keys + of_cache, mask=(at < last)[:, None], other=0.0)
    v = tl.load(values + of_cache, mask=(at < last)[:, None], other=0.0)
    factor = factor_of(x, batch, x_width, eps, X_BLOCK)
    angle = last * HALF + columns % HALF
    c = tl.load(cos + angle).to(query.dtype.element_ty).to(tl.float32)
    s = tl.load(sin + angle).to(query.dtype.element_ty).to(tl.float32)
    s = tl.where(columns < HALF, -s, s)
    row = own_head * GROUP + tl.minimum(tl.arange(0, PADDED), GROUP - 1)
    q = query + batch * query_batch + row[:, None] * query_head
    new_key = key + batch * key_batch + own_head * key_head
    new_value = value + batch * value_batch + own_head * value_head
    wait_for_previous(OVERLAPS)
    q, q_partner = _with_partner(q, columns[None, :], HALF)
    new_key, key_partner = _with_partner(new_key, columns, HALF)
    new_value = tl.load(new_value + columns)
    q = _turned(q, q_partner, c[None, :], s[None, :], factor)
    q = tl.broadcast_to(q[:, None, :], [PADDED, SAME, WIDTH]).reshape(ROWS, WIDTH)
    new_key = _turned(new_key, key_partner, c, s, factor)
    new_value = (new_value.to(tl.float32) * factor).to(new_value.dtype)
    if end > last:
        tl.store(keys + cache + last * WIDTH + columns, new_key)
        tl.store(values + cache + last * WIDTH + columns, new_value)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    k = tl.where((at == last)[:, None], new_key[None, :], k)
    v = tl.where((at == last)[:, None], new_value[None, :], v)
    largest, total, mixed = _added(q, k, v, scale, at <= last, largest, total, mixed)
    if LONG:
        for start in range(begin, end_block, BLOCK):
            of_cache = cache + (start + tl.arange(0, BLOCK))[:, None] * WIDTH + columns[None, :]
            k, v = tl.load(keys + of_cache), tl.load(values + of_cache)
            seen = tl.full([BLOCK], 1, tl.int1)
            largest, total, mixed = _added(q, k, v, scale, seen, largest, total, mixed)
    part = (head * SPLITS + split) * GROUP + rows // SAME
    real = (rows % SAME == 0) & (rows // SAME < GROUP)
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
    _, _, _, used = _stretch(position, 0, SPLITS, BLOCK)
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
    group, all_heads = heads // kv_heads, batch * kv_heads
    splits = splits_for(all_heads, capacity)
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    parts = (all_heads, splits, group)
    sums = torch.empty((*parts, width), dtype=torch.float32, device=query.device)
    stats = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sizes = {"GROUP": group, "WIDTH": width, "SPLITS": splits, "BLOCK": BLOCK}
    sizes |= overlapping(query.device)
    _stretches[(all_heads, splits)](
        *(query, key, value, x.contiguous(), cos.contiguous(), sin.contiguous()),
        *(keys, values, position, sums, stats),
        *(1 / math.sqrt(width), eps, capacity, x.shape[-1]),
        *(stride for t in (query, key, value) for stride in t.stride()[:2]),
        **sizes,
        HEADS=kv_heads,
        PADDED=triton.next_power_of_2(group),
        ROWS=max(triton.next_power_of_2(group), LEAST_ROWS),
        LONG=splits * BLOCK < capacity,
        X_BLOCK=triton.next_power_of_2(x.shape[-1]),
        num_warps=WARPS,
    )
    _together[(batch * heads,)](sums, stats, result, position, **sizes)
    return result
