"""Weights of 1 to 8 bits to floating point, by the formula of `codes_format`.

The value is rounded once to float32, and that once to the output dtype: float32, bfloat16 or float16 [N, K],
contiguous, K <= Kp. All implementations below give the same bits.

G (``group_size``) is any positive number; for one scale a row, it is Kp. Kp is K padded to a multiple of G. Padding
does not appear in the result. Rows may be strided (a slice of a larger weight); offsets are 64-bit. Callers flatten
leading dimensions, such as experts.

On GPUs a Triton kernel runs for signed integers of 4 and 8 bits. It is bound by memory bandwidth:

- int4: a lane loads a 32-bit word of 8 nibbles and writes the 8 results with one 16-byte store (bf16, fp16). No
  conversion instruction is needed: a nibble ORed into the mantissa of 2**23 is the float 2**23 + nibble, and
  subtracting 2**23 + 8 + zero_point is exact. A weight without padding is treated as one long row. Rows that are
  misaligned, or are not a multiple of 4 bytes, are read byte by byte.
- int8: a lane loads 16 codes and writes their results side by side.

On a CPU, PyTorch's integer operations do the same for a block of rows that fits the L2 cache. The reference serves
other formats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import (
    jit,
    runs_on,
    stored_dtype,
    tl,
    triton,
)
from lowbit_kernels.weight_only.codes_format import dequantized, format_of
from lowbit_kernels.weight_only.weight_operands import (
    FORMAT_OPERANDS,
    FORMAT_RULES,
    group_rules,
)

CODES = {torch.uint8: "int4", torch.int8: "int8"}
CPU_CACHE_BYTES = 2**21
"""Bytes of the result that a CPU computes at a time: its L2 cache."""
NIBBLES_TO_FLOATS = {
    torch.float32: (torch.int64, torch.int32, 28, 2.0**23),
    torch.bfloat16: (torch.int32, torch.int16, 12, 128.0),
    torch.float16: (torch.int32, torch.int16, 12, 1024.0),
}
"""For each result dtype: an integer as wide as two results, one as wide as one, the bits by which the second nibble of
a byte moves within the wide integer, and the float that each nibble is added to (its unit in the last place is 1)."""


@op(
    "empty(dtype, N, size)",
    codes=FORMAT_OPERANDS["codes"],
    scale=FORMAT_OPERANDS["scale"],
    zero_point=FORMAT_OPERANDS["zero_point"],
    global_scale=FORMAT_OPERANDS["global_scale"],
    rules={
        **FORMAT_RULES,
        **group_rules("bits"),
        "0 <= size <= groups * group_size": "size must be 0..{groups * group_size}, the codes of a row; got {size}",
    },
    dtype="float",
)
def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    group_size: int,
    size: int,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    """Dequantize a weight of 1 to 8 bits.

    Shapes, dtypes and the formula are in the docstring of `codes_format`.

    Args:
        codes, scale, zero_point, global_scale: as there, on one device.
        group_size: G, elements of a row that share a scale.
        size: K, elements of a row without padding.
        dtype: of the result.
        bits: of a code in a bit stream, 1 to 8; 0: 4 bits for uint8 codes, 8 for other dtypes.
        table: the number of each of the 2^bits codes; empty for integers and float8.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes or formats that do not fit each other.
    """
    parts = (codes, scale, zero_point, group_size, size, torch.float32)
    return dequantized(*parts, global_scale, bits, table).to(dtype)


reference = dequantize.reference


# ---- GPU -----------------------------------------------------------------------------------------------------------


@jit
def _int4_kernel(
    packed,  # int32 or uint8 words; each row is a whole number of them
    scale,
    zero_point,  # unused unless HAS_ZERO_POINT
    out,
    size,  # elements of a row of the result
    chunks,  # programs of a row
    packed_stride,  # of a row, in words
    scale_stride,
    zero_point_stride,
    GROUP_SIZE: tl.constexpr,
    NIBBLES: tl.constexpr,  # of a word
    BLOCK: tl.constexpr,  # words of a program
    HAS_ZERO_POINT: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * (BLOCK * NIBBLES)
    word = tl.arange(0, BLOCK)
    nibble = tl.arange(0, NIBBLES)
    element = word[:, None] * NIBBLES + nibble[None, :]
    word_inside = word * NIBBLES < size - start
    inside = element < size - start

    words = tl.load(
        packed + row * packed_stride + start // NIBBLES + word, mask=word_inside, other=0
    )
    nibbles = (words.to(tl.int32)[:, None] >> (4 * nibble)[None, :]) & 15

    # Only the start needs 64 bits: groups are counted from the one in which the chunk starts.
    start_in_group = (start % GROUP_SIZE).to(tl.int32)
    if GROUP_SIZE % NIBBLES == 0:  # all nibbles of a word share a group
        group = ((start_in_group + word * NIBBLES) // GROUP_SIZE)[:, None]
        group_inside = word_inside[:, None]
    else:
        group = (start_in_group + element) // GROUP_SIZE
        group_inside = inside
    first_group = start // GROUP_SIZE
    s = tl.load(scale + row * scale_stride + first_group + group, mask=group_inside, other=0)
    bias = 8388616.0  # 2**23 + 8
    if HAS_ZERO_POINT:
        row_zero_point = zero_point + row * zero_point_stride + first_group
        bias += tl.load(row_zero_point + group, mask=group_inside, other=0).to(tl.float32)
    x = ((nibbles | 0x4B000000).to(tl.float32, bitcast=True) - bias) * s.to(tl.float32)
    tl.store(out + row * size + start + element, x.to(out.dtype.element_ty), mask=inside)


@jit
def _int8_kernel(
    codes,
    scale,
    zero_point,  # unused unless HAS_ZERO_POINT
    out,
    size,  # elements of a row of the result
    chunks,  # programs of a row
    codes_stride,  # of a row
    scale_stride,
    zero_point_stride,
    GROUP_SIZE: tl.constexpr,  # 0: one group per row
    BLOCK: tl.constexpr,  # elements of a program
    HAS_ZERO_POINT: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * BLOCK
    element = tl.arange(0, BLOCK)
    inside = element < size - start
    x = tl.load(codes + row * codes_stride + start + element, mask=inside, other=0)
    if GROUP_SIZE == 0:
        group = element * 0
    else:
        # Only the start needs 64 bits: groups are counted from the one in which the chunk starts.
        group = ((start % GROUP_SIZE).to(tl.int32) + element) // GROUP_SIZE
        scale += start // GROUP_SIZE
        zero_point += start // GROUP_SIZE
    s = tl.load(scale + row * scale_stride + group, mask=inside, other=0).to(tl.float32)
    value = x.to(tl.float32)
    if HAS_ZERO_POINT:
        zero = tl.load(zero_point + row * zero_point_stride + group, mask=inside, other=0)
        value -= zero.to(tl.float32)
    tl.store(out + row * size + start + element, (value * s).to(out.dtype.element_ty), mask=inside)


def fill(
    out: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int
) -> None:
    """Write the op's result into `out` [N, K], contiguous, by a Triton kernel. The arguments have been checked."""
    if out.numel() == 0:
        return
    codes, scale = _dense_rows(codes), _dense_rows(scale)
    zeros = scale if zero_point is None else _dense_rows(zero_point)
    launch = _launch_int4 if codes.dtype == torch.uint8 else _launch_int8
    with torch.cuda.device_of(codes):
        launch(out, codes, scale, zeros, group_size, zero_point is not None)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _launch_int4(
    out: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, group_size: int, has_zeros: bool
) -> None:
    rows, size = out.shape
    parts = (codes, scale, zeros)
    if size == codes.shape[1] * 2 == scale.shape[1] * group_size and all(
        part.is_contiguous() for part in parts
    ):
        codes, scale, zeros = (part.view(1, -1) for part in parts)
        rows, size = 1, rows * size
    if all(n % 4 == 0 for n in (codes.data_ptr(), codes.stride(0), codes.shape[1])):
        codes = codes.view(torch.int32)
    nibbles = 2 * codes.itemsize
    block = min(1024, triton.next_power_of_2(triton.cdiv(size, nibbles)))
    chunks = triton.cdiv(size, block * nibbles)
    _int4_kernel[(rows * chunks,)](
        *(codes, scale, zeros, out, size, chunks),
        *(codes.stride(0), scale.stride(0), zeros.stride(0)),
        GROUP_SIZE=group_size,
        NIBBLES=nibbles,
        BLOCK=block,
        HAS_ZERO_POINT=has_zeros,
        num_warps=4,
    )


