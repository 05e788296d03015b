"""``quantize_rowcol`` in Triton, for GPUs that ``quantize_rowcol_sm90`` does not support and for Triton's interpreter.

Two launches over tiles: the first finds the largest magnitudes of rows and columns, by atomic maxima on their bits; the
second writes the codes.
"""

from __future__ import annotations

import torch

from lowbit_kernels.elementwise.random_bits import hash_of, key_of, multiplier_of
from lowbit_kernels.runtime.triton_runtime import jit, tl, triton


def takes(format: str, device: torch.device) -> bool:
    """True if Triton can write this format on this device."""
    return (
        device.type == "cpu"
        or format == "int8"
        or torch.cuda.get_device_capability(device) >= (8, 9)
    )


@jit
def _load(x, row, column, m, k, row_stride, column_stride):
    at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(x + at, mask=(row < m)[:, None] & (column < k)[None, :], other=0).to(tl.float32)


@jit
def _size(values, LARGEST: tl.constexpr):
    """The bits of magnitudes, for int8 of the scales that the numbers need. In the order of bits, NaN is last."""
    size = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if LARGEST == 127.0:
        codes = tl.where(values < 0, 128.0, 127.0)
        needed = tl.div_rn(tl.abs(values), codes).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        size = tl.maximum(needed, tl.where(size == 0, 0, 1))  # more than 0 unless the number is
    return size


