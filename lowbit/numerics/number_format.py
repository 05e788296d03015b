"""Number formats of codes: integers, 8-bit floats, tables of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowbit.numerics.code_range import FLOAT8_DTYPES
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.settings import check_flag, is_whole


@dataclass(frozen=True)
class Int:
    """An integer.

    Args:
        bits: b, 1 to 8.
        signed: codes are −2^(b−1) … 2^(b−1)−1. Otherwise they are 0 … 2^b−1.
    """

    bits: int
    signed: bool = True

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or not 1 <= self.bits <= 8:
            raise ValueError(f"an integer format has 1 to 8 bits, got {self.bits!r}")
        object.__setattr__(self, "bits", int(self.bits))
        check_flag("signed", self.signed)

    @property
    def quant_min(self) -> int:
        return -(2 ** (self.bits - 1)) if self.signed else 0

    @property
    def quant_max(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an unpacked code."""
        return torch.int8 if self.signed else torch.uint8


@dataclass(frozen=True)
class Float8:
    """float8.

    Args:
        dtype: `torch.float8_e4m3fn` (largest value 448) or `torch.float8_e5m2` (57,344).
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.dtype not in FLOAT8_DTYPES:
            raise ValueError(
                f"Float8 takes torch.float8_e4m3fn or torch.float8_e5m2, got {self.dtype!r}"
            )

    @property
    def bits(self) -> int:
        return 8

    @property
    def quant_min(self) -> float:
        return torch.finfo(self.dtype).min

    @property
    def quant_max(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def largest(self) -> float:
        """The largest magnitude, as that of a `LookupTable`."""
        return self.quant_max


NumberFormat = Int | Float8 | LookupTable
