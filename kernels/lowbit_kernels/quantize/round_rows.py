"""Rows of float32 rounded to integers of at most 8 bits with a scale a row, to nearest or stochastically.

    scale[r]    = largest magnitude of row r / most, where most is the largest code, 127 for int8. The old scale if the
                  largest magnitude is `most` times it, so that an unchanged row is stored as it was. 1 for a row of
                  zeros, NaN for a row with a NaN or an infinity.
    q           = x[r, k] / scale[r]
    codes[r, k] = the integer n nearest to q, or with probability |q - n| (short by at most 2**-16) the integer on the
                  other side of q. 0 if the scale is NaN.

So the expectation of a code is within 2**-16 of q, and a q within 2**-16 of an integer becomes that integer: the error
of the division moves nothing. The random bits of an element are the upper 16 of
`lowbit_kernels.elementwise.random_bits`, with the 64-bit index first[r] + start + k and the keys `KEYS`.

The Triton kernel makes two passes over a row; PyTorch ops make some forty passes over all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.elementwise.random_bits import hash_of, multiplier_of, random_bits, upper
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, tl, triton

KEYS = (0x45E50725, 0xE4A20C3)
"""k0 and k1: two arbitrary numbers, which must never change."""
TINY = torch.finfo(torch.float32).tiny
NARROW = 1024
"""Elements of narrow rows, such as groups of int4 weights, that a program takes together."""


@op(
    "empty(*((torch.uint8, R, K // 2) if packed else (torch.int8, R, K))), empty(torch.float32, R)",
    rules={
        "0 < most < 128": "most, the largest code, must be 1 to 127, got {most}",
        "not packed or (K % 2 == 0 and most < 8)": "packed codes need an even number of columns and most of at most 7, "
        "got {K} and {most}",
    },
    values="float32 [R, K]; flatten leading dimensions first",
    old="float32 [R]",
    largest="float32 [R]",
    first="int64 [R]",
)
def round_rows(
    values: Tensor,
    old: Tensor | None = None,
    largest: Tensor | None = None,
    first: Tensor | None = None,
    start: int = 0,
    most: int = 127,
    packed: bool = False,
) -> tuple[Tensor, Tensor]:
    """(codes int8 [R, K], scale float32 [R]) by the formulas of the module.

    Args:
        values: float32 [R, K].
        old: float32 [R], the scales so far, or None.
        largest: float32 [R], the largest magnitude of each row if `values` are only some of its columns, else None.
        first: int64 [R], the random offset of each row's first column; None rounds to nearest.
        start: the first of these columns in the row.
        most: the largest code, 1 to 127. Codes are -most .. most.
        packed: the codes plus 8 in nibbles, uint8 [R, K / 2], the low nibble first; `most` is at most 7.

    Raises TypeError for other dtypes, ValueError for shapes that do not fit each other and for another `most`.
    """
    if largest is None:
        padded = values if values.shape[1] else values.new_zeros((values.shape[0], 1))
        largest = padded.abs().amax(1)
    # The divisor is a tensor, since CUDA multiplies by the reciprocal of a Python number.
    scale = (largest / torch.full_like(largest, most)).clamp(min=TINY)
    if old is not None:
        scale = torch.where(largest == old * most, old, scale)
    scale = torch.where(largest == 0, 1.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    exact = values / scale[:, None]
    codes = exact.round()
    if first is not None:
        index = first[:, None] + torch.arange(start, start + values.shape[1], device=values.device)
        rest = exact - codes
        codes = codes + torch.where(
            upper(random_bits(index, *KEYS), 16) + 1 < rest.abs() * 65536, rest.sign(), 0.0
        )
    codes = codes.nan_to_num_(0.0).clamp_(-most, most)
    if not packed:
        return codes.to(torch.int8), scale
    low, high = (codes + 8).to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | high << 4, scale


reference = round_rows.reference


@jit
def _largest(source, at, exists, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest magnitude of each row, and whether all its values are finite."""
    seen = tl.zeros((ROWS, BLOCK), tl.float32)
    bad = tl.zeros((ROWS, BLOCK), tl.int32)
    for begin in tl.range(0, columns, BLOCK):
        inside = exists[:, None] & (begin + at < columns)
        x = tl.abs(tl.load(source + begin + at, mask=inside, other=0))
        seen = tl.maximum(seen, x)
        bad += tl.where(x < float("inf"), 0, 1)
    return tl.max(seen, 1), tl.sum(bad, 1) == 0