@jit
def _absmax(
    x,
    row_max,  # int32 [m], the bits of a float32; [1] if TENSORWISE
    column_max,  # int32 [k]
    factor,  # float32 [k], if FACTOR
    m,
    k,
    row_stride,
    column_stride,
    across,  # tiles of a row
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TENSORWISE: tl.constexpr,
    FACTOR: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % across * BLOCK_K + tl.arange(0, BLOCK_K)
    values = _load(x, row, column, m, k, row_stride, column_stride)
    magnitude = _size(values, LARGEST)
    if TENSORWISE:
        tl.atomic_max(row_max, tl.max(tl.max(magnitude, 1), 0))
    else:
        if ROWS or ROW_SCALES:
            own = magnitude
            if FACTOR:
                multiplied = values * tl.load(factor + column, mask=column < k, other=0)[None, :]
                own = _size(multiplied, LARGEST)
            tl.atomic_max(row_max + row, tl.max(own, 1), mask=row < m)
        if COLUMNS and not ROW_SCALES:
            tl.atomic_max(column_max + column, tl.max(magnitude, 0), mask=column < k)


@jit
def _scale(largest, LARGEST: tl.constexpr):
    found = largest.to(tl.float32, bitcast=True)
    if LARGEST != 127.0:
        found = tl.div_rn(found, tl.full(found.shape, LARGEST, tl.float32))
    scale = tl.maximum(found, 1.1754943508222875e-38)
    scale = tl.where(largest == 0, 1.0, scale)
    return tl.where(largest >= 0x7F800000, float("nan"), scale)


@jit
def _draws(seed, row, column, k):
    octet = row.to(tl.int64)[:, None] * ((k + 7) // 8) + (column >> 3).to(tl.int64)[None, :]
    h = hash_of(octet, key_of(0x243F6A88, seed), key_of(0x85A308D3, seed))
    return h * multiplier_of(column)[None, :]


@jit
def _rounded(q, draws, STOCHASTIC: tl.constexpr, LARGEST: tl.constexpr):
    """Round a quotient to a number of the format by float32 arithmetic, so that the conversion to codes is exact."""
    if LARGEST == 127.0:
        if STOCHASTIC:
            steps = (q * 32768.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
            result = ((steps + (draws >> 17).to(tl.int32)) >> 15).to(tl.float32)
        else:
            result = (q + 12582912.0) - 12582912.0  # 1.5 * 2**23, whose unit in the last place is 1
    else:
        result = rounded_to_float8(q, draws, STOCHASTIC, LARGEST)
    return result


@jit
def rounded_to_float8(q, draws, STOCHASTIC: tl.constexpr, LARGEST: tl.constexpr):
    # bits of a float32 that the format lacks
    DROPPED: tl.constexpr = 20 if LARGEST == 448.0 else 21
    NORMAL: tl.constexpr = 2.0**-6 if LARGEST == 448.0 else 2.0**-14
    magnitude = tl.abs(q)
    small = magnitude < NORMAL
    if STOCHASTIC:
        shift = tl.where(small, NORMAL, 0.0)
        bits = (magnitude + shift).to(tl.int32, bitcast=True)
        bits += (draws >> (32 - DROPPED)).to(tl.int32)
        rounded = (bits & (-1 << DROPPED)).to(tl.float32, bitcast=True) - shift
    else:
        bits = magnitude.to(tl.int32, bitcast=True)
        bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
        rounded = (bits & (-1 << DROPPED)).to(tl.float32, bitcast=True)
        # its unit in the last place is the distance between subnormal numbers of the format
        UNIT: tl.constexpr = 1.5 * NORMAL * 2.0 ** (DROPPED)
        rounded = tl.where(small, (magnitude + UNIT) - UNIT, rounded)
    sign = q.to(tl.int32, bitcast=True) & -0x80000000
    bits = tl.minimum(rounded, LARGEST).to(tl.int32, bitcast=True)
    return (bits | sign).to(tl.float32, bitcast=True)


@jit
def _codes(values, scale, draws, STOCHASTIC: tl.constexpr, LARGEST: tl.constexpr):
    usable = scale == scale
    divisor = tl.where(usable, scale, 1.0)
    if STOCHASTIC:
        q = tl.div_rn(values, divisor)
    else:
        q = values * tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        # The clamp between product and sum keeps compilers from fusing them into an FMA.
        LEAST: tl.constexpr = -128.0 if LARGEST == 127.0 else -LARGEST
        q = tl.minimum(tl.maximum(q, LEAST), LARGEST)
    q = tl.where(usable, q, 0.0)
    return _rounded(q, draws, STOCHASTIC, LARGEST)


@jit
def _quantize(
    x,
    row_max,
    column_max,
    codes,  # [m, width]
    scale,
    codes_t,  # [k, width_t]
    scale_t,
    seed,
    factor,
    m,
    k,
    row_stride,
    column_stride,
    width,
    width_t,
    across,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TENSORWISE: tl.constexpr,
    FACTOR: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % across * BLOCK_K + tl.arange(0, BLOCK_K)
    values = _load(x, row, column, m, k, row_stride, column_stride)
    draws = row[:, None]
    if STOCHASTIC:
        draws = _draws(tl.load(seed), row, column, k)
    if ROWS or ROW_SCALES:
        own_max = row_max + (row * 0 if TENSORWISE else row)
        found = _scale(tl.load(own_max, mask=row < m, other=0), LARGEST)
        own = values
        if FACTOR:
            own = values * tl.load(factor + column, mask=column < k, other=0)[None, :]
        out = _codes(own, found[:, None], draws, STOCHASTIC, LARGEST).to(codes.dtype.element_ty)
        shown = row < (1 if TENSORWISE else m)
        if ROWS:
            tl.store(scale + row, found, mask=shown)
            to = codes + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(to, out, mask=(row < m)[:, None] & (column < width)[None, :])
    if COLUMNS:
        if ROW_SCALES:
            out_t = out
            tl.store(scale_t + row, found, mask=shown)
        else:
            if TENSORWISE:
                found_t = _scale(tl.load(row_max + column * 0), LARGEST)
            else:
                found_t = _scale(tl.load(column_max + column, mask=column < k, other=0), LARGEST)
            tl.store(scale_t + column, found_t, mask=column < (1 if TENSORWISE else k))
            out_t = _codes(values, found_t[None, :], draws, STOCHASTIC, LARGEST)
            out_t = out_t.to(codes_t.dtype.element_ty)
        to_t = codes_t + column.to(tl.int64)[:, None] * width_t + row[None, :]
        tl.store(to_t, tl.trans(out_t), mask=(column < k)[:, None] & (row < width_t)[None, :])


def quantize(x, format, rows, columns, tensorwise, seed, row_factor, row_scales, out) -> None:
    """Write the results of ``lowbit::quantize_rowcol`` to `out`; the arguments have been checked, M and K are > 0."""
    codes, scale, codes_t, scale_t = out
    m, k = x.shape
    block = 32 if x.device.type == "cpu" else 64
    across = triton.cdiv(k, block)
    grid = (triton.cdiv(m, block) * across,)
    row_max = torch.zeros(1 if tensorwise else m, dtype=torch.int32, device=x.device)
    column_max = torch.zeros(k, dtype=torch.int32, device=x.device)
    flags: dict[str, int] = {"ROWS": rows, "COLUMNS": columns, "TENSORWISE": tensorwise}
    flags |= {"FACTOR": row_factor is not None, "ROW_SCALES": row_scales}
    flags |= {"BLOCK_M": block, "BLOCK_K": block}
    factor = row_max if row_factor is None else row_factor.contiguous()
    largest = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}[format]
    with torch.cuda.device_of(x):
        strides = x.stride(0), x.stride(1)
        tensors = x, row_max, column_max, factor
        _absmax[grid](*tensors, m, k, *strides, across, LARGEST=largest, **flags)
        _quantize[grid](
            x,
            row_max,
            column_max,
            codes,
            scale,
            codes_t,
            scale_t,
            row_max if seed is None else seed,
            factor,
            m,
            k,
            *strides,
            k + -k % 16,
            m + -m % 16,
            across,
            STOCHASTIC=seed is not None,
            LARGEST=largest,
            **flags,
        )
