"""Int4WeightTensor: a weight that is stored in 4 bits alone, also during training.

| tensor | shape             | dtype                                                                             |
|--------|-------------------|-----------------------------------------------------------------------------------|
| codes  | [..., N, K/2]     | uint8: two codes + 8 a byte, the even one in the low half; codes are -7 .. 7       |
| scale  | [..., N, K/group] | float32, absmax / 7 of the group; 1 for a group of zeros, NaN for one with a NaN   |
| place  | [..., N, 1]       | int64, random-number offset of the row                                            |

K is padded to whole groups with zeros. Everything else is as in `lowbit.tensor.trained.int8_weight`: updates round
stochastically, by random numbers that depend on neither the sharding nor a restart. Products dequantize the weight, or
run int8 x int8, as the scheme `Int4Weight` says. These read its values rounded to int8 with a scale a row, in both
directions; a part of a row has a scale of its own. Shards hold whole rows, or whole groups of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.low_bit_linear import Codes, transposed
from lowbit.numerics.blocks import crop
from lowbit.numerics.packing import unpack
from lowbit.numerics.spec import Spec
from lowbit.schemes.low_bit_weights import Int4Weight
from lowbit.schemes.presets import Int4WeightOnly
from lowbit.tensor.core import InnerShapes, stored_shape
from lowbit.tensor.trained.int8_weight import Int8WeightTensor

MOST = 7
"""The largest code. -8 would have no counterpart, so it is not used."""
_LEAST = -8
"""The code that is stored as 0, as in `AffineTensor`."""


class Int4WeightTensor(Int8WeightTensor):
    """A trainable weight in 4 bits; see the module. `Int4WeightTensor(weight, Int4Weight(), name)` makes one."""

    already = "trained in int4 already; lowbit.train.restore_(model) makes it a plain weight again"
    schemes = (Int4Weight,)
    code_bits = 4
    returns_errors = True

    scheme: Int4Weight  # type: ignore[assignment]

    @classmethod
    def _nearest(cls, weight: Tensor, scheme: Any) -> dict[str, Tensor]:
        codes, scale = _round(weight, scheme.group_size)
        return {"codes": codes, "scale": scale}

    @property
    def spec(self) -> Spec:
        """The spec of an AffineTensor with the same codes and scales."""
        return Int4WeightOnly(self.scheme.group_size, "symmetric").weight

    def stored_format(self) -> str:
        return "int4 weight"

    # ---- values ----------------------------------------------------------------------------------------------

    def unpacked(self) -> Tensor:
        columns = self.scale.shape[-1] * self.scheme.group_size
        return self._cropped(unpack(self.codes, 4, columns).to(torch.int8) + _LEAST)

    def spread_scale(self) -> Tensor:
        return self._cropped(self.scale.repeat_interleave(self.scheme.group_size, -1))

    def _cropped(self, padded: Tensor) -> Tensor:
        columns = (self.flat_from or stored_shape(self, self.shape))[-1]
        return crop(padded, (*padded.shape[:-1], columns))

    def _group(self) -> int:
        return self.scheme.group_size

    def _rounded(self, values: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        start = 0 if self.columns is None else self.columns.start
        return _round(values, self.scheme.group_size, self.scale, offsets, start)

    # ---- products --------------------------------------------------------------------------------------------

    def row_codes(self, after: Tensor | None = None) -> Codes:
        """The values of the weight [..., N, K] rounded to int8: codes [..., N, K16] and scale [..., N]. Each product
        makes them anew, so that none waits for the backward pass. `after`: as for `int4_to_int8`."""
        codes, scale = kernels.int4_to_int8.int4_to_int8(
            self.codes.flatten(0, -2),
            self.scale.flatten(0, -2),
            group_size=self.scheme.group_size,
            size=self.shape[-1],
            after=after,
        )
        return codes.view(*self.shape[:-1], codes.shape[1]), scale.view(self.shape[:-1])

    product_operand = expert_codes = row_codes

    def transposed_codes(self, after: Tensor | None = None) -> Codes:
        """The weight [N, K] as the product for the input's gradient reads it: the same codes [K, N16] and scale [N]."""
        codes, scale = self.row_codes(after)
        return transposed(codes, self.shape[-1], after), scale

    def expert_codes_t(self, scale: Tensor | None = None, after: Tensor | None = None) -> Codes:
        codes, scale = self.row_codes(after)
        return kernels.transpose_codes.transpose_codes(codes, self.shape[-1], after), scale

    # ---- LowbitTensor's methods ------------------------------------------------------------------------------

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        shape = stored_shape(self, shape)
        group = self.scheme.group_size
        groups = -(-shape[-1] // group)
        found: InnerShapes = {
            "codes": ((*shape[:-1], groups * group // 2), torch.uint8),
            "scale": ((*shape[:-1], groups), torch.float32),
        }
        if self.place is not None:
            found["place"] = ((*shape[:-1], 1), torch.int64)
        return found

    def _slice(self, dim: int, start: int, end: int) -> Self:
        size, group = self.shape[dim], self.scheme.group_size
        if self.transposed or dim < self.ndim - 1 or (start, end) == (0, size):
            return super()._slice(dim, start, end) if (start, end) != (0, size) else self._with()
        if any(edge % group and edge != size for edge in (start, end)):
            raise self._no_view(
                f"slicing dimension {dim} of {size} at {start}:{end} (accepted: multiples of its groups of {group})"
            )
        first, groups = start // group, -(-end // group) - start // group
        parts = {
            **self.inner_tensors(),
            "codes": self.codes.narrow(dim, first * group // 2, groups * group // 2),
            "scale": self.scale.narrow(dim, first, groups),
        }
        shape = (*self.shape[:dim], end - start)
        return self._with(parts, shape, columns=self._columns_from(start, shape))

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        if self.transposed or dim < self.ndim - 1:
            return super()._cat(tensors, dim)
        group = self.scheme.group_size
        if any(t.shape[dim] % group for t in tensors[:-1]):
            raise self._unsupported(
                f"cat along dimension {dim} of parts that are not whole groups of {group}"
            )
        joined = {
            name: torch.cat([getattr(t, name) for t in tensors], dim) for name in ("codes", "scale")
        }
        shape = (*self.shape[:dim], sum(t.shape[dim] for t in tensors))
        parts = {**self.inner_tensors(), **joined}
        return self._with(parts, shape, columns=self._columns_of(shape))


def _round(
    values: Tensor,
    group: int,
    old: Tensor | None = None,
    offsets: Tensor | None = None,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """`codes` and `scale` of the module for values [..., N, K], rounded stochastically with the random-number offsets
    of their rows, else to nearest.

    Args:
        old: the scales so far.
        start: the first of these columns in the whole weight.
    """
    lead, padding = values.shape[:-1], -values.shape[-1] % group
    rows = values.float()
    if padding:  # F.pad by 0 would copy
        rows = F.pad(rows, (0, padding))
    groups = rows.shape[-1] // group
    first = None
    if offsets is not None:
        starts = torch.arange(groups, device=values.device) * group
        first = (offsets.reshape(-1, 1) + starts).reshape(-1)
    codes, scale = kernels.round_rows.round_rows(
        rows.reshape(lead.numel() * groups, group),
        old=None if old is None else old.reshape(-1),
        first=first,
        start=start,
        most=MOST,
        packed=True,
    )
    return codes.view(*lead, groups * group // 2), scale.view(*lead, groups)
