"""Triton kernels for one new token of each sequence: attention over the cache, RMS norm, silu(gate) · up, argmax.

Attention is Flash-Decoding with online softmax (arXiv 1805.02867). The first kernel splits the positions over the GPU:
a program takes the queries of one key/value head, which share its keys, and one of `SPLITS` ranges of the positions so
far. It rotates the queries. The program of the last range also rotates the new key, uses it and the new value directly,
and writes both to the cache. Each program keeps the running maximum m, the sum l of exp(s − m), and the sum of
exp(s − m) · v. The second kernel combines the ranges, weighted by exp(m − largest m).

PDL is programmatic dependent launch. A kernel lets the next one start as soon as it starts itself, and waits for the
results of the previous kernel before it reads them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
WARPS, LONG_WARPS = 8, 4
"""Warps of a program whose range is one block, and of one whose range may have more."""
PROGRAMS = 264
"""Two programs for each multiprocessor of an H200."""
LEAST_ROWS = 16
"""The fewest rows of a product in tensor cores; queries are repeated to fill them."""
GATE_BLOCK = 256
"""Elements of silu(gate) · up in a program."""
CHOICE_BLOCK = 1024
"""Logits that a program searches."""


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next launch start. It may then run while this launch and the previous one are still running, so it must
    not read what either of them writes before its own wait. The linears and the kernels here hold to that."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous launch has finished and its results are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def rms_factor(x, row, width, eps, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of a row: the factor of RMS norm."""
    columns = tl.arange(0, BLOCK)
    own = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(own * own, 0) / width + eps)


