"""The kernels of one new position: `attend_next`, `gate_next`, `norm_next` and `choose_next`.

Attention has its positions split over the GPU. A program takes the queries of one key/value head (they share its keys)
and one stretch of the positions that there are. It turns the queries; that of the last stretch also turns the new key,
takes it and the new value from where they came in, and writes both to the cache. It keeps the running maximum m, the
sum l of exp(s − m), and the sum of exp(s − m) · v, and leaves them in memory. The program of a head that is done last
weighs the stretches by exp(m − largest m). Source: Flash-Decoding, and online softmax, arXiv 1805.02867.

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
CHOICE_BLOCK = 1024
"""Of logits, those that a program looks through."""
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
def _is_last(arrived, programs):
    """Whether the other `programs` that come here have been here; what they stored before is seen then.

    `arrived` is 0 before the first and after the last.
    """
    tl.debug_barrier()  # all threads have stored
    is_last = tl.atomic_add(arrived, 1) == programs - 1
    tl.store(arrived, 0, mask=is_last)
    return is_last


@triton.jit
def _factor(x, row, width, eps, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of a row: what RMS norm multiplies it by."""
    columns = tl.arange(0, BLOCK)
    own = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(own * own, 0) / width + eps)


@triton.jit
def _turned(x, columns, c, s, factor, HALF: tl.constexpr):
    """`factor` times the elements `columns` of rows at `x` [.., 1], each pair (i, i + HALF) turned by its angle."""
    own = tl.load(x + columns).to(tl.float32)
    other = tl.load(x + (columns + HALF) % (2 * HALF)).to(tl.float32)
    return ((own * c + other * s) * factor).to(x.dtype.element_ty)


