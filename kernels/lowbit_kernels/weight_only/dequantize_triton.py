"""Weights of 1 to 8 bits to floating point on any GPU: the Triton kernel of ``dequantize``, for all formats.

The kernel is bound by memory, and nearly all of that are its results. A lane decodes a *cycle*: 8 codes, whose ``bits``
bytes lie side by side at any number of bits, to 8 results, which it writes by one 16-byte store (bf16, fp16).

- It loads the cycle as one word where the bits are a power of two and rows are aligned, and else in the largest words
  that divide it, down to bytes. A weight without padding is treated as one long row.
- An integer needs no conversion instruction: a code ORed into the mantissa of 2**23 is the float 2**23 + code, and
  subtracting 2**23 + offset + zero_point is exact.
- A float8 is moved to where float32 has exponent and mantissa, and multiplied by the difference of both biases.
- A value of a table is a load from the first-level cache: 16 values are one line of it.
- Where a zero point is a value, the sum is computed in float64, where the product is exact, as PyTorch's formula does.

Scales in bytes are decoded in registers, also those in two steps, of double quantization. Codes of a cycle share one
scale where the group size is a multiple of 8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime.triton_runtime import jit, launch, tl
from lowbit_kernels.weight_only.codes_format import CodesFormat

CYCLE = 8  # codes
CYCLES = 256  # of a program, at most
WARPS = 2
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that a cycle is read in, by their bytes."""
KINDS = {0: "integers", 4: "e4m3", 5: "e5m2"}
"""How a code becomes a number, without a table, by the bits of its exponent."""