@triton.jit
def _rms_norm(x, weight, result, eps, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    own = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    y = own * tl.rsqrt(tl.sum(own * own, 0) / width + eps) * factor
    tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(
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
    PDL: tl.constexpr,
):
    """Reads x before the wait: x is older than the previous launch, as in `_attention_of_splits`."""
    launch_dependents(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    factor = rms_factor(x, row, x_width, eps, X_BLOCK)
    wait_for_previous(PDL)
    own = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    own, other = own * factor, other * factor
    y = own * tl.sigmoid(own) * other
    tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _argmax_of_chunks(logits, best, best_at, vocabulary, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Takes the first of equal logits. The index stays within the vocabulary, also with NaNs."""
    launch_dependents(PDL)
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    own = tl.load(
        logits + row * vocabulary + columns, mask=columns < vocabulary, other=float("-inf")
    )
    largest, at = tl.max(own.to(tl.float32), 0, return_indices=True)
    tl.store(best + row * chunks + chunk, largest)
    tl.store(best_at + row * chunks + chunk, tl.minimum(chunk * BLOCK + at, vocabulary - 1))


@triton.jit
def _argmax_of_rows(
    best, best_at, token, position, chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr
):
    launch_dependents(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    wait_for_previous(PDL)
    own = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    _, first = tl.max(own, 0, return_indices=True)
    chosen = tl.load(best_at + row * chunks + tl.minimum(first, chunks - 1))
    tl.store(token + row, chosen.to(tl.int64))
    if row == 0:
        tl.store(position, tl.load(position) + 1)


@triton.jit
def _angle(cos, sin, position, columns, HALF: tl.constexpr, dtype: tl.constexpr):
    """cos and sin of a position for `_rotated`, rounded to `dtype`; sin is negated for the first of a pair."""
    at = position * HALF + columns % HALF
    c = tl.load(cos + at).to(dtype).to(tl.float32)
    s = tl.load(sin + at).to(dtype).to(tl.float32)
    return c, tl.where(columns < HALF, -s, s)


@triton.jit
def _rotated(own, partner, c, s, factor):
    """`factor` times the elements, rotated with their partners, which are HALF apart."""
    turned = own.to(tl.float32) * c + partner.to(tl.float32) * s
    return (turned * factor).to(own.dtype)


@triton.jit
def _new_token(query, key, value, columns, c, s, factor, SAME: tl.constexpr, HALF: tl.constexpr):
    """The rotated queries at `query` [PADDED, 1], each SAME times; the rotated key; the value. All loads come first."""
    partner = (columns + HALF) % (2 * HALF)
    q, q_partner = tl.load(query + columns[None, :]), tl.load(query + partner[None, :])
    k, k_partner, v = tl.load(key + columns), tl.load(key + partner), tl.load(value + columns)
    q = _rotated(q, q_partner, c[None, :], s[None, :], factor)
    q = tl.broadcast_to(q[:, None, :], [q.shape[0], SAME, 2 * HALF])
    k, v = _rotated(k, k_partner, c, s, factor), (v.to(tl.float32) * factor).to(v.dtype)
    return q.reshape(q.shape[0] * SAME, 2 * HALF), k, v


@triton.jit
def _range_of_split(position, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The last position; the starts of a range, its last block and the next range; the number of ranges in use."""
    last = tl.load(position).to(tl.int32)
    length = tl.cdiv(tl.cdiv(last + 1, SPLITS), BLOCK) * BLOCK
    begin, end = split * length, tl.minimum((split + 1) * length, last + 1)
    return last, begin, begin + (end - 1 - begin) // BLOCK * BLOCK, end, last // length + 1


@triton.jit
def _block(keys, values, at, columns, mask, other, WIDTH: tl.constexpr):
    of_cache = at[:, None] * WIDTH + columns[None, :]
    return tl.load(keys + of_cache, mask, other), tl.load(values + of_cache, mask, other)


@triton.jit
def _with_new(block, is_new, new):
    return tl.where(is_new[:, None], new[None, :], block)


@triton.jit
def _empty_state(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The state of an online softmax before any key: largest score, sum of exp, weighted sum of values."""
    zeros = tl.zeros([ROWS], tl.float32)
    return zeros - float("inf"), zeros, tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def _update(q, k, v, scale, is_seen, largest, total, mixed):
    """The state of an online softmax after more keys and values: those where `is_seen`, or all for None."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if is_seen is not None:
        score = tl.where(is_seen[None, :], score, float("-inf"))
    new = tl.maximum(largest, tl.max(score, 1))
    share = tl.exp(score - new[:, None])
    kept = tl.exp(largest - new)
    mixed = mixed * kept[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
    return new, total * kept + tl.sum(share, 1), mixed


@triton.jit
def _attention_of_splits(
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
    key_batch,  # also of value
    key_head,
    HEADS: tl.constexpr,  # key/value heads of a sequence
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    SAME: tl.constexpr,  # rows of the product for each query
    WIDTH: tl.constexpr,
    X_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LONG: tl.constexpr,  # True if a range can have more than one block
    PDL: tl.constexpr,
):
    """A range is its last block, which is loaded early, and then the blocks before it.

    The kernel reads position, angles, cache and x before the wait. They are older than the previous launch, a linear,
    which lets this kernel start only after its own wait.
    """
    launch_dependents(PDL)
    head, split, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    batch, own_head = head // HEADS, head % HEADS
    last, begin, end_block, end, _ = _range_of_split(position, split, SPLITS, BLOCK)
    if begin > last:
        return
    keys, values = keys + head * capacity * WIDTH, values + head * capacity * WIDTH
    at = end_block + tl.arange(0, BLOCK)
    k, v = _block(keys, values, at, columns, (at < last)[:, None], 0.0, WIDTH)
    factor = rms_factor(x, batch, x_width, eps, X_BLOCK)
    c, s = _angle(cos, sin, last, columns, WIDTH // 2, query.dtype.element_ty)
    row = own_head * GROUP + tl.minimum(tl.arange(0, PADDED), GROUP - 1)
    query += batch * query_batch + row[:, None] * query_head
    key += batch * key_batch + own_head * key_head
    value += batch * key_batch + own_head * key_head
    wait_for_previous(PDL)
    q, new_k, new_v = _new_token(query, key, value, columns, c, s, factor, SAME, WIDTH // 2)
    if end > last:
        tl.store(keys + last * WIDTH + columns, new_k)
        tl.store(values + last * WIDTH + columns, new_v)
    k, v = _with_new(k, at == last, new_k), _with_new(v, at == last, new_v)
    largest, total, mixed = _empty_state(PADDED * SAME, WIDTH)
    largest, total, mixed = _update(q, k, v, scale, at <= last, largest, total, mixed)
    if LONG:
        for start in range(begin, end_block, BLOCK):
            k, v = _block(keys, values, start + tl.arange(0, BLOCK), columns, None, None, WIDTH)
            largest, total, mixed = _update(q, k, v, scale, None, largest, total, mixed)
    part = (head * SPLITS + split) * GROUP
    _store_split(sums, stats, part, columns, largest, total, mixed, GROUP, PADDED, SAME, WIDTH)


@triton.jit
def _store_split(
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
    """Store one of the SAME equal rows of each query."""
    rows = tl.arange(0, PADDED * SAME)
    real = (rows % SAME == 0) & (rows // SAME < GROUP)
    part += rows // SAME
    tl.store(sums + part[:, None] * WIDTH + columns[None, :], mixed, mask=real[:, None])
    tl.store(stats + part * 2, largest, mask=real)
    tl.store(stats + part * 2 + 1, total, mask=real)


@triton.jit
def _combine_splits(
    sums,
    stats,
    result,
    position,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    query, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    head, row, columns = query // GROUP, query % GROUP, tl.arange(0, WIDTH)
    _, _, _, _, used = _range_of_split(position, 0, SPLITS, BLOCK)
    seen, part = split < used, (head * SPLITS + split) * GROUP + row
    wait_for_previous(PDL)
    largest = tl.load(stats + part * 2, mask=seen, other=float("-inf"))
    total = tl.load(stats + part * 2 + 1, mask=seen, other=0.0)
    of_part = part[:, None] * WIDTH + columns[None, :]
    mixed = tl.load(sums + of_part, mask=seen[:, None], other=0.0)
    weight = tl.exp(largest - tl.max(largest, 0))
    y = tl.sum(weight[:, None] * mixed, 0) / tl.sum(weight * total, 0)
    tl.store(result + query * WIDTH + columns, y.to(result.dtype.element_ty))


# ---- launchers ----------------------------------------------------------------------------------------------


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options: with PDL, a launch may start before the previous one has finished, and its kernel waits."""
    overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm` on a GPU."""
    x, width = x.contiguous(), x.shape[-1]
    result = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 256, 1), 16)
    _rms_norm[(x.numel() // width,)](
        *(x, weight, result, eps, width),
        BLOCK=block,
        num_warps=warps,
        **pdl_options(x.device),
    )
    return result


def silu_mul(gate: Tensor, up: Tensor, x: Tensor, eps: float) -> Tensor:
    """`ops.silu_mul` on a GPU."""
    batch, _, width = gate.shape
    if not x.is_contiguous():  # a copy would be too new to read early
        raise ValueError(f"x must be contiguous, got strides {x.stride()}; pass x.contiguous()")
    gate, up = (t if t.stride(2) == 1 else t.contiguous() for t in (gate, up))
    result = gate.new_empty(gate.shape)
    _silu_mul[(batch, triton.cdiv(width, GATE_BLOCK))](
        *(gate, up, x, result),
        *(gate.stride(0), up.stride(0), width, x.shape[-1], eps),
        BLOCK=GATE_BLOCK,
        X_BLOCK=triton.next_power_of_2(x.shape[-1]),
        **pdl_options(gate.device),
    )
    return result


def argmax_token(logits: Tensor, token: Tensor, position: Tensor) -> None:
    """`ops.next_token` on a GPU."""
    batch, _, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHOICE_BLOCK)
    best = torch.empty((batch, chunks), dtype=torch.float32, device=logits.device)
    best_at = torch.empty((batch, chunks), dtype=torch.int32, device=logits.device)
    overlaps = pdl_options(logits.device)
    _argmax_of_chunks[(batch, chunks)](
        *(logits.contiguous(), best, best_at, vocabulary), BLOCK=CHOICE_BLOCK, **overlaps
    )
    _argmax_of_rows[(batch,)](
        *(best, best_at, token, position, chunks),
        CHUNKS=triton.next_power_of_2(chunks),
        **overlaps,
    )


def splits_for(heads: int, capacity: int) -> int:
    """The number of ranges, a power of two: enough to fill the GPU, with at least one block each in a full cache."""
    most = min(max(PROGRAMS // heads, 1), max(capacity // BLOCK, 1))
    return 1 << (most.bit_length() - 1)


def decode_attention(
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
    """`ops.decode_attention` on a GPU. E must be a power of two of at least 16."""
    batch, heads, _, width = query.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    if width < 16 or width & (width - 1):
        raise ValueError(f"heads must be 16, 32, 64, … wide, got {width}")
    # The kernel reads these early, before a copy would be complete.
    for name, one in (("x", x), ("cos", cos), ("sin", sin)):
        if not one.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got strides {one.stride()}; pass a contiguous tensor"
            )
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
    sizes |= pdl_options(query.device)
    _attention_of_splits[(all_heads, splits)](
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
    _combine_splits[(batch * heads,)](sums, stats, result, position, **sizes)
    return result
