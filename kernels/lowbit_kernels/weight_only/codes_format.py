"""The formats of a weight's codes and scales that kernels for CPUs and GPUs share, and their values by PyTorch.

    x[n, k] = (number(code[n, k]) - zero_point) * scale
    x[n, k] = (number(code[n, k]) - mid) * scale + zero_point       if zero points are values

    codes       uint8 [N, ceil(Kp * bits / 8)]: a little-endian bit stream of codes of 1 to 8 bits, each minus the
                smallest code; at 4 bits even k lie in the low half of a byte. Or int8 or float8 [N, Kp]
    table       the number of each code; empty for integers, whose codes begin at -2^(bits - 1) or, if their zero points
                are uint8, at 0
    scale       float32, bfloat16 or float16; uint8 for e8m0: 2^(scale - 127), and 255 is NaN; or float8_e4m3fn, divided
                by `global_scale`, float32 of one element
    zero_point  int8 or uint8, on the grid of the codes; a floating dtype: the value of the code `mid`, which is 0 or,
                where codes begin at 0, 2^(bits - 1); or None for 0

Ops take these tensors, and besides

    group_size  elements of a row that share a scale: any positive number. Kp is K padded to a multiple of it
    bits        of a code in a bit stream, 1 to 8; 0: 4 for uint8 codes, 8 for other dtypes
    table       as above, of 2^bits numbers
    size        K, the elements of a row without the padding
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT8_EXPONENTS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of the codes of MXFP4 and NVFP4."""


@dataclass(frozen=True)
class CodesFormat:
    """The format of codes that a kernel is compiled for.

    Args:
        bits: bits of a code, 1 to 8.
        low: the smallest integer code: 0, or negative for signed codes.
        exponent: bits of a float8's exponent, 4 (e4m3) or 5 (e5m2); 0 for integers.
        zero_point: "none", "code" or "value".
        mid: for zero points of kind "value", the code whose value a zero point gives.
        table: the float32 value of each code, for codes of a lookup table; empty for numbers.
        scale_bytes: scales are bytes, each of which has a float32 value (`codes_cpu.Parts.of_byte`), and not floats.
    """

    bits: int
    low: int = 0
    exponent: int = 0
    zero_point: str = "none"
    mid: int = 0
    table: tuple[float, ...] = ()
    scale_bytes: bool = False

    @property
    def is_integer(self) -> bool:
        return not self.table and self.exponent == 0

    @property
    def is_int4_or_int8(self) -> bool:
        """True for signed integers of 4 or 8 bits with floating scales, and zero points on their grid or none."""
        return (
            self.is_integer
            and (self.bits, self.low) in ((4, -8), (8, -128))
            and self.zero_point != "value"
            and not self.scale_bytes
        )


@functools.lru_cache(maxsize=4096)
def format_of(
    codes: torch.dtype,
    scale: torch.dtype,
    zero_point: torch.dtype | None = None,
    bits: int = 0,
    table: tuple[float, ...] = (),
) -> CodesFormat:
    """The format of tensors of these dtypes.

    Args:
        codes, scale, zero_point: dtypes; None: there are no zero points.
        bits, table: as the ops take them.
    """
    bits, scale_bytes = bits_of(codes, bits), scale.itemsize == 1
    if table:
        return CodesFormat(bits, table=table, scale_bytes=scale_bytes)
    if codes in FLOAT8_EXPONENTS:
        return CodesFormat(8, exponent=FLOAT8_EXPONENTS[codes], scale_bytes=scale_bytes)
    is_unsigned = zero_point is torch.uint8 or (codes is torch.uint8 and bits == 8)
    low, middle = (0, 2 ** (bits - 1)) if is_unsigned else (-(2 ** (bits - 1)), 0)
    kind = "none" if zero_point is None else "code" if zero_point.itemsize == 1 else "value"
    mid = middle if kind == "value" else 0
    return CodesFormat(bits, low, zero_point=kind, mid=mid, scale_bytes=scale_bytes)


def bits_of(codes: torch.dtype, bits: int = 0) -> int:
    """Bits of a code: `bits`, or where this is 0, 4 for uint8 and 8 for other dtypes."""
    return bits or (4 if codes == torch.uint8 else 8)


# ---- values --------------------------------------------------------------------------------------------------------


def dequantized(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    """The formula above: [N, size]. In float32 it is rounded once, also with zero points that are values.

    Args:
        codes, scale, zero_point, global_scale: as the ops take them, for a weight [N, size].
        group_size: codes that share a scale.
        size: codes of a row.
        dtype: torch.float32 or torch.float64.
        bits, table: as the ops take them.
    """
    numbers = numbers_of(codes, size, bits_of(codes.dtype, bits), table)
    group = torch.arange(size, device=codes.device) // group_size
    scales = float_scale(scale, global_scale)[:, group]
    if zero_point is not None and zero_point.is_floating_point():
        exact = numbers.double() * scales.double() + zero_point.double()[:, group]
        return exact.to(dtype)
    x = numbers.to(dtype)
    if zero_point is not None:
        zeros = zero_point.to(dtype)[:, group]
        if zero_point.dtype == torch.uint8:
            zeros = zeros - 2 ** (bits_of(codes.dtype, bits) - 1)
        x = x - zeros
    return x * scales.to(dtype)


def numbers_of(codes: Tensor, size: int, bits: int, table: Sequence[float] = ()) -> Tensor:
    """The numbers of the first `size` codes of each row, those of integers counted from the middle: float32."""
    if codes.dtype != torch.uint8:
        return codes[:, :size].to(torch.float32)
    stored = unpacked(codes, size, bits)
    if table:
        return torch.tensor([*table], dtype=torch.float32, device=codes.device)[stored]
    return stored.to(torch.float32) - 2 ** (bits - 1)


def unpacked(codes: Tensor, size: int, bits: int) -> Tensor:
    """The first `size` codes of each row of a bit stream, as it stores them: int32 [N, size]."""
    if bits == 8:
        return codes[:, :size].to(torch.int32)
    if bits == 4:
        return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)[:, :size].to(torch.int32)
    first = torch.arange(size, device=codes.device) * bits
    byte, wide = first // 8, codes.to(torch.int32)
    after = (byte + 1).clamp(max=codes.shape[1] - 1)  # read, but not used, past the end
    return (wide[:, byte] | wide[:, after] << 8) >> (first % 8) & (2**bits - 1)


def float_scale(scale: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """The scales in float32."""
    if scale.dtype == torch.uint8:
        bits = scale.to(torch.int32) << 23
        bits = torch.where(scale == 0, 0x400000, bits)  # 2^-127 is a subnormal number
        return torch.where(scale == 255, 0x7FC00000, bits).view(torch.float32)
    scale = scale.to(torch.float32)
    return scale if global_scale is None else scale / global_scale.reshape(())