@triton.jit
def _of_cache(keys, values, cache, start, end, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values [BLOCK, WIDTH] of the positions from `start` on; 0 from `end` on."""
    at = start + tl.arange(0, BLOCK)
    of_cache = cache + at[:, None] * WIDTH + columns[None, :]
    seen = (at < end)[:, None]
    k = tl.load(keys + of_cache, mask=seen, other=0.0)
    return k, tl.load(values + of_cache, mask=seen, other=0.0)


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
def _attend(
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
    arrived,
    result,
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
    OVERLAPS: tl.constexpr,
):
    """Position, cache, angles and x are read before the wait: older than the launch before, a linear, which lets this
    one begin after its own wait."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, own_head = head // HEADS, head % HEADS
    last = tl.load(position).to(tl.int32)
    stretch = tl.cdiv(tl.cdiv(last + 1, SPLITS), BLOCK) * BLOCK
    begin, end = split * stretch, tl.minimum((split + 1) * stretch, last + 1)
    if begin > last:
        return
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    cache = head * capacity * WIDTH
    old = tl.minimum(end, last)
    k, v = _of_cache(keys, values, cache, begin, old, columns, WIDTH, BLOCK)
    factor = _factor(x, batch, x_width, eps, X_BLOCK)
    c = tl.load(cos + columns % (WIDTH // 2)).to(query.dtype.element_ty).to(tl.float32)
    s = tl.load(sin + columns % (WIDTH // 2)).to(query.dtype.element_ty).to(tl.float32)
    s = tl.where(columns < WIDTH // 2, -s, s)
    _after_previous(OVERLAPS)
    row = own_head * GROUP + tl.minimum(rows, GROUP - 1)  # those beyond the group are not stored
    q = query + batch * query_batch + row[:, None] * query_head
    q = _turned(q, columns[None, :], c[None, :], s[None, :], factor, WIDTH // 2)
    new_key = key + batch * key_batch + own_head * key_head
    new_key = _turned(new_key, columns, c, s, factor, WIDTH // 2)
    new_value = tl.load(value + batch * value_batch + own_head * value_head + columns)
    new_value = (new_value.to(tl.float32) * factor).to(value.dtype.element_ty)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    is_new = (columns < WIDTH) & (end > last)
    tl.store(keys + cache + last * WIDTH + columns, new_key, mask=is_new)
    tl.store(values + cache + last * WIDTH + columns, new_value, mask=is_new)
    for start in range(begin, end - BLOCK, BLOCK):
        next_k, next_v = _of_cache(keys, values, cache, start + BLOCK, old, columns, WIDTH, BLOCK)
        seen = tl.full([BLOCK], 1, tl.int1)
        largest, total, mixed = _added(q, k, v, scale, seen, largest, total, mixed)
        k, v = next_k, next_v
    at = begin + (end - begin - 1) // BLOCK * BLOCK + tl.arange(0, BLOCK)
    k = tl.where((at == last)[:, None], new_key[None, :], k)
    v = tl.where((at == last)[:, None], new_value[None, :], v)
    largest, total, mixed = _added(q, k, v, scale, at < end, largest, total, mixed)
    part = (head * SPLITS + split) * GROUP + rows
    _leave(sums, stats, part, rows < GROUP, columns, mixed, largest, total, WIDTH)
    used = last // stretch + 1
    if _is_last(arrived + head, used):
        _join(sums, stats, result, head, used, columns, GROUP, PADDED, WIDTH, SPLITS)


@triton.jit
def _leave(sums, stats, part, real, columns, mixed, largest, total, WIDTH: tl.constexpr):
    tl.store(sums + part[:, None] * WIDTH + columns[None, :], mixed, mask=real[:, None])
    tl.store(stats + part * 2, largest, mask=real)
    tl.store(stats + part * 2 + 1, total, mask=real)


@triton.jit
def _join(
    sums,
    stats,
    result,
    head,
    used,
    columns,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The `used` stretches of a head's queries, some at a time."""
    SOME: tl.constexpr = SPLITS if SPLITS < 16 else 16
    rows = tl.arange(0, PADDED)
    row = tl.minimum(rows, GROUP - 1)[None, :]
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    y = tl.zeros([PADDED, WIDTH], tl.float32)
    for start in range(0, used, SOME):
        split = start + tl.arange(0, SOME)[:, None]
        part, seen = (head * SPLITS + split) * GROUP + row, split < used
        largest = tl.load(stats + part * 2, seen, float("-inf"), cache_modifier=".cg")
        sum_ = tl.load(stats + part * 2 + 1, seen, 0.0, cache_modifier=".cg")
        of_part = part[:, :, None] * WIDTH + columns[None, None, :]
        mixed = tl.load(sums + of_part, seen[:, :, None], 0.0, cache_modifier=".cg")
        new = tl.maximum(top, tl.max(largest, 0))
        weight, kept = tl.exp(largest - new[None, :]), tl.exp(top - new)
        total = total * kept + tl.sum(weight * sum_, 0)
        y = y * kept[:, None] + tl.sum(weight[:, :, None] * mixed, 0)
        top = new
    y = y / total[:, None]
    own = result + (head * GROUP + rows[:, None]) * WIDTH + columns[None, :]
    tl.store(own, y.to(result.dtype.element_ty), mask=(rows < GROUP)[:, None])


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
    gate,
    up,
    x,
    result,
    gate_stride,
    up_stride,
    width,
    x_width,
    eps,
    BLOCK: tl.constexpr,
    X_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """x is read before the wait: it is older than the launch before, as in `_attend`."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    factor = _factor(x, row, x_width, eps, X_BLOCK)
    _after_previous(OVERLAPS)
    own = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    own, other = own * factor, other * factor
    y = own * tl.sigmoid(own) * other
    tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _choose(
    logits,
    token,
    position,
    best,
    best_at,
    arrived,
    vocabulary,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of equal ones the first. An index stays within the vocabulary, whatever NaNs there are."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, chunks = chunk * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHUNKS)
    inside = columns < vocabulary
    _after_previous(OVERLAPS)
    own = tl.load(logits + row * vocabulary + columns, mask=inside, other=float("-inf"))
    largest, at = tl.max(own.to(tl.float32), 0, return_indices=True)
    tl.store(best + row * CHUNKS + chunk, largest)
    tl.store(best_at + row * CHUNKS + chunk, tl.minimum(chunk * BLOCK + at, vocabulary - 1))
    used = tl.num_programs(1)
    if _is_last(arrived + row, used):
        of_row = row * CHUNKS + chunks
        all_best = tl.load(
            best + of_row, mask=chunks < used, other=float("-inf"), cache_modifier=".cg"
        )
        _, first = tl.max(all_best, 0, return_indices=True)
        chosen = best_at + row * CHUNKS + tl.minimum(first, used - 1)
        tl.store(token + row, tl.load(chosen, cache_modifier=".cg").to(tl.int64))
        if row == 0:
            tl.store(position, tl.load(position) + 1)


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
    x: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    arrived: Tensor,
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
    _attend[(all_heads, splits)](
        *(query, key, value, x.contiguous(), cos.contiguous(), sin.contiguous()),
        *(keys, values, position, sums, stats, arrived, result),
        *(1 / math.sqrt(width), eps, capacity, x.shape[-1]),
        *(stride for t in (query, key, value) for stride in t.stride()[:2]),
        HEADS=kv_heads,
        GROUP=group,
        PADDED=triton.next_power_of_2(group),
        ROWS=max(triton.next_power_of_2(group), LEAST_ROWS),
        WIDTH=width,
        X_BLOCK=triton.next_power_of_2(x.shape[-1]),
        SPLITS=splits,
        BLOCK=BLOCK,
        **overlapping(query.device),
    )
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


def gate_rows(gate: Tensor, up: Tensor, x: Tensor, eps: float) -> Tensor:
    """As `gate_next`."""
    batch, _, width = gate.shape
    gate, up = (t if t.stride(2) == 1 else t.contiguous() for t in (gate, up))
    result = gate.new_empty(gate.shape)
    _gate_rows[(batch, triton.cdiv(width, GATE_BLOCK))](
        *(gate, up, x.contiguous(), result),
        *(gate.stride(0), up.stride(0), width, x.shape[-1], eps),
        BLOCK=GATE_BLOCK,
        X_BLOCK=triton.next_power_of_2(x.shape[-1]),
        **overlapping(gate.device),
    )
    return result


def choose_rows(logits: Tensor, token: Tensor, position: Tensor, arrived: Tensor) -> None:
    """As `choose_next`."""
    batch, _, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHOICE_BLOCK)
    padded = triton.next_power_of_2(chunks)
    best = torch.empty((batch, padded), dtype=torch.float32, device=logits.device)
    best_at = torch.empty((batch, padded), dtype=torch.int32, device=logits.device)
    _choose[(batch, chunks)](
        *(logits.contiguous(), token, position, best, best_at, arrived, vocabulary),
        CHUNKS=padded,
        BLOCK=CHOICE_BLOCK,
        **overlapping(logits.device),
    )