@jit
def _e4m3(byte):
    """The float32 value of e4m3 bytes, int32; 0x7F is NaN. The shifted bits of small numbers are subnormal."""
    magnitude = byte & 127
    bits = tl.where(magnitude == 127, 0x7FC00000, magnitude << 20) | ((byte & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@jit
def cycles(words, first, width, at, BITS: tl.constexpr, WORD: tl.constexpr):
    """Cycles `at` of a row, counted from word `first`, as integers; bits beyond the row are 0."""
    LOADS: tl.constexpr = BITS // WORD
    left = tl.minimum(width - first, at.shape[0] * LOADS).to(tl.int32)
    mask: tl.constexpr = (1 << (8 * WORD)) - 1
    index = at * LOADS
    found = tl.load(words + first + index, mask=index < left, other=0)
    found = found.to(tl.int64 if BITS > 4 else tl.int32)
    if LOADS > 1:
        found = found & mask
    for i in tl.static_range(1, LOADS):
        part = tl.load(words + first + index + i, mask=index + i < left, other=0)
        found |= (part.to(found.dtype) & mask) << (8 * WORD * i)
    return found


@jit
def scales_in_float32(scale, inside, whole, SCALE: tl.constexpr):
    """Scales in float32, but those in two steps."""
    stored = tl.load(scale, mask=inside, other=0)
    if SCALE == "e8m0":
        byte = stored.to(tl.int32)
        bits = tl.where(byte == 0, 0x400000, byte << 23)  # 2**-127 is subnormal
        return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    if SCALE == "e4m3":
        return _e4m3(stored.to(tl.int32))
    if SCALE == "e4m3/global":
        return tl.div_rn(_e4m3(stored.to(tl.int32)), tl.load(whole))
    return stored.to(tl.float32)


@jit
def _scales_in_two_steps(scale, inside, values, absmax, offset):
    """values[scale] * absmax + offset, rounded twice: the launch forbids a fused multiply-add."""
    stored = tl.load(scale, mask=inside, other=0).to(tl.int32)
    value = tl.load(values + stored, mask=inside, other=0)
    return value * tl.load(absmax, mask=inside, other=0) + tl.load(offset)


@jit
def numbers_of_codes(code, table, inside, KIND: tl.constexpr):
    """What codes that are not integers stand for, before their scale."""
    if KIND == "table":
        return tl.load(table + code, mask=inside, other=0)
    if KIND == "e5m2":  # the upper half of a float16
        return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return _e4m3(code)


@jit
def _integers(code, s, zeros, inside, OFFSET: tl.constexpr, ZERO: tl.constexpr):
    """The values of integers: their codes as a bit stream stores them, and pointers to zero points."""
    if ZERO == "value":
        bits = code.to(tl.int64) | 0x4330000000000000  # of 2**52 + code
        exact = bits.to(tl.float64, bitcast=True)
        zero = tl.load(zeros, mask=inside, other=0).to(tl.float64)
        return ((exact - (4503599627370496.0 + OFFSET)) * s.to(tl.float64) + zero).to(tl.float32)
    bias = 8388608.0 + OFFSET  # 2**23
    if ZERO == "code":
        bias += tl.load(zeros, mask=inside, other=0).to(tl.float32)
    return ((code | 0x4B000000).to(tl.float32, bitcast=True) - bias) * s


@jit
def _groups(start, at, element, inside, left, GROUP_SIZE: tl.constexpr):
    """The group in which a program's elements start, and of each cycle, or element, the group counted from that one.

    Only the start needs 64 bits.
    """
    found = (at * 0)[:, None]
    found_inside = (at * 8 < left)[:, None]
    if GROUP_SIZE == 0:
        first = start * 0
    else:
        first = start // GROUP_SIZE
        start_in_group = (start % GROUP_SIZE).to(tl.int32)
        if GROUP_SIZE % 8 == 0:  # all codes of a cycle share a group
            found = ((start_in_group + at * 8) // GROUP_SIZE)[:, None]
        else:
            found = (start_in_group + element) // GROUP_SIZE
            found_inside = inside
    return first, found, found_inside


@jit
def _kernel(
    words,  # of a cycle or a part of it; each row is a whole number of them
    scale,
    zero_point,  # unused unless ZERO
    whole,  # the number that all scales share: the global scale, or the offset of scales in two steps
    byte_values,  # of scales in two steps; unused unless SHARING
    absmax,
    table,  # unused unless KIND is "table"
    out,
    size,  # elements of a row of the result
    chunks,  # programs of a row
    width,  # words of a row
    words_stride,  # of a row
    scale_stride,
    absmax_stride,
    zero_point_stride,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,  # bytes of a word
    FLIP: tl.constexpr,  # int8: the bit that turns a code into one minus the smallest
    OFFSET: tl.constexpr,  # of integers: how 0 is stored, or the code whose value a zero point gives
    GROUP_SIZE: tl.constexpr,  # 0: one scale a row
    SCALE: tl.constexpr,
    SHARING: tl.constexpr,  # scales in two steps that share an absmax; 0: in one step
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,  # cycles of a program
):
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * (BLOCK * 8)
    left = tl.minimum(size - start, BLOCK * 8).to(tl.int32)
    at = tl.arange(0, BLOCK)
    each = tl.arange(0, 8)
    element = at[:, None] * 8 + each[None, :]
    inside = element < left

    first = start // 8 * (BITS // WORD)
    cycle = cycles(words + row * words_stride, first, width, at, BITS, WORD)
    shift = (each * BITS).to(cycle.dtype)
    code = (cycle[:, None] >> shift[None, :]).to(tl.int32) & ((1 << BITS) - 1)

    first_group, group, group_inside = _groups(start, at, element, inside, left, GROUP_SIZE)
    scales = scale + row * scale_stride + first_group + group
    if SHARING > 0:
        step = absmax + row * absmax_stride + (first_group + group) // SHARING
        s = _scales_in_two_steps(scales, group_inside, byte_values, step, whole)
    else:
        s = scales_in_float32(scales, group_inside, whole, SCALE)
    if KIND != "integers":
        x = numbers_of_codes(code, table, inside, KIND) * s
    else:
        zeros = zero_point + row * zero_point_stride + first_group + group
        x = _integers(code ^ FLIP, s, zeros, group_inside, OFFSET, ZERO)
    tl.store(out + row * size + start + element, x.to(out.dtype.element_ty), mask=inside)


class TwoSteps(NamedTuple):
    """Scales of bytes: values[byte] * absmax + offset, each rounded to float32.

    Args:
        values: float32 [256].
        absmax: float32 [N, A]; A divides the groups of a row.
        offset: float32, one element.
    """

    values: Tensor
    absmax: Tensor
    offset: Tensor


def fill(
    out: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    format: CodesFormat,
    global_scale: Tensor | None = None,
    two_steps: TwoSteps | None = None,
    op: str | None = None,
) -> None:
    """Write the result of ``dequantize`` into `out` [N, K], contiguous, where K is the size. The arguments have been
    checked. With `two_steps`, `scale` is uint8 and has its values. `op`: as of `triton_runtime.launch`."""
    if out.numel() == 0:
        return
    (rows, size), groups, bits = out.shape, scale.shape[1], format.bits
    parts = [codes, scale, scale if zero_point is None else zero_point]
    parts.append(parts[1] if two_steps is None else two_steps.absmax)
    sharing = 0 if two_steps is None else groups // parts[3].shape[1]
    parts = [x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous() for x in parts]
    words, word = words_of(parts[0], bits)
    width = words.shape[1]
    is_long = groups > 1 and size == groups * group_size and size * bits == 8 * codes.shape[1]
    if is_long and all(part.is_contiguous() for part in parts):
        rows, size, width = 1, rows * size, rows * width
    stored, scales = scale_bytes(parts[1], global_scale)
    zeros = stored if zero_point is None else parts[2]
    whole, values, absmax = (stored if global_scale is None else global_scale), stored, stored
    if two_steps is not None:
        whole, values, absmax = two_steps.offset, two_steps.values, parts[3]
    table = on_device(format.table, out.device) if format.table else stored
    block = min(CYCLES, 1 << (-(-size // CYCLE) - 1).bit_length())
    chunks = -(-size // (block * CYCLE))
    launch(
        op,
        (codes, scale, zero_point, global_scale),
        (out,),
        _kernel,
        rows * chunks,
        (
            *(words, stored, zeros, whole, values, absmax, table, out),
            *(size, chunks, width, words.stride(0)),
            *(stored.stride(0), absmax.stride(0), zeros.stride(0)),
        ),
        {
            "KIND": kind_of(format),
            "BITS": bits,
            "WORD": word,
            "FLIP": 128 if codes.dtype == torch.int8 else 0,
            "OFFSET": format.mid - format.low,
            "GROUP_SIZE": 0 if groups == 1 else group_size,
            "SCALE": scales,
            "SHARING": sharing,
            "ZERO": format.zero_point,
            "BLOCK": block,
            "num_warps": WARPS,
            "enable_fp_fusion": False,
        },
    )


def kind_of(format: CodesFormat) -> str:
    """How a code becomes a number: of `KINDS`, or by the table."""
    return "table" if format.table else KINDS[format.exponent]


def words_of(codes: Tensor, bits: int) -> tuple[Tensor, int]:
    """The codes in words, and the bytes of a word."""
    word = bits & -bits  # the largest power of two that divides it
    start, step, width = codes.data_ptr(), codes.stride(0), codes.shape[1]
    while any(n % word for n in (start, step, width)):
        word //= 2
    codes = codes if codes.dtype is torch.uint8 else codes.view(torch.uint8)
    return codes.view(WORDS[word]), word


def scale_bytes(scale: Tensor, global_scale: Tensor | None) -> tuple[Tensor, str]:
    """The scales, as the kernel takes them, and how they are stored."""
    if scale.dtype is torch.uint8:
        return scale, "e8m0"
    if scale.dtype is torch.float8_e4m3fn:
        return scale.view(torch.uint8), "e4m3" if global_scale is None else "e4m3/global"
    return scale, "float"


MOST_TABLES = 256
_tables: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}
"""The first tables that a process uses, on the devices. None leaves, since CUDA graphs read them."""


def on_device(table: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 values on a device. In a CUDA graph, which can't copy from the host, kernels write them."""
    found = _tables.get((table, device))
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.stack(
            [torch.full((), value, dtype=torch.float32, device=device) for value in table]
        )
    with torch.inference_mode(False):
        found = torch.tensor(table, dtype=torch.float32, device=device)
    if len(_tables) < MOST_TABLES:
        _tables[table, device] = found
    return found