@jit
def _scale(most, old, row, exists, HAS_OLD: tl.constexpr, MOST: tl.constexpr):
    scale = tl.maximum(tl.div_rn(most, MOST * 1.0), 1.1754943508222875e-38)
    if HAS_OLD:
        before = tl.load(old + row, mask=exists, other=0)
        scale = tl.where(most == before * MOST, before, scale)
    return tl.where(most == 0, 1.0, scale)


@jit
def _kernel(
    values,  # [rows, columns], row stride values_stride
    old,  # unused unless HAS_OLD
    largest,  # unused unless HAS_LARGEST
    first,  # unused unless STOCHASTIC
    codes,  # [rows, columns], contiguous; if PACKED [rows, columns / 2]
    scales,
    rows,
    columns,
    start,
    values_stride,
    HAS_OLD: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MOST: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,  # columns that are read at once
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    source = values + row[:, None] * values_stride
    at = tl.arange(0, BLOCK)[None, :]
    if HAS_LARGEST:
        most = tl.load(largest + row, mask=exists, other=0)
        finite = most < float("inf")  # false for NaN
    else:
        most, finite = _largest(source, at, exists, columns, ROWS, BLOCK)
    scale = _scale(most, old, row, exists, HAS_OLD, MOST)
    tl.store(scales + row, tl.where(finite, scale, float("nan")), mask=exists)
    if STOCHASTIC:
        offset = (tl.load(first + row, mask=exists, other=0) + start)[:, None]
        # Valid for every block: 8 divides BLOCK, or there is only one block.
        multiplier = multiplier_of(offset + at)
    for begin in tl.range(0, columns, BLOCK):
        column = begin + at
        inside = exists[:, None] & (column < columns)
        x = tl.load(source + column, mask=inside, other=0)
        exact = tl.div_rn(x, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)))
        code = (exact + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds half to even
        if STOCHASTIC:
            h = hash_of((offset + column) >> 3, K0, K1)
            bits = ((h * multiplier) >> 16).to(tl.float32)
            rest = exact - code
            step = tl.where(rest > 0, 1.0, -1.0)
            code += tl.where(bits + 1 < tl.abs(rest) * 65536, step, 0.0)
        code = tl.minimum(tl.maximum(code, -MOST * 1.0), MOST * 1.0)
        code = tl.where(finite[:, None], code, 0.0)
        if PACKED:
            low, high = tl.split(tl.reshape(code.to(tl.int32) + 8, (ROWS, BLOCK // 2, 2)))
            pair = begin // 2 + tl.arange(0, BLOCK // 2)[None, :]
            target = codes + row[:, None] * (columns // 2) + pair
            inside = exists[:, None] & (pair < columns // 2)
            tl.store(target, (low | high << 4).to(tl.uint8), mask=inside)
        else:
            tl.store(codes + row[:, None] * columns + column, code.to(tl.int8), mask=inside)


@round_rows.kernel
def _launch(values, old, largest, first, start, most, packed) -> tuple[Tensor, Tensor] | None:
    """The Triton kernel where it runs, else the reference."""
    if not runs_on(values.device) or values.numel() == 0:
        return None
    ran("round_rows", "triton")
    values = values if values.stride(1) == 1 else values.contiguous()
    rows, columns = values.shape
    if packed:
        codes = values.new_empty((rows, columns // 2), dtype=torch.uint8)
    else:
        codes = values.new_empty((rows, columns), dtype=torch.int8)
    scale = values.new_empty(rows)
    block = max(2, min(2048, triton.next_power_of_2(columns)))
    together = max(1, NARROW // block)
    parts = [scale if part is None else part.contiguous() for part in (old, largest, first)]
    with torch.cuda.device_of(values):
        _kernel[(triton.cdiv(rows, together),)](
            values,
            *parts,
            codes,
            scale,
            rows,
            columns,
            start,
            values.stride(0),
            HAS_OLD=old is not None,
            HAS_LARGEST=largest is not None,
            STOCHASTIC=first is not None,
            MOST=most,
            K0=KEYS[0],
            K1=KEYS[1],
            PACKED=packed,
            ROWS=together,
            BLOCK=block,
            num_warps=4,
        )
    return codes, scale
