"""The grid of codes that fake quantization rounds to."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

FORMATS = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


MAPPINGS = (
    *("symmetric", "symmetric_no_clipping_err", "asymmetric"),
    *("float_zero_point", "half_integer"),
)


NO_ZERO, CODE, VALUE = range(3)
"""Kinds of zero points."""


class Grid(NamedTuple):
    """The numbers that values are rounded to.

    Attributes:
        mapping: how scales and zero points are chosen, and what zero points mean.
        format: "int8" or "uint8" for codes of 1 to 8 bits, "e4m3", "e5m2".
        low, high: the range of the codes.
    """

    mapping: str
    format: str
    low: float
    high: float

    @property
    def name(self) -> str:
        """The grid as one argument, since each argument of an op costs the host time: "symmetric int8 -8 7"."""
        return f"{self.mapping} {self.format} {self.low:.17g} {self.high:.17g}"

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def named(cls, name: str) -> Grid:
        """The grid with this name. Raises ValueError for another text."""
        try:
            mapping, format, low, high = name.split(" ")
            return cls(mapping, format, float(low), float(high))
        except ValueError:
            raise ValueError(
                f'a grid is named by mapping, format, lowest and highest code, as "symmetric int8 -8 7"; got {name!r}'
            ) from None

    @property
    def is_float8(self) -> bool:
        return self.format in ("e4m3", "e5m2")

    @property
    def mid(self) -> float:
        return 0.0 if self.is_float8 else (self.low + self.high + 1) // 2

    @property
    def zero(self) -> int:
        """The kind of its zero points."""
        if self.mapping in ("float_zero_point", "half_integer"):
            return VALUE
        return CODE if self.mapping == "asymmetric" or self.format == "uint8" else NO_ZERO

    @property
    def code_of_z(self) -> float:
        """The code, also between two, whose value is z."""
        if self.is_float8 or self.mapping == "asymmetric":
            return 0.0
        return self.mid - 0.5 if self.mapping == "half_integer" else self.mid

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest code inside. Numbers within half a step of an end of float8 round to that end."""
        half = {"e4m3": 16.0, "e5m2": 4096.0}.get(self.format, 0.0)
        return self.low - half, self.high + half
