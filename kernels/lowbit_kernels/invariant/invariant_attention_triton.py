"""The kernels of `invariant_attention`. All rows of a program belong to one key/value head: r = g · T + t.

    whole      a program has all keys of its rows. It reads keys twice: for the maxima, and for the sums
    split      few rows: programs share the keys of a row. One launch finds the maxima of each part, a second one the
               sums relative to the maxima of all parts, and `_joined` adds the sums up

A query t sees the keys up to t + shift. With many rows, keys and values are rounded once before, padded with zeros to
whole tiles, and values are laid out along the tokens, as the units for int8 read them. With few rows, as in decoding,
each program rounds what it reads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.invariant.arithmetic import EXACT, in_float32, triton_exp2, triton_rounded
from lowbit_kernels.quantize.quantize_rows import extremes, rounded_codes, scale_of_extremes
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.triton_runtime import jit, launch_kept, stored_dtype, tl, triton

MOST_ROWS = 64
"""Rows of a program; more of them are "many"."""
PADDED = 128
"""Codes of keys and values are padded to a multiple of so many tokens, at least those of a tile."""
ENCODED = 8192
"""Elements that a program rounds at a time, of keys and then of values."""
VARYING = ["tokens", "keys", "shift", "span", "m_b", "m_h", "m_t"]
"""Arguments that change from token to token. Triton would compile again for multiples of 16 among them."""


@jit
def _round(values):
    """int8 codes [N, D] of float32 values and their scales [N]."""
    low, high = extremes(values)
    scale = scale_of_extremes(tl.max(low, 1), tl.max(high, 1), True)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return rounded_codes(values, inverse[:, None], True).to(tl.int8), scale


@jit
def _tile(x, scale, n, keys, s_stride, d_stride, width, CODED: tl.constexpr, D: tl.constexpr):
    """The int8 codes [N, D] and the scales [N] of tokens n; scales of 1 beyond the last token. CODED: both are there,
    in padded tensors."""
    d = tl.arange(0, D)
    at = x + n.to(tl.int64)[:, None] * s_stride + d[None, :] * d_stride
    mask = (n < keys)[:, None] & (d < width)[None, :]
    if CODED:
        codes = tl.load(at)
        own = tl.load(scale + n)
    else:
        codes, own = _round(tl.load(at, mask=mask, other=0.0).to(tl.float32))
    return codes, own


@jit
def _number(t):
    """The scales t, with 1 where one is NaN."""
    return tl.where(t < float("inf"), t, 1.0)


@jit
def _scale_of_values(t):
    """The scales that weights are multiplied by: at least 2^-100."""
    return tl.maximum(_number(t), 7.888609052210118e-31)


@jit
def _power(t_k, t_v):
    """The exponent of the power of two above t_v, as float32; infinite where a scale is NaN."""
    found = (_scale_of_values(t_v).to(tl.int32, bitcast=True) >> 23) - 126
    is_number = (t_v < float("inf")) & (t_k < float("inf"))
    return tl.where(is_number, found.to(tl.float32), float("inf"))


@jit
def _scores(
    q, a, k, t_k, n, token, row_ok, mask, mask_strides, shift, keys,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The scores [M, N], and which of them count."""
    score = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32)
    score = score * t_k[None, :] * a[:, None]
    seen = row_ok[:, None] & (n < keys)[None, :] & (n[None, :] <= (token + shift)[:, None])
    if MASKED:
        at = mask + mask_strides[:, None] + n[None, :]
        seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    return score, seen