def _launch_int8(
    out: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, group_size: int, has_zeros: bool
) -> None:
    rows, size = out.shape
    block = min(4096, triton.next_power_of_2(size))
    chunks = triton.cdiv(size, block)
    _int8_kernel[(rows * chunks,)](
        *(codes, scale, zeros, out, size, chunks),
        *(codes.stride(0), scale.stride(0), zeros.stride(0)),
        GROUP_SIZE=0 if scale.shape[1] == 1 else group_size,
        BLOCK=block,
        HAS_ZERO_POINT=has_zeros,
        num_warps=4 if block < 4096 else 8,
    )


# ---- CPU -----------------------------------------------------------------------------------------------------------


def rows_in_cache(out: Tensor) -> int:
    """Rows of a dequantized weight that a CPU works on at a time."""
    return max(1, CPU_CACHE_BYTES // max(out.shape[1] * out.itemsize, 1))


def fill_on_cpu(
    out: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int
) -> None:
    """Write the op's result into `out` [N, Kp], contiguous, by PyTorch ops; Kp of int4 codes is even."""
    if codes.dtype == torch.uint8:
        _write_nibbles(out, codes)
    else:
        out.copy_(codes)
    groups = out.view(len(out), scale.shape[1], group_size)
    if zero_point is not None:
        groups.sub_(zero_point.unsqueeze(-1))
    if out.dtype in (scale.dtype, torch.float32):
        groups.mul_(scale.unsqueeze(-1))
    else:
        groups.copy_(groups.float() * scale.float().unsqueeze(-1))


def _write_nibbles(out: Tensor, packed: Tensor) -> None:
    """Write the codes of packed int4 as numbers, without unpacking them to bytes first.

    Both nibbles of a byte are moved, by one product and one mask, to where their results belong. There each is ORed
    into the mantissa of 2**23 (bfloat16: 128, float16: 1024), whose unit in the last place is 1.
    """
    wide, narrow, distance, unit = NIBBLES_TO_FLOATS[out.dtype]
    step = out.itemsize * 8
    words = out.view(wide)
    words.copy_(packed).mul_(1 + (1 << distance)).bitwise_and_(15 << step | 15)
    exponent = int(torch.tensor(unit, dtype=out.dtype).view(narrow))
    words.bitwise_or_(exponent << step | exponent)
    out.sub_(unit + 8)


# ---- the op --------------------------------------------------------------------------------------------------------


@dequantize.kernel
def _launch(
    codes, scale, zero_point, group_size, size, dtype, global_scale=None, bits=0, table=()
) -> Tensor | None:
    zeros = None if zero_point is None else zero_point.dtype
    if not format_of(codes.dtype, scale.dtype, zeros, bits, tuple(table)).is_int4_or_int8:
        return None
    format = CODES[codes.dtype]
    if runs_on(codes.device):
        ran("dequantize", f"{format} triton")
        out = codes.new_empty((codes.shape[0], size), dtype=stored_dtype(dtype, codes.device))
        fill(out, codes, scale, zero_point, group_size)
        return out.to(dtype)
    ran("dequantize", f"{format} torch")
    width = 2 * codes.shape[1] if format == "int4" else codes.shape[1]
    if codes.device.type != "cpu" or not width == scale.shape[1] * group_size > 0:
        return reference(codes, scale, zero_point, group_size, size, dtype)
    out = codes.new_empty((codes.shape[0], width), dtype=dtype)
    for first in range(0, out.shape[0], step := rows_in_cache(out)):
        rows = slice(first, first + step)
        zeros = None if zero_point is None else zero_point[rows]
        fill_on_cpu(out[rows], codes[rows], scale[rows], zeros, group_size)
    return out if width == size else out[:, :size].contiguous()
