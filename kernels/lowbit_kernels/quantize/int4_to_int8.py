"""Codes of 4 bits with a scale a group, as int8 codes with a scale a row.

    value[r, k]                = (nibble[r, k] - 8) * scale[r, k // G]      in float32
    int8[r, :], row_scale[r]   those that `quantize_rowcol` gives the row value[r, :]

    codes      uint8 [R, W], two codes + 8 a byte, the even one in the low half; 2 W = groups * G
    scale      float32 [R, groups]
    int8       int8 [R, K rounded up to a multiple of 16], 0 in the padding; K is the size, at most 2 W
    row_scale  float32 [R]

So int8 products read a weight that is stored in 4 bits, and no copy in 16 bits is written and read. The scales alone
don't give the largest value of a row: a group of zeros has a scale too. So a program reads the codes of a row, half a
byte each, before it writes them. Rows of up to `MOST_KEPT` elements stay in registers; longer ones are read again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.quantize import quantize_rowcol
from lowbit_kernels.quantize.quantize_rows import (
    MOST_KEPT,
    extremes,
    rounded_codes,
    scale_of_extremes,
)
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, tl, triton
from lowbit_kernels.weight_only.codes_format import dequantized
from lowbit_kernels.weight_only.dequantize_triton import CYCLE, cycles, words_of


@op(
    "empty(torch.int8, R, size + -size % 16), empty(torch.float32, R)",
    planned=True,
    codes="uint8 [R, W]; flatten leading dimensions first",
    scale="float32 [R, groups]",
    rules={
        "group_size > 0 and groups * group_size == 2 * W": (
            "codes of {2 * W} columns have no {groups} groups of {group_size}"
        ),
        "0 <= size <= 2 * W": "size must be 0..{2 * W}, the codes of a row; got {size}",
    },
)
def int4_to_int8(
    codes: Tensor, scale: Tensor, *, group_size: int, size: int, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """int8 codes and row_scale; shapes, dtypes and the formula are in the module's docstring.

    Args:
        codes: uint8 [R, W].
        scale: float32 [R, groups].
        group_size: G, elements of a row that share a scale.
        size: K, elements of a row without padding.
        after: not read. Given the gradient, it makes torch.compile compute the codes in the backward pass. Otherwise it
            would keep those of the forward pass until then.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not fit each other, or a size beyond the columns.
    """
    values = dequantized(codes, scale, None, group_size, size, torch.float32, None, 4, ())
    found, row_scale, _, _ = quantize_rowcol.reference(values, "int8", columns=False)
    return found, row_scale


reference = int4_to_int8.reference


@jit
def _values(words, scale, start, size, width, at, WORD: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """The values of cycles `at` of a row, counted from element `start`, a multiple of 8; 0 beyond the row."""
    each = tl.arange(0, 8)
    cycle = cycles(words, start // 8 * (4 // WORD), width, at, 4, WORD)
    code = (cycle[:, None] >> (each * 4)[None, :]) & 15
    element = start + at[:, None] * 8 + each[None, :]
    inside = element < size
    if GROUP_SIZE % 8 == 0:  # all codes of a cycle share a group
        of_cycle = start + at * 8
        s = tl.load(scale + of_cycle // GROUP_SIZE, mask=of_cycle < size, other=0)[:, None]
    else:
        s = tl.load(scale + element // GROUP_SIZE, mask=inside, other=0)
    return tl.where(inside, (code - 8).to(tl.float32) * s, 0.0)


@jit
def _kernel(
    words,  # of a cycle of 8 codes or a part of it
    scale,
    out,
    row_scale,
    size,
    padded,  # columns of out
    width,  # words of a row
    words_stride,  # of a row
    scale_stride,
    WORD: tl.constexpr,  # bytes of a word
    GROUP_SIZE: tl.constexpr,
    KEPT: tl.constexpr,  # BLOCK holds a whole row
    BLOCK: tl.constexpr,  # cycles
):
    row = tl.program_id(0).to(tl.int64)
    words += row * words_stride
    scale += row * scale_stride
    at = tl.arange(0, BLOCK)
    lows = tl.zeros((BLOCK,), tl.int32)
    highs = tl.zeros((BLOCK,), tl.int32)
    if KEPT:
        values = _values(words, scale, 0, size, width, at, WORD, GROUP_SIZE)
        negative, positive = extremes(values)
        lows, highs = tl.max(negative, 1), tl.max(positive, 1)
    else:
        for start in tl.range(0, size, BLOCK * 8):
            values = _values(words, scale, start, size, width, at, WORD, GROUP_SIZE)
            negative, positive = extremes(values)
            lows = tl.maximum(lows, tl.max(negative, 1))
            highs = tl.maximum(highs, tl.max(positive, 1))
    low, high = tl.max(lows, 0), tl.max(highs, 0)
    s = scale_of_extremes(low, high, True)
    inverse = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    tl.store(row_scale + row, s)
    for start in tl.range(0, padded, BLOCK * 8):
        if not KEPT:
            values = _values(words, scale, start, size, width, at, WORD, GROUP_SIZE)
        column = start + at[:, None] * 8 + tl.arange(0, 8)[None, :]
        found = rounded_codes(values, inverse, True).to(tl.int8)
        tl.store(out + row * padded + column, found, mask=column < padded)


@int4_to_int8.kernel
def _launch(
    codes: Tensor, scale: Tensor, group_size: int, size: int, after: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    if not (codes.numel() and size and runs_on(codes.device)):
        return None
    ran("int4_to_int8", "triton")
    operands = codes, scale, after
    codes, scale = (x if x.stride(1) == 1 else x.contiguous() for x in (codes, scale))
    words, word = words_of(codes, 4)
    padded = size + -size % 16
    out = codes.new_empty((codes.shape[0], padded), dtype=torch.int8)
    row_scale = scale.new_empty(codes.shape[0])
    block = min(triton.next_power_of_2(padded), MOST_KEPT) // CYCLE
    launch(
        "int4_to_int8",
        operands,
        (out, row_scale),
        _kernel,
        codes.shape[0],
        (
            *(words, scale, out, row_scale, size, padded, words.shape[1]),
            *(words.stride(0), scale.stride(0)),
        ),
        {
            "WORD": word,
            "GROUP_SIZE": group_size,
            "KEPT": padded <= block * CYCLE,
            "BLOCK": block,
            "num_warps": 4 if block * CYCLE < 4096 else 8,
        },
    )
    return out, row_scale
