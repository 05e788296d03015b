"""The shape arithmetic of a low-bit tensor: its parts, and tensors made of several, by those of its inner tensors.

By default the inner tensors that `_row_attrs` names are cut and joined along dimension 0, and nothing else is possible.
A representation overrides the methods for which its layout needs another answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbit.numerics.packing import as_bytes

Kind = TypeVar("Kind", bound=Any)
"""The class of the tensor."""


class ShapeArithmetic:
    """Mixin of LowbitTensor. Results are of the tensor's class. Slices, views and transposes share its memory."""

    def _row_attrs(self: Any) -> tuple[str, ...]:
        """Names of the inner tensors whose dimension 0 runs along this tensor's; all rows share the others."""
        return tuple(self.inner_tensors())

    def _slice(self: Kind, dim: int, start: int, end: int) -> Kind:
        if dim != 0:
            raise self._unsupported(f"slicing along dimension {dim}")
        rows = self._row_attrs()
        tensors = {
            name: t[start:end] if name in rows else t for name, t in self.inner_tensors().items()
        }
        return self._with(tensors, (end - start, *self.shape[1:]))

    def _slice_as_stored(self: Kind, dim: int, start: int, end: int) -> Kind:
        """`_slice` of a transposed tensor: that of the tensor which it holds, transposed again."""
        swapped = {self.ndim - 1: self.ndim - 2, self.ndim - 2: self.ndim - 1}
        return self._transposed()._slice(swapped.get(dim, dim), start, end)._transposed()

    def _view(self: Kind, shape: tuple[int, ...]) -> Kind | None:
        """This tensor with its dimensions merged or split as `shape`, or None where it cannot be."""
        return None

    def _cat(self: Kind, tensors: Sequence[Kind], dim: int) -> Kind:
        if dim != 0:
            raise self._unsupported(f"cat along dimension {dim}")
        rows = self._row_attrs()
        joined = {name: torch.cat([getattr(t, name) for t in tensors]) for name in rows}
        total = sum(t.shape[0] for t in tensors)
        return self._with({**self.inner_tensors(), **joined}, (total, *self.shape[1:]))

    def _transposed(self: Kind) -> Kind:
        """This tensor with its last two dimensions swapped, over the same memory."""
        if "transposed" not in self.meta_attrs:
            raise self._unsupported(
                "transposition, nor products (accepted: subclasses of AffineTensor and TrainableTensor)"
            )
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return self._with(shape=shape, transposed=not self.transposed)

    def _expert(self: Kind, index: int) -> Kind:
        """Entry `index` of dimension 0, where each has its own inner tensors."""
        if self.transposed:
            return self._transposed()._expert(index)._transposed()
        shape = tuple(self.shape[1:])
        selected = {name: getattr(self, name).select(0, index) for name in self._row_attrs()}
        tensors = {**self.inner_tensors(), **selected}
        expected = {name: size for name, (size, _) in self.inner_shapes(shape).items()}
        if {name: tuple(t.shape) for name, t in tensors.items()} != expected:
            raise self._unsupported("selecting an expert, since they share scales")
        return self._with(tensors, shape)

    def _take(self: Kind, rows: Tensor) -> Kind:
        """The rows at a 1-D index of dimension 0. Negative ones are out of range, as in an embedding."""
        names = self._row_attrs()
        tensors = {
            name: as_bytes(t).index_select(0, rows).view(t.dtype) if name in names else t
            for name, t in self.inner_tensors().items()
        }
        return self._with(tensors, (rows.shape[0], *self.shape[1:]))

    def _row(self: Any, index: int) -> Tensor:
        """Row `index` of a matrix, or element `index` of a vector, as plain values."""
        try:
            part = self._slice(0, index, index + 1)
        except NotImplementedError:  # several rows, or all elements of a vector, share a scale
            return self.dequantize()[index]
        return part.dequantize()[0]

    def _all_rows(self: Any) -> list[Tensor]:
        """`_row` of each index."""
        return list(self.dequantize().unbind())

    def _new(
        self: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Any,
        make: Callable[..., Tensor],
    ) -> Any:
        """A tensor of `shape`, which differs from this one's in dimension 0 only. `make`: torch.zeros, torch.empty."""
        shapes = self.inner_shapes(shape)
        own = [(name, *shapes[name]) for name in self.inner_tensors()]
        tensors = {name: make(size, dtype=kind, device=device) for name, size, kind in own}
        return self._with(tensors, shape, dtype)

    def _pad_rows(self: Kind, rows: int) -> Kind:
        """This tensor followed by `rows` rows of zeros."""
        return self._cat([self, self.new_zeros((rows, *self.shape[1:]))], 0)
