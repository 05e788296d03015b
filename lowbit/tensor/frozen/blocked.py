"""BlockedTensor: slices, views and concatenations of a weight whose elements share scales in blocks.

A part keeps its codes and the scales of its own blocks, so it must consist of whole blocks, at whole bytes. Nothing is
unpacked. Where one block spans a dimension, all parts along it share the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lowbit.numerics.packing import packed_size
from lowbit.numerics.spec import Spec
from lowbit.tensor.core import LowbitTensor


class BlockedTensor(LowbitTensor):
    """The part of an AffineTensor that divides it; its module describes the inner tensors."""

    codes: Tensor
    zero_point: Tensor | None
    spec: Spec
    inputs_are: ClassVar[str] = ""
    """Why the inputs cannot be cut or joined, for the error; "" where blocks alone decide."""

    @classmethod
    def _stored_bits(cls, spec: Spec) -> int:
        """Bits that a code takes in `codes`; 8: codes are stored one by one, in the dtype of the format."""
        raise NotImplementedError(f"{cls.__name__} defines no _stored_bits(spec)")

    @classmethod
    def _store(cls, codes: Tensor, spec: Spec) -> Tensor:
        """`codes` in the format's own dtype, as the inner tensor holds them."""
        raise NotImplementedError(f"{cls.__name__} defines no _store(codes, spec)")

    def _load(self, columns: int) -> Tensor:
        """Codes [..., columns] in the format's own dtype, on its own grid."""
        raise NotImplementedError(f"{type(self).__name__} defines no _load(columns)")

    def _of_input(self) -> dict[str, Tensor]:
        """The inner tensors that describe the input, by name. Slices share them, and a write keeps them."""
        return {k: t for k, t in self.inner_tensors().items() if k.startswith("input_")}

    def _common(self, dim: int) -> dict[str, Tensor]:
        """The inner tensors that all parts along dimension `dim` share, by name."""
        return self._of_input()

    @property
    def _dim_of_inputs(self) -> int:
        return self.ndim - (2 if self.transposed else 1)

    def _blocks_along(self, dim: int) -> int:
        """Elements of a block along `dim`; 0 where the granularity has one block for the whole dimension."""
        if self.spec.granularity.spans(dim, self.ndim):
            return 0
        return self.spec.block_size(self.shape)[dim]

    def _row_attrs(self) -> tuple[str, ...]:
        block = self._blocks_along(0)
        if block > 1 and self.shape[0] % block:
            raise self._unsupported(
                f"sharding rows that share scales in blocks of {block} (accepted: shards of whole blocks)"
            )
        names = self.inner_tensors().keys() - self._common(0).keys()
        return ("codes",) if block == 0 else tuple(n for n in self.tensor_attrs if n in names)

    def _take(self, rows: Tensor) -> Self:
        if (block := self._blocks_along(0)) > 1:
            raise self._unsupported(f"single rows, as they share scales in blocks of {block}")
        return super()._take(rows)

    def _slice(self, dim: int, start: int, end: int) -> Self:
        is_cut = dim == self._dim_of_inputs and (start, end) != (0, self.shape[dim])
        if is_cut and self.inputs_are:
            raise self._unsupported(f"slicing its inputs, {self.inputs_are}")
        if self.transposed:
            return self._slice_as_stored(dim, start, end)
        size, block = self.shape[dim], self._blocks_along(dim)
        if (start, end) == (0, size):
            return self._with()
        bits = self._stored_bits(self.spec) if dim == self.ndim - 1 else 8
        if any(edge != size and (edge % max(block, 1) or edge * bits % 8) for edge in (start, end)):
            raise self._unsupported(
                f"slicing dimension {dim} of {size} at {start}:{end} "
                f"(accepted: multiples of its blocks of {max(block, 1)}, at whole bytes)"
            )
        shape = list(self.shape)
        shape[dim] = end - start
        if start == end:
            start = end = 0
        elif end == size:  # keep the padding that belongs to the last block
            end = self.spec.padded_shape(self.shape)[dim]
        codes = self.codes.narrow(dim, start * bits // 8, packed_size(end - start, bits))
        tensors = self.inner_tensors()
        if block:
            count = -(-(end - start) // block)
            tensors.update(self._scales_of_blocks(dim, start // block, count))
        return self._with({**tensors, "codes": codes}, shape)

    def _scales_of_blocks(self, dim: int, first: int, count: int) -> dict[str, Tensor]:
        """The inner tensors of scales and zero points, of `count` blocks along `dim` from block `first` on."""
        kept = {"codes", *self._common(dim)}
        own = {name: t for name, t in self.inner_tensors().items() if name not in kept}
        return {name: t.narrow(dim, first, count) for name, t in own.items()}

    def _view(self, shape: tuple[int, ...]) -> Self | None:
        """Merges or splits leading dimensions; the blocked ones must stay, but a matrix splits between blocks."""
        rows = self._blocks_along(0)
        if self.ndim == 2 and len(shape) == 3 and rows > 1 and shape[-1] == self.shape[-1]:
            if self.transposed or shape[1] % rows or self._common(0):
                return None
            split = {k: t.unflatten(0, (shape[0], -1)) for k, t in self.inner_tensors().items()}
            return self._with(split, shape)
        leading = self._blocks_along(0) == 1 and self.ndim > 1
        if self.transposed or not leading or len(shape) < 2 or shape[-1] != self.shape[-1]:
            return None
        if any(self._blocks_along(dim) != 1 for dim in range(self.ndim - 1)):
            return None
        own, kept = self.inner_tensors(), self._common(0)
        viewed = {k: t.view(*shape[:-1], t.shape[-1]) for k, t in own.items() if k not in kept}
        return self._with({**viewed, **kept}, shape)

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        if dim == self.ndim - 1 and self.inputs_are:
            raise self._unsupported(f"cat along its inputs, {self.inputs_are}")
        if self.transposed:
            raise self._unsupported("cat of transposed tensors")
        if not all(self._has_input_of(t) for t in tensors):
            raise self._unsupported("cat of weights with different static scales of their inputs")
        common = self._common(dim)
        if not all(self._has_equal(t, common) for t in tensors):
            raise self._unsupported(f"cat of weights with different {' or '.join(common)}")
        block = self._blocks_along(dim)
        total = sum(t.shape[dim] for t in tensors)
        shape = (*self.shape[:dim], total, *self.shape[dim + 1 :])
        bits = self._stored_bits(self.spec) if dim == self.ndim - 1 else 8
        if any(t.shape[dim] * bits % 8 for t in tensors[:-1]):
            raise self._unsupported(f"cat along dimension {dim} of parts that end within a byte")
        if block == 0 and all(self._has_scales_of(t) for t in tensors):
            codes = torch.cat([t.codes for t in tensors], dim)
            return self._with({**self.inner_tensors(), "codes": codes}, shape)
        if block == 0 or any(t.shape[dim] % block for t in tensors[:-1]):
            raise self._unsupported(
                f"cat along dimension {dim}, which does not end in whole blocks with scales of their own"
            )
        joined = {
            name: torch.cat([getattr(t, name) for t in tensors], dim)
            for name in self.inner_tensors().keys() - common.keys()
        }
        return self._with({**joined, **common}, shape)

    def _has_input_of(self, other: Self) -> bool:
        """True if both round their inputs by the same static scale, if they have one."""
        return self._has_equal(other, self._of_input())

    def _has_equal(self, other: Self, own: Mapping[str, Tensor]) -> bool:
        """True if `other` has inner tensors equal to `own` of this tensor; on the meta device all are."""
        return self.is_meta or all(
            t.data_ptr() == (its := getattr(other, name)).data_ptr() or torch.equal(t, its)
            for name, t in own.items()
        )

    def _has_scales_of(self, other: Self) -> bool:
        """True if both have equal scales and zero points. Parts of one tensor do, also gathered or moved one by one."""
        names = self.inner_tensors().keys() - {"codes", *self._of_input()}
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return all(a.data_ptr() == b.data_ptr() or torch.equal(a, b) for a, b in pairs)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any, make: Any) -> Self:
        """Copies a scale that all rows share: an FSDP2 rank without rows gets it from nowhere else."""
        if self.is_meta:
            return super()._new(shape, dtype, device, make)
        if self.transposed or self._blocks_along(0):
            made = super()._new(shape, dtype, device, make)
            common = {name: t.to(device, copy=True) for name, t in self._common(0).items()}
            return made._with({**made.inner_tensors(), **common}) if common else made
        zeros = self._slice(0, 0, 0)._pad_rows(shape[0])
        return zeros._map(lambda t: t.to(device, copy=True), dtype=dtype)

    def _pad_rows(self, rows: int) -> Self:
        if self._blocks_along(0):
            return super()._pad_rows(rows)
        codes = self._load(self.spec.padded_shape(self.shape)[-1])
        zero_point = self.zero_point
        if zero_point is not None and zero_point.is_floating_point():
            raise self._unsupported(
                "padding with zeros, for which its one float zero point may have no code"
            )
        filler = codes.new_zeros((rows, *codes.shape[1:]))
        if zero_point is not None:
            filler = filler + zero_point.to(codes.dtype)
        joined = torch.cat([self.codes, self._store(filler, self.spec)])
        return self._with(
            {**self.inner_tensors(), "codes": joined}, (self.shape[0] + rows, *self.shape[1:])
        )
