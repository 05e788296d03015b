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


@op(
    "empty(torch.int8, R, K), empty(torch.float32, R)",
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
) -> tuple[Tensor, Tensor]:
    """(codes int8 [R, K], scale float32 [R]) by the formulas of the module.

    Args:
        values: float32 [R, K].
        old: float32 [R], the scales so far, or None.
        largest: float32 [R], the largest magnitude of each row if `values` are only some of its columns, else None.
        first: int64 [R], the random offset of each row's first column; None rounds to nearest.
        start: the first of these columns in the row.
        most: the largest code, 1 to 127. Codes are -most .. most.

    Raises TypeError for other dtypes, ValueError for shapes that do not fit each other.
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
    return codes.nan_to_num_(0.0).clamp_(-most, most).to(torch.int8), scale


reference = round_rows.reference


@jit
def _kernel(
    values,  # [rows, columns], row stride values_stride
    old,  # unused unless HAS_OLD
    largest,  # unused unless HAS_LARGEST
    first,  # unused unless STOCHASTIC
    codes,  # [rows, columns], contiguous
    scales,
    columns,
    start,
    values_stride,
    HAS_OLD: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MOST: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = values + row * values_stride
    infinity = float("inf")
    if HAS_LARGEST:
        most = tl.load(largest + row)
        finite = most < infinity  # false for NaN
    else:
        seen = tl.zeros((BLOCK,), tl.float32)
        bad = tl.zeros((BLOCK,), tl.int32)
        for begin in tl.range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.abs(tl.load(source + column, mask=column < columns, other=0))
            seen = tl.maximum(seen, x)
            bad += tl.where(x < infinity, 0, 1)
        most = tl.max(seen)
        finite = tl.sum(bad) == 0
    scale = tl.maximum(tl.div_rn(most, MOST * 1.0), 1.1754943508222875e-38)
    if HAS_OLD:
        before = tl.load(old + row)
        scale = tl.where(most == before * MOST, before, scale)
    scale = tl.where(most == 0, 1.0, scale)
    tl.store(scales + row, tl.where(finite, scale, float("nan")))
    if STOCHASTIC:
        offset = tl.load(first + row) + start
        # Valid for every block: 8 divides BLOCK, or there is only one block.
        multiplier = multiplier_of(offset + tl.arange(0, BLOCK))
    for begin in tl.range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        exact = tl.div_rn(tl.load(source + column, mask=inside, other=0), scale)
        code = (exact + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds half to even
        if STOCHASTIC:
            h = hash_of((offset + column) >> 3, K0, K1)
            bits = ((h * multiplier) >> 16).to(tl.float32)
            rest = exact - code
            step = tl.where(rest > 0, 1.0, -1.0)
            code += tl.where(bits + 1 < tl.abs(rest) * 65536, step, 0.0)
        code = tl.where(finite, tl.minimum(tl.maximum(code, -MOST * 1.0), MOST * 1.0), 0.0)
        tl.store(codes + row * columns + column, code.to(tl.int8), mask=inside)


@round_rows.kernel
def _launch(
    values: Tensor,
    old: Tensor | None,
    largest: Tensor | None,
    first: Tensor | None,
    start: int,
    most: int,
) -> tuple[Tensor, Tensor] | None:
    """The Triton kernel where it runs, else the reference."""
    if not runs_on(values.device) or values.numel() == 0:
        return None
    ran("round_rows", "triton")
    values = values if values.stride(1) == 1 else values.contiguous()
    codes = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    scale = values.new_empty(values.shape[0])
    parts = [scale if part is None else part.contiguous() for part in (old, largest, first)]
    with torch.cuda.device_of(values):
        _kernel[(values.shape[0],)](
            values,
            *parts,
            codes,
            scale,
            values.shape[1],
            start,
            values.stride(0),
            HAS_OLD=old is not None,
            HAS_LARGEST=largest is not None,
            STOCHASTIC=first is not None,
            MOST=most,
            K0=KEYS[0],
            K1=KEYS[1],
            BLOCK=min(2048, triton.next_power_of_2(values.shape[1])),
            num_warps=4,
        )
    return codes, scale
