"""Attention of one new token of each sequence over a static cache, which the op writes the token's key and value to.

    q', k' = rotated(f · query), rotated(f · key), v' = f · value          rounded to query's dtype
    keys[b, :, position], values[b, :, position] = k', v'
    s[b, h, j] = cap(scale · q'[b, h] · keys[b, h // G, j])      for first[b] ≤ j ≤ position
    y[b, h]    = sum_j exp(s[b, h, j]) values[b, h // G, j] / (sum_j exp(s[b, h, j]) + exp(sinks[h]))

    f          1, or 1 / sqrt(mean(x[b]²) + eps), where query, key and value are linear in x before its norm
    rotated    z · cos + (−z₂, z₁) · sin with the halves z₁, z₂ of z; without `cos`, z itself
    cap        softcap · tanh(s / softcap), or s where softcap is 0
    first[b]   the larger one of start[b] (0 without it) and position − window + 1 (where window is not 0)
    sinks      the last term is 0 without them

    query         float [B, H, 1, E], key, value [B, K, 1, E], H a multiple of K, G = H / K
    keys, values  the caches [B, K, S, E], contiguous, in query's dtype
    position      int64 [1], below S
    start         int64 [B], contiguous, not above `position`, or None
    cos, sin      [B, 1, E] or [1, 1, E], both of one shape, in query's dtype, contiguous, or None
    sinks         float [H] or None
    x             [B, 1, D] in query's dtype, contiguous, or None
    y             query's dtype [B, H, 1, E], contiguous

In 16 bits the Triton kernel multiplies exp(s − m) by the values in two parts. So y is within 1.7e-3 of the formula in
float64, of which rounding y takes 1.65e-3 (H200). One part gave up to 2.25e-3, and two cost 0 to 4% of the time. The
formula rounds q' and k' once, as every attention of transformers gets them. Without that rounding y differs by 2.3e-3
for normal numbers, and by more where scores are larger.

The op reads `position` on the device, so one CUDA graph serves every length, and reads only that part of the cache.
A mask over the whole cache would read all of it.

The kernels are Flash-Decoding with online softmax (arXiv 1805.02867). On GPUs of compute capability 9.0 and for short
caches it is `decode_attention_sm90`, one launch of clusters. Elsewhere there are two launches in Triton. The first one
splits the slots over the GPU: a program takes the queries of one key/value head, which share its keys, and one of
`SPLITS` ranges. The program of the last range also uses the new key and value directly, and writes both to the cache.
Each program keeps the running maximum m, the sum l of exp(s − m), and the sum of exp(s − m) · v. The second launch
combines the ranges, weighted by exp(m − largest m).

With overlapping launches (`overlap`), x, `position`, `start`, the angles and the caches must be older than the launch
that made the query: the op reads them while that launch runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.decoding import decode_attention_sm90
from lowbit_kernels.decoding.overlap import launch_dependents, overlap_options, wait_for_previous
from lowbit_kernels.decoding.rms_norm import rms_factor, rms_factor_of
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, stored_dtype, tl, triton

BLOCK = 64
WARPS, LONG_WARPS = 8, 4
"""Warps of a program whose range is one block, and of one whose range may have more."""
PROGRAMS = 264
"""Two programs for each multiprocessor of an H200."""
LEAST_ROWS = 16
"""The fewest rows of a product in tensor cores; queries are repeated to fill them."""


@op(
    "empty(query.dtype, *query.shape)",
    writes=("keys", "values"),
    flops="4 * B * H * S * E",
    query="float [B, H, 1, E]",
    key="float [B, K, 1, E]",
    value="float [B, K, 1, E]",
    keys="float [B, K, S, E]",
    values="float [B, K, S, E]",
    position="int64 [1]",
    start="int64 [B]",
    cos="float [B, 1, E] or [1, 1, E]",
    sin="float [B, 1, E] or [1, 1, E]",
    sinks="float [H]",
    x="float [B, 1, D]",
    rules={
        "H % K == 0": "heads must be a multiple of the key/value heads, got {H} and {K}",
        "keys.is_contiguous() and values.is_contiguous()": "keys and values must be contiguous",
        "(cos is None) == (sin is None)": "cos and sin go together, got one of them",
        "cos is None or cos.shape == sin.shape": (
            "cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}; expand the smaller one "
            "and make it contiguous"
        ),
        "cos is None or E % 2 == 0": "rotated heads must have an even width, got {E}",
    },
    types={
        "{key.dtype, value.dtype, keys.dtype, values.dtype} == {query.dtype}": (
            "key, value, keys and values must be of query's dtype, {query.dtype}; got "
            "{[t.dtype for t in (key, value, keys, values)]}"
        )
    },
)
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    start: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    sinks: Tensor | None = None,
    x: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    eps: float = 0.0,
) -> Tensor:
    """Attention of one new token over a cache; see the module's docstring."""
    if x is not None:
        factor = rms_factor(x, eps)[:, None]
        query, key, value = (t * factor for t in (query, key, value))
    if cos is not None and sin is not None:
        query, key = (_rotated_by(t, cos[:, None], sin[:, None]) for t in (query, key))
    query, key, value = (t.to(keys.dtype) for t in (query, key, value))
    keys.index_copy_(2, position, key)
    values.index_copy_(2, position, value)
    if keys.device.type == "cpu":  # the host may read: only the part in use
        used = int(position) + 1
        keys, values = keys[:, :, :used], values[:, :, :used]
    slots = torch.arange(keys.shape[2], device=keys.device)
    seen = (slots <= position)[None]
    if window:
        seen = seen & (slots > position - window)
    if start is not None:
        seen = seen & (slots >= start[:, None])
    y = attention(query, keys, values, seen[:, None, None], scale, softcap, sinks)
    return y.contiguous()


