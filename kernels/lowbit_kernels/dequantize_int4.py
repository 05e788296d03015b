"""int4 weights back to floating point.

    x[n, k] = (code[n, k] - zero_point[n, k // G]) * scale[n, k // G],    code = nibble - 8  in -8 .. 7

The difference is exact, the product is rounded once to float32, and that once to the output dtype. Every
path below gives the same bits.

    packed      uint8 [N, ceil(Kp / 2)]   even k in the low nibble of byte k // 2, odd k in the high one
    scale       float32, bfloat16 or float16 [N, Kp / G]
    zero_point  int8 [N, Kp / G], on the grid of the codes, or None for 0
    result      float32, bfloat16 or float16 [N, K], contiguous, K <= Kp

G (``group_size``) is any positive number; Kp is K padded to a multiple of G, what lies in the padding is not
read into the result. Rows may be strided (a slice of a larger weight); offsets are 64-bit. Leading dimensions
(experts) are the caller's to flatten.

The kernel reads a weight as 32-bit words of 8 nibbles, one per lane and eight of them in flight, and a lane
writes the 8 neighbouring results of a word in one 16-byte store (bf16, fp16). No conversion instruction: a
nibble ORed into the mantissa of 2**23 is the float 2**23 + nibble, and subtracting 2**23 + 8 + zero_point from
it is exact. Where nothing is padded, rows and groups run on without a gap and the weight is one long row.
Rows that aren't made of whole words, or are misaligned, are read as bytes of 2 nibbles.

On a CPU PyTorch's operations on integers do the same, a cache's worth of rows at a time: 4096 x 4096 take 9 ms on one
core of an EPYC, where unpacking and looking up a scale for every element took 180.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_kernels.library import LIBRARY, check_one_device
from lowbit_kernels.triton_runtime import jit, runs_on, stored_dtype, tl, triton

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BYTES_IN_CACHE = 2**21  # of what a CPU dequantizes at a time: its L2 cache
# An integer as large as two results, bits between the nibbles of a byte there, and the number that each is put beside.
WORDS = {
    torch.float32: (torch.int64, 28, 2.0**23),
    torch.bfloat16: (torch.int32, 12, 128.0),
    torch.float16: (torch.int32, 12, 1024.0),
}


def dequantize_int4(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize int4 weights; shapes, dtypes and the formula are in the module's docstring.

    Args:
        packed, scale, zero_point: as above, on one device.
        group_size: G, elements of a row that share a scale.
        size: K, elements of a row without padding.
        dtype: of the result.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes that don't fit each other.
    """
    return torch.ops.lowbit.dequantize_int4(packed, scale, zero_point, group_size, size, dtype)


