"""How the large-batch kernel unpacks a format: the macros of ``weight_mm_large_batch_sm90.cu`` that follow from codes,
scales and zero points, and the table of ``weight_lookup_sm90.cuh``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
import torch

from lowbit_kernels.weight_only.weight_operands import (
    E4M3,
    GROUP_STEP,
    SCALE_MACROS,
    WeightOperands,
)

BF16 = torch.bfloat16
Rounding = Literal["never", "large", "free", "always"]
MOST_BITS = 4  # of codes that are looked up: a table of pairs has 128 bytes for each of 4**bits
LEAST_GROUP = 16  # of scales that are multiplied into weights: the K of an instruction
STEP = 64  # of K: a box of tokens
ROUNDED_FROM = 129
"""Tokens from which weights of "large" rounding are rounded: a tile of more than 128 has no room for unscaled sums."""
FACTORS = 2048  # tried for a table that bfloat16 does not hold exactly


class Unpacking(NamedTuple):
    """The format of a weight as the kernel sees it.

    Args:
        codes: "INT4", "INT8", "STREAM" (other integers), "E4M3" or "LOOKUP".
        bits: of a code.
        group: elements along K that share a scale; 0: one scale a row, multiplied into the result.
        unsigned: integers and their zero points begin at 0.
        zero: 0 without zero points; 1 on the grid of codes; 2 for float32 values; 3 for values in the dtype of x.
        scale: the name of the scales' dtype.
        rounding: whether scales may be multiplied into the weights, which are rounded then: "never"; for "large"
            batches, where the error is that of a dequantized weight; "free", where results keep their error; "always",
            where the kernel has no other way. The products of MXFP4, NVFP4 and MXFP8 are exact.
        table: the bits of each code's value times `unit`, for "LOOKUP".
    """

    codes: str
    bits: int
    group: int
    unsigned: bool = False
    zero: int = 0
    scale: str = "BF16"
    rounding: Rounding = "never"
    table: tuple[int, ...] = ()
    unit: float = 1.0

    @property
    def scales_pairs(self) -> bool:
        """True if weights that are rounded are multiplied by their scale in pairs, and not by folding it into the
        factor of an integer."""
        return self.codes in ("LOOKUP", "E4M3") or self.zero >= 2

    @property
    def lookup_bytes(self) -> int:
        """Bytes of shared memory that the table of pairs takes."""
        return (256 if self.bits == 4 else 128) << 2 * self.bits if self.table else 0

    def rounds(self, m: int) -> bool:
        """True if scales may be multiplied into the weights for M tokens."""
        least = {"never": math.inf, "large": ROUNDED_FROM, "free": 0, "always": 0}[self.rounding]
        return self.group > 0 and m >= least

    def macros(self) -> dict[str, object]:
        table = ", ".join(map(hex, self.table)) or "0"
        values = {"CODES": self.codes, "BITS": self.bits, "GROUP": self.group}
        values |= {"UNSIGNED": self.unsigned, "ZERO": self.zero, "SCALE": self.scale}
        return values | {"TABLE": table, "UNIT_OF_TABLE": f"{self.unit.hex()}f"}


def unpacking_of(operands: WeightOperands) -> Unpacking | None:
    """How the kernel unpacks these codes; None for formats that are not the kernel's."""
    codes, zero, rounding = _codes(operands), _zero(operands), _rounding(operands)
    scale = SCALE_MACROS.get(operands.scale.dtype)
    if codes is None or zero is None or rounding is None or scale is None:
        return None
    bits, low, group = operands.bits, operands.format.low, operands.group
    if rounding == "always":
        group = group or operands.padded_k
    elif group % GROUP_STEP:
        return None
    own = Unpacking(codes, bits, group, low == 0 and zero == 1, zero, scale, rounding)
    if codes != "LOOKUP":
        return own
    first = 0 if zero == 1 else low - operands.format.mid
    values = operands.format.table or tuple(map(float, range(first, first + 2**bits)))
    table, unit = table_of(values, operands.x.dtype, bool(operands.format.table))
    if scale == "E4M3":  # multiplied as 2**-120 of it
        table, unit = table_of(tuple(v * 2.0**100 for v in values), BF16, True)
        unit *= 2.0**-20
    return own._replace(table=table, unit=unit)


