"""Codes of 4 bits with a scale a group, as int8 codes with a scale a row.

    value[r, k]                = (nibble[r, k] - 8) * scale[r, k // G]      in float32
    int8[r, :], row_scale[r]   those that `quantize_rowcol` gives the row value[r, :]

    codes      uint8 [R, W], two codes + 8 a byte, the even one in the low half; 2 W = groups * G (`group_size`)
    scale      float32 [R, groups]
    int8       int8 [R, K rounded up to a multiple of 16], 0 in the padding; K is the size, at most 2 W
    row_scale  float32 [R]

`after` is not read. Given the gradient, it makes torch.compile compute the codes in the backward pass. Otherwise it
would keep those of the forward pass until then.

So int8 products read a weight that is stored in 4 bits, and no copy in 16 bits is written and read. The scales alone
don't give the largest value of a row: a group of zeros has a scale too. So a program reads the codes of a row, half a
byte each, twice: for the scale, and to write them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.quantize import quantize_rowcol
from lowbit_kernels.quantize.quantize_rows import extremes, scale_of_extremes
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, tl, triton
from lowbit_kernels.weight_only.codes_format import dequantized
from lowbit_kernels.weight_only.dequantize_triton import CYCLE, cycles, words_of

BLOCK, WARPS = 256, 2
"""Cycles of a row that a program reads at once, and its warps."""


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
    """int8 codes and row_scale; see the module's docstring."""
    values = dequantized(codes, scale, None, group_size, size, torch.float32, None, 4, ())
    found, row_scale, _, _ = quantize_rowcol.reference(values, "int8", columns=False)
    return found, row_scale


reference = int4_to_int8.reference


@jit
def _cycles(words, start, size, width, at, WORD: tl.constexpr, WHOLE: tl.constexpr):
    """Cycles `at` of a row, counted from element `start`, a multiple of 8. In the cycle that a row ends in, codes
    beyond stand for zero; cycles beyond have scales of 0."""
    EIGHTS: tl.constexpr = -0x77777778  # 0x88888888
    found = cycles(words, start // 8 * (4 // WORD), width, at, 4, WORD)
    if not WHOLE:
        left = size - start - at * 8
        inside = tl.where(left < 8, (1 << 4 * tl.minimum(tl.maximum(left, 0), 7)) - 1, -1)
        found = (found & inside) | (EIGHTS & ~inside)
    return found


@jit
def _scales(scale, start, size, at, GROUP_SIZE: tl.constexpr):
    """The scales of the elements of cycles, in a column where all elements of a cycle share a group; 0 beyond a row."""
    element = start + at[:, None] * 8
    if GROUP_SIZE % 8:
        element += tl.arange(0, 8)[None, :]
    return tl.load(scale + element // GROUP_SIZE, mask=element < size, other=0)


@jit
def _codes(cycle, of_cycle):
    """code * 16**i for elements i and 4 + i of cycles: bits stay where they are, below those of 2**23 in float32. So no
    code is moved to the end of a word or converted. `of_cycle`: 0 to 7."""
    own = of_cycle % 4 * 4
    half = cycle[:, None] >> (of_cycle // 4 * 16)[None, :]
    number = (half & (15 << own)[None, :]) | 0x4B000000
    zero = 0x4B000000 + (8 << own)
    return number.to(tl.float32, bitcast=True) - zero.to(tl.float32, bitcast=True)[None, :]


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
    WHOLE: tl.constexpr,  # size is a multiple of 8
    BLOCK: tl.constexpr,  # cycles
):
    row = tl.program_id(0).to(tl.int64)
    words += row * words_stride
    scale += row * scale_stride
    at = tl.arange(0, BLOCK)
    of_cycle = tl.arange(0, 8)
    lows = tl.zeros((BLOCK,), tl.int32)
    highs = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, size, BLOCK * 8):
        cycle = _cycles(words, start, size, width, at, WORD, WHOLE).to(tl.uint32)
        s = _scales(scale, start, size, at, GROUP_SIZE)
        # Each code is the highest part of a number, so the numbers have the order of the codes.
        first = cycle[:, None] << (28 - of_cycle * 4)[None, :]
        if GROUP_SIZE % 8:
            least = first
            most = first
        else:
            least = tl.min(first, 1)[:, None]
            most = tl.max(first, 1)[:, None]
        negative, positive = extremes(((least >> 28).to(tl.int32) - 8).to(tl.float32) * s)
        lows, highs = tl.maximum(lows, tl.max(negative, 1)), tl.maximum(highs, tl.max(positive, 1))
        negative, positive = extremes(((most >> 28).to(tl.int32) - 8).to(tl.float32) * s)
        lows, highs = tl.maximum(lows, tl.max(negative, 1)), tl.maximum(highs, tl.max(positive, 1))
    own = scale_of_extremes(tl.max(lows, 0), tl.max(highs, 0), True)
    tl.store(row_scale + row, own)
    # Powers of two keep products as they are, and 16**3 times the largest value within float32.
    down = tl.where(own > 1e20, 2.0**-64, 1.0)
    inverse = tl.div_rn(tl.full(own.shape, 1.0, tl.float32), own * down)
    place = (0x3F800000 - (of_cycle % 4 * 4 << 23)).to(tl.float32, bitcast=True)  # 16**-i
    inverse = tl.where(own == own, inverse, 0.0) * place[None, :]
    for start in tl.range(0, padded, BLOCK * 8):
        codes = _codes(_cycles(words, start, size, width, at, WORD, WHOLE), of_cycle)
        s = _scales(scale, start, size, at, GROUP_SIZE)
        s = tl.where(own == own, s * down, 0.0)
        # No product leaves the range, so nothing is clamped. The launch forbids a fused multiply-add, which would round
        # once. The low byte of 1.5 * 2**23 + a code has the bits of the code.
        found = (codes * s * inverse + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        column = start + at[:, None] * 8 + of_cycle[None, :]
        tl.store(out + row * padded + column, found, mask=column < padded)


@int4_to_int8.kernel
def _launch(codes, scale, group_size, size, after) -> tuple[Tensor, Tensor] | None:
    if not (codes.numel() and size and runs_on(codes.device)):
        return None
    ran("int4_to_int8", "triton")
    operands = codes, scale, after
    codes, scale = (x if x.stride(1) == 1 else x.contiguous() for x in (codes, scale))
    words, word = words_of(codes, 4)
    padded = size + -size % 16
    out = codes.new_empty((codes.shape[0], padded), dtype=torch.int8)
    row_scale = scale.new_empty(codes.shape[0])
    block = min(triton.next_power_of_2(padded) // CYCLE, BLOCK)
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
            "WHOLE": size % CYCLE == 0,
            "BLOCK": block,
            "num_warps": WARPS,
            "enable_fp_fusion": False,
        },
    )
    return out, row_scale