def reference(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The formula in PyTorch ops, on any device."""
    _check(packed, scale, zero_point, group_size, size, dtype)
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[:, :size]
    group = torch.arange(size, device=packed.device) // group_size
    x = nibbles.to(torch.float32) - 8
    if zero_point is not None:
        x = x - zero_point.to(torch.float32)[:, group]
    return (x * scale.to(torch.float32)[:, group]).to(dtype)


@jit
def _kernel(
    packed,  # int32 or uint8, rows of whole words
    scale,
    zero_point,  # unused unless HAS_ZERO_POINT
    out,
    size,  # elements of a row of the result
    chunks,  # programs of a row
    packed_stride,  # of a row, in words
    scale_stride,
    zero_point_stride,
    GROUP_SIZE: tl.constexpr,
    NIBBLES: tl.constexpr,  # in a word
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

    # Only the start needs 64 bits: within a chunk, groups are counted from the one it starts in.
    start_in_group = (start % GROUP_SIZE).to(tl.int32)
    if GROUP_SIZE % NIBBLES == 0:  # a word lies in one group
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


def _launch(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The Triton kernel where it runs; on a CPU the words of `fill_on_cpu`, and the reference for odd rows."""
    _check(packed, scale, zero_point, group_size, size, dtype)
    if runs_on(packed.device):
        out = packed.new_empty((packed.shape[0], size), dtype=stored_dtype(dtype, packed.device))
        fill(out, packed, scale, zero_point, group_size)
        return out.to(dtype)
    has_words = 2 * packed.shape[1] == scale.shape[1] * group_size > 0
    if packed.device.type == "cpu" and has_words:
        out = packed.new_empty((packed.shape[0], 2 * packed.shape[1]), dtype=dtype)
        fill_by_rows(fill_on_cpu, out, packed, scale, zero_point, group_size)
        return out if out.shape[1] == size else out[:, :size].contiguous()
    return reference(packed, scale, zero_point, group_size, size, dtype)


def rows_in_cache(out: Tensor) -> int:
    """Rows of a dequantized weight that a CPU works on at a time."""
    return max(1, BYTES_IN_CACHE // max(out.shape[1] * out.itemsize, 1))


def fill_by_rows(
    fill: Callable[..., None],
    out: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
) -> None:
    """`fill_on_cpu` of either width, a cache's worth of rows at a time."""
    for first in range(0, out.shape[0], step := rows_in_cache(out)):
        rows = slice(first, first + step)
        zero = None if zero_point is None else zero_point[rows]
        fill(out[rows], codes[rows], scale[rows], zero, group_size)


def apply_groups(out: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int) -> None:
    """Subtract zero points from the codes in `out` [N, Kp], contiguous, and multiply by the scales, in place."""
    groups = out.view(len(out), scale.shape[1], group_size)
    if zero_point is not None:
        groups.sub_(zero_point.unsqueeze(-1))
    if out.dtype in (scale.dtype, torch.float32):
        groups.mul_(scale.unsqueeze(-1))
    else:
        groups.copy_(groups.float() * scale.float().unsqueeze(-1))


def fill_on_cpu(
    out: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int
) -> None:
    """The op's result into `out` [N, Kp], contiguous, by PyTorch ops on the words that two results make; Kp even.

    The two nibbles of a byte meet the exponent of 2**23, or of 128 in bfloat16 and 1024 in float16, beside which the
    unit is 1: so both are numbers after two operations on integers, already in their places.
    """
    word, distance, unit = WORDS[out.dtype]
    step = out.itemsize * 8
    words = out.view(word)
    words.copy_(packed).mul_(1 + (1 << distance)).bitwise_and_(15 << step | 15)
    magic = torch.tensor(unit, dtype=out.dtype).view(torch.int32 if step == 32 else torch.int16)
    words.bitwise_or_(int(magic) << step | int(magic))
    out.sub_(unit + 8)
    apply_groups(out, scale, zero_point, group_size)


def fill(
    out: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int
) -> None:
    """The op's result into `out` [N, K], contiguous, by the Triton kernel; the rest checked."""
    rows, size = out.shape
    if out.numel() == 0:
        return
    packed, scale = _dense_rows(packed), _dense_rows(scale)
    zero_point = scale if zero_point is None else _dense_rows(zero_point)
    has_zero_point = zero_point is not scale
    parts = (packed, scale, zero_point)
    if size == packed.shape[1] * 2 == scale.shape[1] * group_size and all(
        part.is_contiguous() for part in parts
    ):
        packed, scale, zero_point = (part.view(1, -1) for part in parts)
        rows, size = 1, rows * size
    nibbles = 2
    if all(n % 4 == 0 for n in (packed.data_ptr(), packed.stride(0), packed.shape[1])):
        packed, nibbles = packed.view(torch.int32), 8
    block = min(1024, triton.next_power_of_2(triton.cdiv(size, nibbles)))
    chunks = triton.cdiv(size, block * nibbles)
    with torch.cuda.device_of(packed):
        _kernel[(rows * chunks,)](
            packed,
            scale,
            zero_point,
            out,
            size,
            chunks,
            packed.stride(0),
            scale.stride(0),
            zero_point.stride(0),
            GROUP_SIZE=group_size,
            NIBBLES=nibbles,
            BLOCK=block,
            HAS_ZERO_POINT=has_zero_point,
            num_warps=4,
        )


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _fake(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    _check(packed, scale, zero_point, group_size, size, dtype)
    return packed.new_empty((packed.shape[0], size), dtype=dtype)


def _check(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    check_one_device(packed=packed, scale=scale, zero_point=zero_point)
    if packed.dtype != torch.uint8:
        raise TypeError(f"dequantize_int4 takes packed as torch.uint8, got {packed.dtype}")
    for name, got in (("a scale", scale.dtype), ("a result", dtype)):
        if got not in FLOATS:
            raise TypeError(
                f"dequantize_int4 takes {name} of {', '.join(map(str, FLOATS))}; got {got}"
            )
    if zero_point is not None and zero_point.dtype != torch.int8:
        raise TypeError(
            f"dequantize_int4 takes zero_point as torch.int8 or None, got {zero_point.dtype}; "
            "it lies on the grid of the signed codes -8..7"
        )
    if group_size < 1:
        raise ValueError(f"group_size must be 1 or more elements, got {group_size}")
    if packed.dim() != 2 or scale.dim() != 2:
        raise ValueError(
            f"dequantize_int4 takes packed [N, Kp/2] and scale [N, Kp/G], got {tuple(packed.shape)} and "
            f"{tuple(scale.shape)}; flatten leading dimensions first"
        )
    padded = scale.shape[1] * group_size
    if tuple(packed.shape) != (scale.shape[0], (padded + 1) // 2):
        raise ValueError(
            f"a scale of shape {tuple(scale.shape)} with group_size {group_size} takes packed of shape "
            f"{(scale.shape[0], (padded + 1) // 2)}, got {tuple(packed.shape)}"
        )
    if not 0 <= size <= padded:
        raise ValueError(f"size must be 0..{padded}, the elements of a packed row; got {size}")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(
            f"zero_point must have the shape of scale, {tuple(scale.shape)}; got {tuple(zero_point.shape)}"
        )


LIBRARY.define(
    "dequantize_int4(Tensor packed, Tensor scale, Tensor? zero_point, int group_size, SymInt size, "
    "ScalarType dtype) -> Tensor"
)
LIBRARY.impl("dequantize_int4", _launch, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit::dequantize_int4", _fake, lib=LIBRARY)


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    rows: int
    size: int
    group_size: int
    scale_dtype: torch.dtype = torch.float32
    has_zero_point: bool = False
    dtype: torch.dtype = torch.bfloat16
    row_step: int = 1  # every n-th row of a larger weight
    byte_offset: int = 0  # of the first byte from an aligned address
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """packed, scale, zero_point, group_size, size, dtype."""
        groups = -(-self.size // self.group_size)
        width = (groups * self.group_size + 1) // 2
        rows = self.rows * self.row_step
        packed = torch.randint(
            0, 256, (rows * width + self.byte_offset,), dtype=torch.uint8, device=device
        )
        scale = (torch.rand(rows, groups, device=device) * 0.02 - 0.001).to(self.scale_dtype)
        zero_point = None
        if self.has_zero_point:
            zero_point = torch.randint(-128, 128, (rows, groups), dtype=torch.int8, device=device)
            zero_point = zero_point[:: self.row_step]
        return (
            packed[self.byte_offset :].view(rows, width)[:: self.row_step],
            scale[:: self.row_step],
            zero_point,
            self.group_size,
            self.size,
            self.dtype,
        )


CASES = [
    Case("typical", 64, 256, 128),
    Case("zero-point", 64, 256, 128, has_zero_point=True),
    Case("group-32-bf16-scale", 33, 512, 32, torch.bfloat16, True),
    Case("fp16", 16, 256, 64, torch.float16, dtype=torch.float16),
    Case("fp32", 16, 256, 64, has_zero_point=True, dtype=torch.float32),
    Case("padded", 17, 250, 128, has_zero_point=True),
    Case("padded-by-a-group-less-one", 5, 129, 128),
    Case("several-chunks-of-a-padded-row", 3, 17_000, 128),
    Case("odd-size", 7, 63, 32, has_zero_point=True),
    Case("prime-everything", 31, 101, 7, has_zero_point=True, dtype=torch.float32),
    Case("odd-group", 13, 45, 9),
    Case("group-12", 6, 96, 12, torch.bfloat16),
    Case("group-of-one", 4, 24, 1, has_zero_point=True),
    Case("one-group-a-row", 40, 136, 136),
    Case("one-element", 1, 1, 1),
    Case("one-row", 1, 4096, 128),
    Case("one-column", 300, 1, 1),
    Case("no-rows", 0, 128, 32),
    Case("no-columns", 5, 0, 32),
    Case("strided-rows", 19, 256, 64, has_zero_point=True, row_step=3),
    Case("misaligned", 9, 256, 32, byte_offset=1),
    Case("llama-8b-attention", 4096, 4096, 128, torch.bfloat16, large=True),
    Case("llama-8b-up", 14336, 4096, 128, torch.bfloat16, large=True),
    Case("llama-8b-down", 4096, 14336, 128, torch.bfloat16, large=True),
    Case("llama-70b-up", 28672, 8192, 128, torch.bfloat16, large=True),
    Case("llama-8b-up-zero-point", 14336, 4096, 128, torch.bfloat16, True, large=True),
    Case("llama-8b-up-group-32", 14336, 4096, 32, torch.bfloat16, large=True),
]