@jit
def _ends_of(
    q, a, key, key_scale, value, value_scale, power, k_s, k_d, v_s, v_d, width, value_width,
    token, row_ok, mask, mask_strides, shift, keys, m, top, first, stop,
    CODED: tl.constexpr, MASKED: tl.constexpr, ALL: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """m and `top` [M], the largest a + ceil2(t_v), also over tokens from `first` to `stop`. `top` is infinite where a
    row sees a NaN. ALL: all rows see all these tokens."""
    for begin in range(first, stop, N):
        n = tl.multiple_of(begin, N) + tl.arange(0, N)
        k, t_k = _tile(key, key_scale, n, keys, k_s, k_d, width, CODED, D)
        if CODED:
            own = tl.load(power + n)
        else:
            _, t_v = _tile(value, value_scale, n, keys, v_s, v_d, value_width, CODED, E)
            own = _power(t_k, t_v)
            t_k = _number(t_k)
        score, seen = _scores(
            q, a, k, t_k, n, token, row_ok, mask, mask_strides, shift, keys, MASKED
        )
        above = score + own[None, :]
        if not ALL:
            score = tl.where(seen, score, float("-inf"))
            above = tl.where(seen, above, float("-inf"))
        m = tl.maximum(m, tl.max(score, 1))
        top = tl.maximum(top, tl.max(above, 1))
    return m, top


@jit
def _exponent(m, top):
    """m without infinities, and E of the formula."""
    own = tl.where((m < float("inf")) & (m > float("-inf")), m, 0.0)
    wide = tl.where(m > float("-inf"), top - own, 0.0)
    wide = tl.minimum(tl.maximum(wide, -100.0), 100.0)
    e = triton_rounded(wide)
    return own, e + (e.to(tl.float32) < wide).to(tl.int32)


@jit
def _sums_of(
    q, a, m, e, key, key_scale, value, value_scale, k_s, k_d, v_s, v_d, width, value_width,
    token, row_ok, mask, mask_strides, shift, keys, high, low, total, first, stop,
    CODED: tl.constexpr, MASKED: tl.constexpr, ALL: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The sums of p >> 7 and p & 127 times v, int32 [M, E], and d, int64 [M], with those of the tokens from `first` to
    `stop`. ALL: all rows see all these."""
    shrink = ((127 - e) << 23).to(tl.float32, bitcast=True) * 16256.0
    for begin in range(first, stop, N):
        n = tl.multiple_of(begin, N) + tl.arange(0, N)
        k, t_k = _tile(key, key_scale, n, keys, k_s, k_d, width, CODED, D)
        if not CODED:
            t_k = _number(t_k)
        score, seen = _scores(
            q, a, k, t_k, n, token, row_ok, mask, mask_strides, shift, keys, MASKED
        )
        v, t_v = _tile(value, value_scale, n, keys, v_s, v_d, value_width, CODED, E)
        if not CODED:
            t_v = _scale_of_values(t_v)
        u = triton_exp2(tl.maximum(score - m[:, None], -40.0))
        if not ALL:
            u = tl.where(seen, u, 0.0)
        total += tl.sum(triton_rounded(u * 4194304.0), 1).to(tl.int64)
        p = triton_rounded(tl.minimum(u * t_v[None, :] * shrink[:, None], 16256.0))
        high = tl.dot((p >> 7).to(tl.int8), v, high, out_dtype=tl.int32)
        low = tl.dot((p & 127).to(tl.int8), v, low, out_dtype=tl.int32)
    return high, low, total


@jit
def _output(high, low, total, m, top, e, is_number):
    """y [M, E] of the sums."""
    count = total.to(tl.float64).to(tl.float32) * 16256.0
    grow = ((127 + e) << 23).to(tl.float32, bitcast=True) * 4194304.0
    f = tl.div_rn(grow, tl.where(total == 0, 1.0, count))
    y = (high.to(tl.float32) * 128.0 + low.to(tl.float32)) * f[:, None]
    y = tl.where((total == 0)[:, None], 0.0, y)
    is_bad = (top == float("inf")) | ((m > float("-inf")) & ~is_number)
    return tl.where(is_bad[:, None], float("nan"), y)


@jit(do_not_specialize=VARYING)
def _attend(
    query, key, key_scale, value, value_scale, power, mask, result, ends, parts, totals,
    factor, tokens, keys, kv_heads, group, width, value_width, shift, span,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, ks_b, ks_h, m_b, m_h, m_t,
    STAGE: tl.constexpr,  # 0: whole; 1: the maxima of a part; 2: its sums
    CODED: tl.constexpr, MASKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    block, pair = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    part = tl.program_id(2)
    b, h = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    rows = block * M + tl.arange(0, M)
    row_ok = rows < group * tokens
    head, token = h * group + rows // tokens, rows % tokens
    q, t_q = _queries(query + b * q_b, head, token, q_h, q_t, q_d, row_ok, width, D)
    a = _number(t_q) * factor
    key, value = key + b * k_b + h * k_h, value + b * v_b + h * v_h
    key_scale += b * ks_b + h * ks_h
    value_scale += b * ks_b + h * ks_h
    power += b * ks_b + h * ks_h
    mask_strides = b * m_b + head * m_h + token.to(tl.int64) * m_t
    first = part * span
    stop = tl.minimum(first + span, keys)
    stop = tl.minimum(stop, tl.max(tl.where(row_ok, token, 0), 0) + shift + 1)
    full = first  # all rows see the keys before it
    if not MASKED:
        each = tl.min(tl.where(row_ok, token, tokens), 0) + shift + 1
        full += tl.maximum(tl.minimum(each, stop) - first, 0) // N * N
    scratch = (part * tl.num_programs(1) + pair).to(tl.int64) * (tl.num_programs(0) * M) + rows
    if STAGE != 2:
        m, top = tl.full([M], float("-inf"), tl.float32), tl.full([M], float("-inf"), tl.float32)
        for is_rest in tl.static_range(2):
            m, top = _ends_of(
                q, a, key, key_scale, value, value_scale, power, k_s, k_d, v_s, v_d, width,
                value_width, token, row_ok, mask, mask_strides, shift, keys, m, top,
                full if is_rest else first, stop if is_rest else full,
                CODED, MASKED, not is_rest, N, D, E,
            )  # fmt: skip
    if STAGE == 1:
        tl.store(ends + 2 * scratch, m)
        tl.store(ends + 2 * scratch + 1, top)
    else:
        if STAGE == 2:
            m, top = _ends_of_all(ends, pair, rows, M)
        m_own, e = _exponent(m, top)
        high, low = tl.zeros([M, E], tl.int32), tl.zeros([M, E], tl.int32)
        total = tl.zeros([M], tl.int64)
        for is_rest in tl.static_range(2):
            high, low, total = _sums_of(
                q, a, m_own, e, key, key_scale, value, value_scale, k_s, k_d, v_s, v_d, width,
                value_width, token, row_ok, mask, mask_strides, shift, keys, high, low, total,
                full if is_rest else first, stop if is_rest else full,
                CODED, MASKED, not is_rest, N, D, E,
            )  # fmt: skip
        if STAGE == 2:
            _store_parts(parts, totals, scratch, high, low, total, E)
        else:
            y = _output(high, low, total, m, top, e, t_q < float("inf"))
            to = (b * tokens + token.to(tl.int64)) * (kv_heads * group) + head
            _store_rows(result, y, to, row_ok, value_width, E)


@jit
def _queries(query, head, token, q_h, q_t, q_d, row_ok, width, D: tl.constexpr):
    """The int8 codes [M, D] of queries, and their scales [M]."""
    d = tl.arange(0, D)
    at = query + head[:, None] * q_h + token.to(tl.int64)[:, None] * q_t + d[None, :] * q_d
    mask = row_ok[:, None] & (d < width)[None, :]
    return _round(tl.load(at, mask=mask, other=0.0).to(tl.float32))


@jit
def _store_parts(parts, totals, at, high, low, total, E: tl.constexpr):
    c = tl.arange(0, E)
    tl.store(parts + 2 * at[:, None] * E + c[None, :], high)
    tl.store(parts + (2 * at[:, None] + 1) * E + c[None, :], low)
    tl.store(totals + at, total)


@jit
def _store_rows(result, y, to, row_ok, width, E: tl.constexpr):
    c = tl.arange(0, E)
    at = result + to[:, None] * width + c[None, :]
    tl.store(at, y.to(result.dtype.element_ty), mask=row_ok[:, None] & (c < width)[None, :])


@jit
def _ends_of_all(ends, pair, rows, M: tl.constexpr):
    """The largest of the maxima of all parts."""
    m = tl.full([M], float("-inf"), tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    for part in range(0, tl.num_programs(2)):
        at = (part * tl.num_programs(1) + pair).to(tl.int64) * (tl.num_programs(0) * M) + rows
        m = tl.maximum(m, tl.load(ends + 2 * at))
        top = tl.maximum(top, tl.load(ends + 2 * at + 1))
    return m, top


@jit(do_not_specialize=["tokens", "count"])
def _joined(
    query, result, ends, parts, totals, tokens, kv_heads, group, width, value_width, count,
    q_b, q_h, q_t, q_d, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The output of one row from the sums of all `count` parts."""
    row, pair = tl.program_id(0), tl.program_id(1)
    padded = (tl.num_programs(0) + M - 1) // M * M
    b, h = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    head, token = h * group + row // tokens, row % tokens
    c, one = tl.arange(0, E), tl.arange(0, 1)
    high = tl.zeros([1, E], tl.int32)
    low = tl.zeros([1, E], tl.int32)
    total = tl.zeros([1], tl.int64)
    m = tl.full([1], float("-inf"), tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    for part in range(0, count):
        at = (part * tl.num_programs(1) + pair).to(tl.int64) * padded + row
        high += tl.load(parts + 2 * at * E + c)[None, :]
        low += tl.load(parts + (2 * at + 1) * E + c)[None, :]
        total += tl.load(totals + at + one)
        m = tl.maximum(m, tl.load(ends + 2 * at + one))
        top = tl.maximum(top, tl.load(ends + 2 * at + 1 + one))
    d = tl.arange(0, D)
    at = query + b * q_b + head * q_h + token.to(tl.int64) * q_t + d * q_d
    _, t_q = _round(tl.load(at, mask=d < width, other=0.0).to(tl.float32)[None, :])
    _, e = _exponent(m, top)
    y = _output(high, low, total, m, top, e, t_q < float("inf"))
    to = (b * tokens + token.to(tl.int64)) * (kv_heads * group) + head
    at = result + to * value_width + c[None, :]
    tl.store(at, y.to(result.dtype.element_ty), mask=(c < value_width)[None, :])


@jit
def _encode(
    key, value, key_codes, key_scale, value_scale, power, value_codes,
    keys, kv_heads, width, value_width, pitch, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    N: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The codes of N tokens of a key/value head, and their scales without NaN; `power` says where one is."""
    pair = tl.program_id(1)
    b, h = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    n, d, c = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D), tl.arange(0, E)
    row = pair.to(tl.int64) * pitch + n
    k, t_k = _tile(key + b * k_b + h * k_h, key, n, keys, k_s, k_d, width, False, D)
    tl.store(key_codes + row[:, None] * D + d[None, :], k)
    tl.store(key_scale + row, _number(t_k))
    v, t_v = _tile(value + b * v_b + h * v_h, value, n, keys, v_s, v_d, value_width, False, E)
    at = value_codes + (pair.to(tl.int64) * E + c)[:, None] * pitch + n[None, :]
    tl.store(at, tl.trans(v))
    tl.store(value_scale + row, _scale_of_values(t_v))
    tl.store(power + row, _power(t_k, t_v))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """`invariant_attention` of operands that are checked; no size is 0."""
    (batch, heads, tokens, width), (_, kv_heads, keys, value_width) = query.shape, value.shape
    device, group = query.device, heads // kv_heads
    rows = group * tokens
    is_large = rows > MOST_ROWS
    m, n, warps, stages = tile_of(rows, mask is not None)
    shape = {
        **{"M": m, "N": n},
        "D": max(32, triton.next_power_of_2(width)),
        "E": max(32, triton.next_power_of_2(value_width)),
    }
    blocks, pairs = triton.cdiv(rows, m), batch * kv_heads
    count = 1 if is_large else _parts(keys, blocks * pairs, device)
    span = triton.cdiv(triton.cdiv(keys, count), n) * n
    count = triton.cdiv(keys, span)
    dtype = stored_dtype(query.dtype, device)
    result = torch.empty((batch, tokens, heads, value_width), dtype=dtype, device=device)
    own = AttentionOperands(key, key, value, value, value)
    if is_large:
        with torch.cuda.device_of(query):
            own = encoded(key, value, (shape["D"], shape["E"]))
    scratch = (
        [result] * 3 if count == 1 else _scratch(count * pairs * blocks * m, shape["E"], query)
    )
    shown, strides = (
        (result, (0, 0, 0)) if mask is None else _bytes(mask.expand(batch, heads, tokens, keys))
    )
    arguments = (
        *(query, *own[:5], shown, result, *scratch),
        *(in_float32(scale * math.log2(math.e)), tokens, keys, kv_heads, group, width, value_width),
        *(keys - tokens if causal else keys, span, *query.stride()),
        *(*own.key.stride(), *own.value.stride(), *own.strides, *strides),
    )
    constants = {"CODED": is_large, "MASKED": mask is not None, **shape}
    with torch.cuda.device_of(query):
        for stage in (0,) if count == 1 else (1, 2):
            launch_kept(
                _attend,
                (blocks, pairs, count),
                arguments,
                {"STAGE": stage, **constants},
                num_warps=warps,
                num_stages=stages,
                **EXACT,
            )
        if count > 1:
            sizes = tokens, kv_heads, group, width, value_width, count
            launch_kept(
                _joined,
                (rows, pairs),
                (query, result, *scratch, *sizes, *query.stride()),
                {name: shape[name] for name in "MDE"},
                num_warps=1,
                **EXACT,
            )
    return result.to(query.dtype)


def _scratch(rows: int, width: int, like: Tensor) -> list[Tensor]:
    """Maxima, sums and counts of so many rows of parts."""
    shapes = {torch.float32: (rows, 2), torch.int32: (rows, 2, width), torch.int64: (rows,)}
    return [like.new_empty(shape, dtype=dtype) for dtype, shape in shapes.items()]


def _bytes(mask: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The mask as the kernel reads it, and its first three strides."""
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    return mask.view(torch.uint8), mask.stride()[:3]


def tile_of(rows: int, is_masked: bool) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps, and pipeline stages."""
    if rows <= MOST_ROWS:
        return (16 if rows <= 16 else MOST_ROWS), 32, 4, 2
    return (64, 32, 8, 2) if is_masked else (128, 32, 8, 2)


class AttentionOperands(NamedTuple):
    """Keys and values as the kernel reads them: as they are, or as padded codes with their scales, and the powers."""

    key: Tensor
    key_scale: Tensor
    value: Tensor
    value_scale: Tensor
    power: Tensor
    strides: tuple[int, int] = (0, 0)
    """Elements of `key_scale`, `value_scale` and `power` between sequences, and between heads."""


def encoded(key: Tensor, value: Tensor, widths: tuple[int, int]) -> AttentionOperands:
    """The codes of keys [B, K, P, D] and of values [B, K, P, E], which lie along the tokens, and scales [B, K, P].

    Args:
        widths: D and E, powers of two that hold the channels. P is a multiple of `PADDED`.
    """
    batch, heads, tokens, width = key.shape
    pitch = triton.cdiv(tokens, PADDED) * PADDED
    codes = key.new_empty((batch, heads, pitch, widths[0]), dtype=torch.int8)
    turned = key.new_empty((batch, heads, widths[1], pitch), dtype=torch.int8)
    scales = [key.new_empty((batch, heads, pitch), dtype=torch.float32) for _ in range(3)]
    rows = max(16, min(64, ENCODED // max(widths)))
    sizes = tokens, heads, width, value.shape[-1], pitch
    launch_kept(
        _encode,
        (pitch // rows, batch * heads),
        (key, value, codes, *scales, turned, *sizes, *key.stride(), *value.stride()),
        {"N": rows, "D": widths[0], "E": widths[1]},
        num_warps=4,
        **EXACT,
    )
    of_keys, of_values, power = scales
    return AttentionOperands(codes, of_keys, turned.mT, of_values, power, (heads * pitch, pitch))


def _parts(keys: int, programs: int, device: torch.device) -> int:
    """Programs that share the keys of a row."""
    if device.type == "cpu":  # the interpreter
        return min(3, triton.cdiv(keys, 32))
    return max(1, min(triton.cdiv(keys, 128), 2 * nvrtc.multiprocessors(device) // programs, 64))
