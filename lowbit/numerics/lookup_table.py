"""Lookup tables: number formats of 1 to 8 bits whose codes are indices into a list of values.

    code = index of the nearest value        value = values[code]

`NF4` and `E2M1` (FP4) are such tables. `lowbit.numerics.affine` treats a table as it treats float8: a code is the value
itself until a tensor stores it, so x̂ = value · scale, and rounding to the nearest value is the cast.

Three operators look values up, so that torch.compile, fake tensors and tensor subclasses do not see the cached tables.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit.numerics.codebook import (
    boundaries,
    codes_like,
    pairs,
    ranks,
    share_a_cell,
    steps,
    values_like,
)
from lowbit.numerics.opaque import opaque
from lowbit.numerics.packing import unpack

_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_traced = torch._C._is_tracing


@dataclass(frozen=True, repr=False)
class LookupTable:
    """A number format: the value of each code, in the order of codes.

    Args:
        values: 2, 4, 8, … or 256 different finite numbers, each rounded to float32. Some are above zero, and some are
            not. 0.0 and -0.0 are different.
        ties_to_even: which code a value in the middle of two takes. False: that of the smaller value. True: the one
            whose lowest bit is 0, as IEEE 754 rounds floating-point numbers.

    Raises:
        ValueError: other values.
    """

    values: tuple[float, ...]
    ties_to_even: bool = False

    def __post_init__(self) -> None:
        try:
            values = tuple(float(np.float32(v)) for v in self.values)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the values of a table are numbers, got {self.values!r}") from error
        object.__setattr__(self, "values", values)
        count = len(values)
        if count not in (2**bits for bits in range(1, 9)):
            raise ValueError(f"a table has 2, 4, 8, … or 256 values, got {count}")
        if not all(map(math.isfinite, values)) or len(set(map(_key, values))) < count:
            raise ValueError(
                f"the values of a table are finite and differ in float32, got {values}"
            )
        if not (max(values) > 0 >= min(values)):
            raise ValueError(f"a table has values above zero and others, got {values}")
        if not isinstance(self.ties_to_even, bool):
            raise ValueError(f"ties_to_even must be True or False, got {self.ties_to_even!r}")

    @property
    def bits(self) -> int:
        return len(self.values).bit_length() - 1

    @property
    def dtype(self) -> Any:
        """The type of a code, as `lowbit.numerics.affine` takes it: the table itself, which is not a torch.dtype."""
        return self

    @property
    def quant_min(self) -> float:
        return min(self.values)

    @property
    def quant_max(self) -> float:
        return max(self.values)

    @property
    def largest(self) -> float:
        """The largest magnitude. The scale of a block is max|x| / largest."""
        return max(self.quant_max, -self.quant_min)

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest value of each element, float32. Values beyond the ends take the last one; NaN takes any."""
        return torch.ops.lowbit.table_nearest(x, self.values, self.ties_to_even)

    def reaches(self, x: Tensor) -> Tensor:
        """Where x lies within the table, or beyond an end of it by at most half the last step."""
        ordered = sorted(set(self.values))
        first_step, last_step = ordered[1] - ordered[0], ordered[-1] - ordered[-2]
        return (x >= ordered[0] - first_step / 2) & (x <= ordered[-1] + last_step / 2)

    def codes(self, values: Tensor) -> Tensor:
        """uint8 codes of float32 values of this table."""
        return torch.ops.lowbit.table_codes(values, self.values)

    def look_up(self, packed: Tensor, size: int) -> Tensor:
        """float32 values [..., size] of codes that `lowbit.numerics.packing.pack` packed."""
        if type(packed) is Tensor and not (_is_compiling() or _dispatch_modes() or _is_traced()):
            return _values(packed, self.values, size)  # the op would read its list of values
        return torch.ops.lowbit.table_values(packed, self.values, size)

    @property
    def name(self) -> str:
        """Such as "nf4", for reports and descriptions."""
        known = next((name for name, table in TABLES.items() if table == self), None)
        return known or f"table{len(self.values)}"

    def __repr__(self) -> str:
        if self.name in TABLES:
            return self.name.upper()
        ties = ", ties_to_even=True" if self.ties_to_even else ""
        low, high = min(self.values), max(self.values)
        return f"LookupTable({len(self.values)} values, {low:g} to {high:g}{ties})"


def _key(value: float) -> tuple[float, float]:
    """Orders values, -0.0 before 0.0."""
    return value, math.copysign(1.0, value)


