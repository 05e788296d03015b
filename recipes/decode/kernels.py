"""The kernels of one new position: `attend_next`, `norm_next` and `gate_next`.

Attention has its positions split over the GPU, then the parts put together. A program takes the queries of one
key/value head (they share its keys) and one of `splits` stretches of the positions that there are. It turns the
queries; that of the last stretch also turns the new key, takes it and the new value from where they came in, and writes
both to the cache. It keeps the running maximum m, the sum l of exp(s − m), and the sum of exp(s − m) · v. The second
kernel weighs the stretches by exp(m − largest m). Source: Flash-Decoding, and online softmax, arXiv 1805.02867.

Where launches overlap (OVERLAPS; programmatic dependent launch), a kernel begins while the one before it ends, waits
for that one's results, and lets the next one begin.
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
GATE_BLOCK = 1024
"""Of silu(gate) · up, elements of a program."""
LEAST_ROWS = 16
"""Of a product in tensor cores: queries are padded to it."""


@triton.jit
def _after_previous(OVERLAPS: tl.constexpr):
    """Lets the next launch begin, then waits until the one before is done and its results are seen.

    So the next one may begin before the one before is done: it must read nothing that either writes until it has
    waited itself, as the linears and the kernels here do.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _turned(x, columns, cos, sin, HALF: tl.constexpr):
    """The elements `columns` of rows at `x` [.., 1], each pair (i, i + HALF) turned by its angle."""
    c = tl.load(cos + columns % HALF).to(x.dtype.element_ty).to(tl.float32)
    s = tl.load(sin + columns % HALF).to(x.dtype.element_ty).to(tl.float32)
    s = tl.where(columns < HALF, -s, s)
    own = tl.load(x + columns).to(tl.float32)
    other = tl.load(x + (columns + HALF) % (2 * HALF)).to(tl.float32)
    return (own * c + other * s).to(x.dtype.element_ty)


@triton.jit
def _of_cache(keys, values, cache, start, end, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values [BLOCK, WIDTH] of the positions from `start` on; 0 from `end` on."""
    at = start + tl.arange(0, BLOCK)
    of_cache = cache + at[:, None] * WIDTH + columns[None, :]
    seen = (at < end)[:, None]
    k = tl.load(keys + of_cache, mask=seen, other=0.0)
    return k, tl.load(values + of_cache, mask=seen, other=0.0)


@triton.jit
def _added(score, v, largest, total, mixed):
    """Of an online softmax, with more scores and their values."""
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
    cos,
    sin,
    keys,
    values,
    position,
    sums,
    stats,
    scale,
    capacity,
    query_batch,  # strides
    query_head,
    key_batch,
    key_head,
    value_batch,
    value_head,
    HEADS: tl.constexpr,  # of keys, in a sequence
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Position and cache are read before the wait: older than the launch before, a linear, which lets this one begin
    after its own wait."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, own_head = head // HEADS, head % HEADS
    last = tl.load(position).to(tl.int32)
    stretch = tl.cdiv(tl.cdiv(last + 1, SPLITS), BLOCK) * BLOCK
    begin, end = split * stretch, tl.minimum((split + 1) * stretch, last + 1)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    cache = head * capacity * WIDTH
    old = tl.minimum(end, last)
    k, v = _of_cache(keys, values, cache, begin, old, columns, WIDTH, BLOCK)
    _after_previous(OVERLAPS)
    row = own_head * GROUP + tl.minimum(rows, GROUP - 1)  # those beyond the group are not stored
    q = query + batch * query_batch + row[:, None] * query_head
    q = _turned(q, columns[None, :], cos, sin, WIDTH // 2)
    new_key = key + batch * key_batch + own_head * key_head
    new_key = _turned(new_key, columns, cos, sin, WIDTH // 2)
    new_value = tl.load(value + batch * value_batch + own_head * value_head + columns)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    is_last = (columns < WIDTH) & (last >= begin) & (last < end)
    tl.store(keys + cache + last * WIDTH + columns, new_key, mask=is_last)
    tl.store(values + cache + last * WIDTH + columns, new_value, mask=is_last)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_new = (at == last)[:, None]
        own_k = tl.where(is_new, new_key[None, :], k)
        own_v = tl.where(is_new, new_value[None, :], v)
        k, v = _of_cache(keys, values, cache, start + BLOCK, old, columns, WIDTH, BLOCK)
        score = tl.dot(q, tl.trans(own_k), input_precision="ieee") * scale
        score = tl.where((at < end)[None, :], score, float("-inf"))
        largest, total, mixed = _added(score, own_v, largest, total, mixed)
    part = (head * SPLITS + split) * GROUP + rows
    _leave(sums, stats, part, rows < GROUP, columns, mixed, largest, total, WIDTH)


@triton.jit
def _leave(sums, stats, part, real, columns, mixed, largest, total, WIDTH: tl.constexpr):
    tl.store(sums + part[:, None] * WIDTH + columns[None, :], mixed, mask=real[:, None])
    tl.store(stats + part * 2, largest, mask=real)
    tl.store(stats + part * 2 + 1, total, mask=real)


@triton.jit
def _together(
    sums,
    stats,
    result,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    _after_previous(OVERLAPS)
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


@triton.jit
def _norm_rows(x, weight, result, eps, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    _after_previous(OVERLAPS)
    own = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    y = own * tl.rsqrt(tl.sum(own * own, 0) / width + eps) * factor
    tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _gate_rows(
    gate, up, result, gate_stride, up_stride, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    _after_previous(OVERLAPS)
    own = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = own * tl.sigmoid(own) * other
    tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)


def overlapping(device: torch.device) -> dict[str, bool]:
    """Of a Triton launch: whether it may begin before the one before it is done, for which its kernel waits."""
    overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


def splits_for(heads: int, capacity: int) -> int:
    """A power of two: enough programs for the GPU, none without a block even of a full cache."""
    most = min(max(PROGRAMS // heads, 1), max(capacity // BLOCK, 1))
    return 1 << (most.bit_length() - 1)


def flash_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    sizes = {"GROUP": group, "WIDTH": width, "SPLITS": splits, **overlapping(query.device)}
    _stretches[(all_heads, splits)](
        *(query, key, value, cos.contiguous(), sin.contiguous(), keys, values, position),
        *(sums, stats, 1 / math.sqrt(width), capacity),
        *(stride for t in (query, key, value) for stride in t.stride()[:2]),
        **sizes,
        HEADS=kv_heads,
        ROWS=max(triton.next_power_of_2(group), LEAST_ROWS),
        BLOCK=BLOCK,
    )
    _together[(batch * heads,)](sums, stats, result, **sizes)
    return result


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `norm_next`."""
    x, width = x.contiguous(), x.shape[-1]
    result = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 256, 1), 16)
    _norm_rows[(x.numel() // width,)](
        *(x, weight, result, eps, width),
        BLOCK=block,
        num_warps=warps,
        **overlapping(x.device),
    )
    return result


def gate_rows(gate: Tensor, up: Tensor) -> Tensor:
    """As `gate_next`."""
    batch, _, width = gate.shape
    gate, up = (t if t.stride(2) == 1 else t.contiguous() for t in (gate, up))
    result = gate.new_empty(gate.shape)
    _gate_rows[(batch, triton.cdiv(width, GATE_BLOCK))](
        *(gate, up, result, gate.stride(0), up.stride(0), width),
        BLOCK=GATE_BLOCK,
        **overlapping(gate.device),
    )
    return result