def _codes(operands: WeightOperands) -> str | None:
    format, zeros = operands.format, operands.zero_point
    is_value = format.zero_point == "value"
    if operands.codes.dtype == E4M3:
        return "E4M3" if operands.k == operands.padded_k else None
    if format.exponent or format.bits > MOST_BITS:
        is_plain = format.is_integer and not (is_value or format.scale_bytes)
        name = "INT8" if format.bits == 8 else "STREAM"
        return name if is_plain and (format.low or zeros is not None) else None
    if is_value and format.bits < 4 and not format.scale_bytes:
        return "STREAM"
    if format.table or is_value or format.scale_bytes:
        return "LOOKUP"
    if format.bits == 4:
        return "INT4"
    is_folded = operands.scale.dtype == operands.x.dtype and operands.group % (2 * STEP) == 0
    return "STREAM" if is_folded else "LOOKUP"


def _zero(operands: WeightOperands) -> int | None:
    kind, zeros = operands.format.zero_point, operands.zero_point
    if kind != "value":
        return ("none", "code").index(kind)
    return {torch.float32: 2, operands.x.dtype: 3}.get(zeros.dtype) if zeros else None


def _rounding(operands: WeightOperands) -> Rounding | None:
    """See `Unpacking`; None where scales must be multiplied into the weights but can't be."""
    format, group = operands.format, operands.group or operands.padded_k
    needs_it = format.scale_bytes or format.zero_point == "value"
    fits = (
        operands.x.dtype == BF16
        and (format.bits <= MOST_BITS or format.exponent > 0)
        and operands.k == operands.padded_k
        and operands.k % (STEP if format.bits % 2 == 0 else 2 * STEP) == 0
        and (group % (2 * STEP) == 0 or group in (LEAST_GROUP, GROUP_STEP, STEP))
    )
    if needs_it:
        return "always" if fits else None
    is_own = operands.scale.dtype == operands.x.dtype == BF16
    is_looked_up = bool(format.table) or format.bits < MOST_BITS
    if is_looked_up and is_own and fits and _have_two_bits(operands):
        return "free"
    return "large" if (fits if is_looked_up or format.exponent else is_own) else "never"


def _have_two_bits(operands: WeightOperands) -> bool:
    """True if the numbers have at most two significant bits: 3 or 1 times a power of 2. Their products with bfloat16
    scales, rounded, keep the bound of 2e-3: those with 1 are exact."""
    format, most = operands.format, 2**operands.bits
    numbers: Iterable[float] = format.table
    if format.is_integer:
        is_signed = format.zero_point == "code"  # a code minus its zero point
        numbers = range(1 - most, most) if is_signed else range(format.low, format.low + most)
    return all(abs(math.frexp(number)[0]) in (0.0, 0.5, 0.75) for number in numbers)


# ---- tables ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def table_of(
    values: tuple[float, ...], dtype: torch.dtype, may_scale: bool
) -> tuple[tuple[int, ...], float]:
    """The values times a factor as bits of `dtype`, and the factor.

    Args:
        values: of a table, float32.
        dtype: bfloat16 or float16.
        may_scale: False for integers, which zero points are subtracted from.

    Rounding the values of NF4 to bfloat16 would cost as much as rounding the result. A common factor in 1 .. 2, by
    which the kernel divides the result, brings them closer to numbers of bfloat16.
    """
    exact = np.array(values, np.float64)
    largest = np.abs(exact).max()
    best, least, unit = exact, math.inf, 1.0
    if may_scale and 0 < largest < math.inf:
        power = 2.0 ** -math.floor(math.log2(largest)) if dtype == torch.float16 else 1.0
        for i in range(FACTORS):
            scaled = exact * (power * (1 + i / FACTORS))
            error = float(((_rounded(scaled, dtype) - scaled) ** 2).sum() / (scaled**2).sum())
            if error < least:
                best, least, unit = scaled, error, power * (1 + i / FACTORS)
            if least == 0.0:
                break
    bits = torch.tensor(best, dtype=torch.float64).to(dtype).view(torch.int16)
    return tuple(int(b) & 0xFFFF for b in bits), unit


def _rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).double().numpy()