NF4 = LookupTable(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)
"""4-bit NormalFloat: quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, arXiv 2305.14314, appendix E)."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = LookupTable((*_MAGNITUDES, *(-v for v in _MAGNITUDES)), ties_to_even=True)
"""FP4: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats v1.0, section 5.3.3)."""


def _dynamic_values() -> tuple[float, ...]:
    """float32 values of seven decades. A decade holds the middles of equal parts, twice as many as the one below."""
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        step = float((np.float32(1) - np.float32(0.1)) / np.float32(count))
        i = np.arange(count + 1)
        up, down = float(np.float32(0.1)) + step * i, 1.0 - step * (count - i)
        ends = np.where(i < (count + 1) // 2, up, down).astype(np.float32)
        middles = (ends[:-1] + ends[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        found += [*map(float, middles), *(-float(m) for m in middles)]
    return tuple(sorted(found))


DYNAMIC8 = LookupTable(_dynamic_values())
"""Signed 8-bit dynamic map (arXiv 2110.02861), in which bitsandbytes stores the scales of NF4. Up to an ulp these are
the values of `lowbit.numerics.codebook`, which optimizer states use; here they are rounded as bitsandbytes rounds
them."""

TABLES = {"nf4": NF4, "e2m1": E2M1, "dynamic8": DYNAMIC8}


# ---- the operators ----------------------------------------------------------------------------------------------


class _LookupTables(NamedTuple):
    ascending: Tensor  # float32 [2**bits], -0.0 before 0.0
    last: Tensor  # float32 [2**bits - 1]: the largest x that takes each value but the last
    step: Tensor | None  # `last` for `lowbit.numerics.codebook.ranks`; None where `share_a_cell`
    codes: Tensor  # uint8 [2**bits], of the ascending values
    values: Tensor  # float32 [2**bits], in the order of codes
    pairs: Tensor | None  # int64 [256], for 4 bits


@functools.cache
def _on_device(
    values: tuple[float, ...], ties_to_even: bool, device: torch.device
) -> _LookupTables:
    if device.type != "cpu":
        on_cpu = _on_device(values, ties_to_even, torch.device("cpu"))
        return _LookupTables(*(None if t is None else t.to(device) for t in on_cpu))  # type: ignore[arg-type]
    order = sorted(range(len(values)), key=lambda code: _key(values[code]))
    ascending = np.array([values[code] for code in order], dtype=np.float32)
    midpoints, last = boundaries(ascending)
    if ties_to_even:
        upper = np.array([code % 2 == 0 for code in order[1:]])  # a tie takes the upper value
        up = upper & (last.astype(np.float64) == midpoints)
        last = np.where(up, np.nextafter(last, np.float32(-np.inf)), last)
    own = np.array(values, dtype=np.float32)
    return _LookupTables(
        torch.from_numpy(ascending),
        torch.from_numpy(last),
        None if share_a_cell(last) else torch.from_numpy(steps(last)),
        torch.tensor(order, dtype=torch.uint8, device="cpu"),  # a default device may be set
        torch.from_numpy(own),
        pairs(own) if len(values) == 16 else None,
    )


def _ranks(x: Tensor, tables: _LookupTables) -> Tensor:
    """int32 [x.numel()]: the index of the nearest among the ascending values."""
    x = x.float().contiguous()
    if tables.step is not None:
        return ranks(x, tables.step).view(-1)
    return torch.bucketize(x, tables.last, out_int32=True).view(-1)


def _negative_zero(values: Sequence[float]) -> int | None:
    """The rank of -0.0, which comparisons do not tell from the 0.0 after it."""
    ordered = sorted(values, key=_key)
    at = ordered.index(0.0) if 0.0 in ordered else 0
    return at if ordered[at] == 0 and math.copysign(1.0, ordered[at]) < 0 else None


def _nearest(x: Tensor, values: list[float], ties_to_even: bool) -> Tensor:
    if ties_to_even and tuple(values) == E2M1.values:
        return _nearest_e2m1(x.float())
    tables = _on_device(tuple(values), ties_to_even, x.device)
    found = tables.ascending.index_select(0, _ranks(x, tables)).view(x.shape)
    if _negative_zero(values) is not None:
        found = torch.where(found == 0, found.copysign(x), found)
    return found


def _nearest_e2m1(x: Tensor) -> Tensor:
    """`E2M1.nearest` without a table: beside 1.5 · 2^22 times a power of two, float32 holds multiples of half of it."""
    found = x.abs().clamp_(max=6)
    power = found.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    power = power.clamp_(min=1).mul_(1.5 * 2**22)
    return found.add_(power).sub_(power).copysign_(x)


def _codes(x: Tensor, values: list[float]) -> Tensor:
    tables = _on_device(tuple(values), False, x.device)
    codes = tables.codes.index_select(0, _ranks(x, tables)).view(x.shape)
    if (at := _negative_zero(values)) is not None:
        own = torch.where(x.signbit(), tables.codes[at], tables.codes[at + 1])
        codes = torch.where(x == 0, own, codes)
    return codes


def _values(packed: Tensor, values: Sequence[float], size: int) -> Tensor:
    tables = _on_device(tuple(values), False, packed.device)
    if tables.pairs is not None:
        both = tables.pairs.index_select(0, packed.reshape(-1).to(torch.int32))
        found = both.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])
        return found if found.shape[-1] == size else found[..., :size].contiguous()
    codes = unpack(packed, len(values).bit_length() - 1, size)
    return tables.values.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _values_fake(packed: Tensor, values: list[float], size: int) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], size), dtype=torch.float32)


opaque("table_nearest(Tensor x, float[] values, bool ties_to_even) -> Tensor", values_like)(
    _nearest
)
opaque("table_codes(Tensor x, float[] values) -> Tensor", codes_like)(_codes)
opaque("table_values(Tensor packed, float[] values, SymInt size) -> Tensor", _values_fake)(_values)