reference = decode_attention.reference


def _rotated_by(z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = z.float().chunk(2, dim=-1)
    return (z.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(z.dtype)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The formula above for several queries of each sequence, in PyTorch: [B, H, T, E] in query's dtype.

    Args:
        query: [B, H, T, E].
        keys: [B, K, S, E].
        values: [B, K, S, E].
        seen: bool, broadcast to [B, H, T, S], True where a query sees a key; None: the causal mask of T = S queries.
        scale: of the products.
        softcap: 0 for none.
        sinks: [H], or None.
    """
    if query.numel() == 0:  # on a GPU PyTorch's attention of no sequences may return None
        return torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    if not softcap and sinks is None:
        if (
            group > 1 and seen is not None and query.is_cuda
        ):  # kernels that take a mask take no groups
            keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        return F.scaled_dot_product_attention(
            *(query, keys, values),
            attn_mask=seen,
            is_causal=seen is None,
            scale=scale,
            enable_gqa=keys.shape[1] != query.shape[1],
        )
    if seen is None:
        seen = torch.ones(
            query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device
        ).tril()
    y = softmax_attention(query, keys, values, seen, scale, softcap, sinks)
    return y.to(query.dtype)


def softmax_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """`attention` with softcap and sinks, in float32: 0 where a query sees nothing. Slots that no query sees may hold
    anything. `seen` is [B or 1, 1, T, S] or [T, S]."""
    batch, heads, count, width = query.shape
    kv_heads, slots = keys.shape[1:3]
    by_head = (batch, kv_heads, heads // kv_heads * count)
    scores = query.float().reshape(*by_head, width) @ keys.float().mT * scale
    scores = scores.view(batch, heads, count, slots)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        last = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, last], dim=-1)
    weights = torch.where(seen, scores.softmax(-1)[..., :slots], 0.0)
    values = torch.where(seen.any(-2)[..., None], values.float(), 0.0)
    return (weights.view(*by_head, slots) @ values).view(query.shape)


# ---- Triton --------------------------------------------------------------------------------------------------------


@jit
def _angle(cos, sin, columns, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """cos and sin for `_rotated`; sin is negated for the first half."""
    if EVEN:
        c, s = tl.load(cos + columns), tl.load(sin + columns)
    else:
        inside = columns < WIDTH
        c, s = tl.load(cos + columns, inside, 0.0), tl.load(sin + columns, inside, 0.0)
    s = s.to(tl.float32)
    return c.to(tl.float32), tl.where(columns < WIDTH // 2, -s, s)


@jit
def _new_rows(
    pointer,
    columns,
    factor,
    c,
    s,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    FACTOR: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Rows [.., columns] of the new token, times `factor` and rotated."""
    own = tl.load(pointer + columns) if EVEN else tl.load(pointer + columns, columns < WIDTH, 0.0)
    y = own.to(tl.float32)
    if ROTATED:
        partner = (columns + WIDTH // 2) % WIDTH
        other = (
            tl.load(pointer + partner) if EVEN else tl.load(pointer + partner, columns < WIDTH, 0.0)
        )
        y = y * c + other.to(tl.float32) * s
    if FACTOR:
        y *= factor
    return y.to(own.dtype)


@jit
def _range_of_split(
    position,
    start,
    batch,
    window,
    split,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    START: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The first and the last slot; the starts of a range, its last block and the next range; the number of ranges in
    use."""
    last = tl.load(position).to(tl.int32)
    first = last * 0
    if START:
        first = tl.load(start + batch).to(tl.int32)
    if WINDOW:
        first = tl.maximum(first, last - window + 1)
    base = first // BLOCK * BLOCK
    length = tl.cdiv(tl.cdiv(last + 1 - base, SPLITS), BLOCK) * BLOCK
    begin = base + split * length
    end = tl.minimum(begin + length, last + 1)
    end_block = begin + (end - 1 - begin) // BLOCK * BLOCK
    return first, last, begin, end_block, end, (last - base) // length + 1


@jit
def _block(pointer, at, columns, mask, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a cache; those beyond `mask`, if it is not None, as zeros."""
    where = pointer + at[:, None] * WIDTH + columns[None, :]
    if EVEN:
        rows = tl.load(where) if mask is None else tl.load(where, mask[:, None], 0.0)
    else:
        inside = columns[None, :] < WIDTH
        rows = (
            tl.load(where, inside, 0.0)
            if mask is None
            else tl.load(where, mask[:, None] & inside, 0.0)
        )
    return rows


@jit
def _with_new(block, is_new, new):
    return tl.where(is_new[:, None], new[None, :], block)


@jit
def _empty_state(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The state of an online softmax before any key: largest score, sum of exp, weighted sum of values."""
    zeros = tl.zeros([ROWS], tl.float32)
    return zeros - float("inf"), zeros, tl.zeros([ROWS, COLUMNS], tl.float32)


@jit
def _update(q, k, v, scale, softcap, is_seen, largest, total, mixed, SOFTCAP: tl.constexpr):
    """The state of an online softmax after more keys and values: those where `is_seen`, or all for None."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    if is_seen is not None:
        score = tl.where(is_seen[None, :], score, float("-inf"))
    new = tl.maximum(largest, tl.max(score, 1))
    share = tl.exp(score - new[:, None])
    kept = tl.exp(largest - new)
    mixed *= kept[:, None]
    high = share.to(v.dtype)
    mixed = tl.dot(high, v, mixed, input_precision="ieee")
    if v.dtype != tl.float32:  # in two parts, which add up to more than 16 bits
        mixed = tl.dot((share - high.to(tl.float32)).to(v.dtype), v, mixed)
    return new, total * kept + tl.sum(share, 1), mixed


@jit
def _earlier_blocks(
    q, keys, values, columns, first, begin, end_block, scale, softcap, largest, total, mixed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`_update` by the blocks of a range before its last one."""
    for block in range(begin, end_block, BLOCK):
        at = block + tl.arange(0, BLOCK)
        k = _block(keys, at, columns, None, WIDTH, columns.shape[0] == WIDTH)
        v = _block(values, at, columns, None, WIDTH, columns.shape[0] == WIDTH)
        is_seen = at >= first if MASKED else None
        largest, total, mixed = _update(
            q, k, v, scale, softcap, is_seen, largest, total, mixed, SOFTCAP
        )
    return largest, total, mixed


@jit
def _attention_of_splits(
    query, key, value,
    x, cos, sin,  # unused unless FACTOR or ROTATED
    keys, values, position,
    start,  # unused unless START
    sums, stats, scale, softcap, eps, window, capacity, x_width,
    query_batch, query_head, key_batch, key_head, angle_batch,  # strides; the key's are also the value's
    HEADS: tl.constexpr,  # key/value heads of a sequence
    GROUP: tl.constexpr, PADDED: tl.constexpr,  # queries of such a head; the next power of two
    SAME: tl.constexpr,  # rows of the product for each query
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,  # of a head; the next power of two
    X_BLOCK: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    LONG: tl.constexpr,  # True if a range can have more than one block
    START: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROTATED: tl.constexpr,
    FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A range is its last block, which is loaded early, and then the blocks before it.

    The kernel reads position, start, angles, cache and x before the wait.
    """
    launch_dependents(PDL)
    EVEN: tl.constexpr = WIDTH == COLUMNS
    head, split, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, COLUMNS)
    batch, own_head = head // HEADS, head % HEADS
    first, last, begin, end_block, end, _ = _range_of_split(
        position, start, batch, window, split, SPLITS, BLOCK, START, WINDOW
    )
    if begin > last:
        return
    keys, values = keys + head * capacity * WIDTH, values + head * capacity * WIDTH
    at = end_block + tl.arange(0, BLOCK)
    k = _block(keys, at, columns, at < last, WIDTH, EVEN)
    v = _block(values, at, columns, at < last, WIDTH, EVEN)
    factor, c, s = scale, columns.to(tl.float32), columns.to(tl.float32)  # unused
    if FACTOR:
        factor = rms_factor_of(x, batch, x_width, eps, X_BLOCK)
    if ROTATED:
        c, s = _angle(cos + batch * angle_batch, sin + batch * angle_batch, columns, WIDTH, EVEN)
    row = own_head * GROUP + tl.minimum(tl.arange(0, PADDED), GROUP - 1)
    query += batch * query_batch + row[:, None] * query_head
    key += batch * key_batch + own_head * key_head
    value += batch * key_batch + own_head * key_head
    wait_for_previous(PDL)
    q = _new_rows(
        query, columns[None, :], factor, c[None, :], s[None, :], WIDTH, EVEN, FACTOR, ROTATED
    )
    q = tl.broadcast_to(q[:, None, :], [PADDED, SAME, COLUMNS]).reshape(PADDED * SAME, COLUMNS)
    new_k = _new_rows(key, columns, factor, c, s, WIDTH, EVEN, FACTOR, ROTATED)
    new_v = _new_rows(value, columns, factor, c, s, WIDTH, EVEN, FACTOR, False)
    if end > last:
        tl.store(keys + last * WIDTH + columns, new_k, columns < WIDTH)
        tl.store(values + last * WIDTH + columns, new_v, columns < WIDTH)
    k, v = _with_new(k, at == last, new_k), _with_new(v, at == last, new_v)
    largest, total, mixed = _empty_state(PADDED * SAME, COLUMNS)
    is_seen = (at <= last) & (at >= first)
    state = _update(q, k, v, scale, softcap, is_seen, largest, total, mixed, SOFTCAP)
    largest, total, mixed = state
    if LONG:
        largest, total, mixed = _earlier_blocks(
            q, keys, values, columns, first, begin, end_block, scale, softcap, largest, total, mixed,
            WIDTH, BLOCK, START or WINDOW, SOFTCAP,
        )  # fmt: skip
    part = (head * SPLITS + split) * GROUP
    _store_split(sums, stats, part, columns, largest, total, mixed, GROUP, PADDED, SAME, COLUMNS)


@jit
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
    COLUMNS: tl.constexpr,
):
    """Store one of the SAME equal rows of each query."""
    rows = tl.arange(0, PADDED * SAME)
    real = (rows % SAME == 0) & (rows // SAME < GROUP)
    part += rows // SAME
    tl.store(sums + part[:, None] * COLUMNS + columns[None, :], mixed, mask=real[:, None])
    tl.store(stats + part * 2, largest, mask=real)
    tl.store(stats + part * 2 + 1, total, mask=real)


@jit
def _combine_splits(
    sums,
    stats,
    sinks,  # unused unless SINKS
    result,
    position,
    start,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    START: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    query, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    head, row, columns = query // GROUP, query % GROUP, tl.arange(0, COLUMNS)
    _, _, _, _, _, used = _range_of_split(
        position, start, head // HEADS, window, 0, SPLITS, BLOCK, START, WINDOW
    )
    seen, part = split < used, (head * SPLITS + split) * GROUP + row
    if SINKS:
        sink = tl.load(sinks + query % (HEADS * GROUP)).to(tl.float32)
    wait_for_previous(PDL)
    largest = tl.load(stats + part * 2, mask=seen, other=float("-inf"))
    total = tl.load(stats + part * 2 + 1, mask=seen, other=0.0)
    of_part = part[:, None] * COLUMNS + columns[None, :]
    mixed = tl.load(sums + of_part, mask=seen[:, None], other=0.0)
    top = tl.max(largest, 0)
    if SINKS:
        top = tl.maximum(top, sink)
    weight = tl.exp(largest - top)
    below = tl.sum(weight * total, 0)
    if SINKS:
        below += tl.exp(sink - top)
    y = tl.sum(weight[:, None] * mixed, 0) / below
    tl.store(result + query * WIDTH + columns, y.to(result.dtype.element_ty), columns < WIDTH)


def splits_for(heads: int, capacity: int) -> int:
    """The number of ranges, a power of two: enough to fill the GPU, with at least one block each in a full cache."""
    most = min(max(PROGRAMS // heads, 1), max(capacity // BLOCK, 1))
    return 1 << (most.bit_length() - 1)


@decode_attention.kernel
def _launch(
    query, key, value, keys, values, position, start, cos, sin, sinks, x,
    scale: float, window: int, softcap: float, eps: float,
) -> Tensor | None:  # fmt: skip
    """`decode_attention_sm90` or the Triton kernels where they run, else the reference."""
    own = (query, key, value, keys, values, position, start, cos, sin, sinks, x)
    is_hopper = decode_attention_sm90.takes(own)
    if query.numel() == 0 or not (is_hopper or runs_on(query.device)):
        return None
    # The kernels read these early, before a copy would be complete.
    for name, one in (("start", start), ("x", x), ("cos", cos), ("sin", sin)):
        if one is not None and not one.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got strides {one.stride()}; pass a contiguous tensor"
            )
    if is_hopper:
        ran("decode_attention", "sm90")
        return decode_attention_sm90.attend(own, scale, window, softcap, eps)
    ran("decode_attention", "triton")
    batch, heads, _, width = query.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    group, all_heads = heads // kv_heads, batch * kv_heads
    splits, columns = splits_for(all_heads, capacity), max(triton.next_power_of_2(width), 16)
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    if key.stride() != value.stride():
        key, value = key.contiguous(), value.contiguous()
    parts = (all_heads, splits, group)
    sums = torch.empty((*parts, columns), dtype=torch.float32, device=query.device)
    stats = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)
    stored = stored_dtype(query.dtype, query.device)
    result = torch.empty(query.shape, dtype=stored, device=query.device)
    is_long = splits * BLOCK < capacity
    sizes = {"HEADS": kv_heads, "GROUP": group, "WIDTH": width, "COLUMNS": columns}
    sizes |= {"SPLITS": splits, "BLOCK": BLOCK, "START": start is not None, "WINDOW": window > 0}
    sizes |= overlap_options(query.device)
    x_width = 1 if x is None else x.shape[-1]
    unused = position
    with torch.cuda.device_of(query):
        _attention_of_splits[(all_heads, splits)](
            *(query, key, value, *(unused if t is None else t for t in (x, cos, sin))),
            *(keys, values, position, unused if start is None else start, sums, stats),
            *(scale, softcap, eps, window, capacity, x_width),
            *(stride for t in (query, key) for stride in t.stride()[:2]),
            0 if cos is None or cos.shape[0] == 1 else width,
            **sizes,
            PADDED=triton.next_power_of_2(group),
            SAME=max(LEAST_ROWS // triton.next_power_of_2(group), 1),
            X_BLOCK=triton.next_power_of_2(x_width),
            LONG=is_long,
            SOFTCAP=softcap > 0,
            ROTATED=cos is not None,
            FACTOR=x is not None,
            num_warps=LONG_WARPS if is_long else WARPS,
        )
        _combine_splits[(batch * heads,)](
            *(sums, stats, unused if sinks is None else sinks.contiguous(), result),
            *(position, unused if start is None else start, window),
            **sizes,
            SINKS=sinks is not None,
        )
    return result.to(query.dtype)
