"""The grid of codes that fake quantization rounds to."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

FORMATS = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float32,
}
"""The dtype of codes by their format. Codes of e2m1 are its values, as those of float8."""
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
"""The highest code of floating-point formats."""
HALF_STEPS = {"e4m3": 16.0, "e5m2": 4096.0, "e2m1": 1.0}
"""Half of the last step of floating-point formats: numbers within it of an end round to that end."""


MAPPINGS = (
    *("symmetric", "symmetric_no_clipping_err", "asymmetric"),
    *("float_zero_point", "half_integer"),
)


NO_ZERO, CODE, VALUE = range(3)
"""Kinds of zero points."""
FLOAT, E8M0, E4M3 = SCALES = ("float", "e8m0", "e4m3")
"""How scales are chosen: as they are, as powers of two, as numbers of e4m3 over a global scale."""


class Grid(NamedTuple):
    """The numbers that values are rounded to.

    Attributes:
        mapping: how scales and zero points are chosen, and what zero points mean.
        format: "int8" or "uint8" for codes of 1 to 8 bits, "e4m3", "e5m2", "e2m1".
        low, high: the range of the codes.
        scales: one of `SCALES`, for scales that are computed.
    """

    mapping: str
    format: str
    low: float
    high: float
    scales: str = FLOAT

    @property
    def name(self) -> str:
        """The grid as one argument, since each argument of an op costs the host time: "symmetric int8 -8 7", and
        with `scales` other than "float" "symmetric e2m1 -6 6 e8m0"."""
        stored = "" if self.scales == FLOAT else f" {self.scales}"
        return f"{self.mapping} {self.format} {self.low:.17g} {self.high:.17g}{stored}"

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def named(cls, name: str) -> Grid:
        """The grid with this name. Raises ValueError for another text."""
        try:
            mapping, format, low, high, *stored = name.split(" ")
            (scales,) = stored or (FLOAT,)
            return cls(mapping, format, float(low), float(high), scales)
        except ValueError:
            raise ValueError(
                'a grid is named by mapping, format, lowest and highest code, as "symmetric int8 -8 7", and by its '
                f'scales, as "symmetric e2m1 -6 6 e8m0"; got {name!r}'
            ) from None

    @property
    def float_bits(self) -> int:
        """The bits of a floating-point format; 0 for integers."""
        return {"e4m3": 8, "e5m2": 8, "e2m1": 4}.get(self.format, 0)

    @property
    def mid(self) -> float:
        return 0.0 if self.float_bits else (self.low + self.high + 1) // 2

    @property
    def zero(self) -> int:
        """The kind of its zero points."""
        if self.mapping in ("float_zero_point", "half_integer"):
            return VALUE
        return CODE if self.mapping == "asymmetric" or self.format == "uint8" else NO_ZERO

    @property
    def code_of_z(self) -> float:
        """The code, also between two, whose value is z."""
        if self.float_bits or self.mapping == "asymmetric":
            return 0.0
        return self.mid - 0.5 if self.mapping == "half_integer" else self.mid

    @property
    def finds_magnitudes(self) -> bool:
        """True if computed scales depend on the largest magnitude of a block alone."""
        return self.mapping in ("symmetric", "half_integer") or self.scales != FLOAT

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest code inside. See `HALF_STEPS`."""
        half = HALF_STEPS.get(self.format, 0.0)
        return self.low - half, self.high + half

    def check_codes(self, code_dtype: torch.dtype, clips: bool) -> None:
        if self.float_bits:
            raise ValueError(f'fake_quantize_codes takes "int8" or "uint8", got {self.format!r}')
        if code_dtype not in (torch.int8, torch.uint8, torch.int16):
            raise TypeError(f"codes are int8, uint8 or int16, got {code_dtype}")
        limits = torch.iinfo(code_dtype)
        if self.low - clips < limits.min or self.high + clips > limits.max:
            raise ValueError(
                f"codes of {self.low:g} to {self.high:g}{', and one step beyond,' if clips else ''} do not fit into "
                f"{code_dtype}; take torch.int16"
            )

    def check_learned(self, scale: Tensor, zero: Tensor | None, group_size: int) -> None:
        self.check(None, None, group_size)
        if self.float_bits:
            raise ValueError(f"fake_quantize_descent takes a grid of integers, got {self.format!r}")
        if (self.mapping in ("asymmetric", "float_zero_point")) != (zero is not None):
            takes = "no zero" if zero is not None else "zero beside its scale"
            raise ValueError(f"{self.mapping} {self.format} takes {takes}")

    def check(self, scale: Tensor | None, zero_point: Tensor | None, group_size: int) -> None:
        if self.mapping not in MAPPINGS:
            raise ValueError(f"mapping must be one of {', '.join(MAPPINGS)}, got {self.mapping!r}")
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.scales not in SCALES:
            raise ValueError(f"scales must be one of {', '.join(SCALES)}, got {self.scales!r}")
        if self.float_bits:
            largest = LARGEST[self.format]
            if (self.low, self.high) != (-largest, largest):
                raise ValueError(
                    f"codes of {self.format} are {-largest:g} to {largest:g}, got {self.low:g} to {self.high:g}"
                )
            accepted = MAPPINGS[: 2 if self.scales == E8M0 else 1]
            if self.mapping not in accepted:
                raise ValueError(
                    f"{self.format} with {self.scales} scales takes the mapping {' or '.join(accepted)}, got "
                    f"{self.mapping!r}"
                )
        elif self.scales != FLOAT:
            raise ValueError(f"{self.format} takes float scales, got {self.scales!r}")
        if group_size < 1:
            raise ValueError(f"group_size must be 1 or more elements, got {group_size}")
        if scale is not None and (self.zero == NO_ZERO) != (zero_point is None):
            takes = "no zero_point" if self.zero == NO_ZERO else "a zero_point beside its scale"
            raise ValueError(f"{self.mapping} {self.format} takes {takes}")

    def check_global_scale(
        self, scale: Tensor | None, global_scale: Tensor | None, rows: int
    ) -> None:
        takes = self.scales == E4M3 and scale is None
        if takes != (global_scale is not None):
            what = "need a global_scale" if takes else "take no global_scale"
            kind = f"{self.scales} scales that are {'computed' if scale is None else 'given'}"
            raise ValueError(f"{kind} {what}; those of e4m3 that are computed take one")
        count = 0 if global_scale is None else len(global_scale)
        if global_scale is not None and (rows % count if count else rows):
            raise ValueError(
                f"global_scale has a number for each R / M rows, got {count} for {rows} rows"
            )
