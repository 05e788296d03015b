"""RotatedTensor: a weight whose inputs are rotated, in blocks, before both are rounded.

    Ŵ = Q(W H) H        y = round(x H) · Q(W H)ᵀ        H: a Hadamard matrix for each `rotation` inputs

H is its own inverse, so that without rounding y = x Wᵀ. It spreads the outliers of a channel over its block, for the
weight and for the input (QuaRot, arXiv 2404.00456; blocks of 16 to 128: MR-GPTQ, arXiv 2509.23202). A product rotates
its input, which takes one more pass over x, and nothing that grows with the weight. Whatever multiplies the rotated
matrix then does so. An input that is rounded to fewer than 8 bits by token is rounded in the pass that rotates it.

The inner tensors are those of the rotated matrix. `lowbit_kernels.elementwise.block_hadamard` defines H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

import lowbit_kernels as kernels
from lowbit.numerics.granularity import PerToken
from lowbit.numerics.number_format import Int
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.table_tensor import TableTensor

_WIDEST_FUSED = 7
"""Bits of an input that the rotation rounds. Products of 8 bits round their inputs themselves."""


class RotatedTensor(AffineTensor):
    """A rotated weight in integer codes. `RotatedTensor.of_matrix(matrix, rotation)` makes one."""

    meta_attrs: ClassVar[tuple[str, ...]] = (*AffineTensor.meta_attrs, "rotation")
    stored_as = "rotated"
    _plain: ClassVar[type[AffineTensor]] = AffineTensor

    rotation: int
    """Inputs of a block of H, a power of two. 1: none are rotated."""

    @staticmethod
    def of_matrix(matrix: AffineTensor, rotation: int) -> RotatedTensor:
        """The weight over the memory of the quantized W H [..., N, K].

        Raises ValueError for a rotation that is not a power of two and does not divide K; for a matrix that is
        transposed or of another class than AffineTensor and TableTensor; for an activation with a static scale.
        """
        kind = next((k for k in (RotatedTensor, RotatedTable) if type(matrix) is k._plain), None)
        if kind is None or matrix.transposed or matrix.flat_from is not None:
            raise ValueError(f"{matrix!r}; accepted: an AffineTensor or a TableTensor [..., N, K]")
        meta = {**matrix.meta(), "rotation": rotation}
        self = kind.from_inner(matrix.inner_tensors(), meta, matrix.shape, matrix.dtype)
        self.check_parts()
        return self

    @property
    def rotated_matrix(self) -> AffineTensor:
        """W H over the same memory. Not for a transposed tensor."""
        meta = {name: getattr(self, name) for name in self._plain.meta_attrs}
        return self._plain.from_inner(self._inner(), meta, self.shape, self.dtype)

    def _inner(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in self._plain.tensor_attrs}

    def rotated(self, values: Tensor) -> Tensor:
        """`values` [..., K] times H, differentiable."""
        return rotated_blocks(values, self.rotation)

    def for_product(self, x: Tensor) -> tuple[Tensor, AffineTensor]:
        """The rotated input, and the matrix to multiply it by. It rounds the input unless the rotation has done so."""
        matrix, a = self.rotated_matrix, self.activation
        bits = 0
        if a is not None and isinstance(a.format, Int) and a.format.bits <= _WIDEST_FUSED:
            is_plain = a.format.signed and isinstance(a.granularity, PerToken)
            if is_plain and a.mapping == "symmetric_no_clipping_err":
                bits, matrix = a.format.bits, matrix._with(activation=None)
        turned = kernels.block_hadamard.block_hadamard(x, size=self.rotation, bits=bits)
        return turned, matrix

    # ---- AffineTensor's methods ------------------------------------------------------------------------------

    def _stored_values(self) -> Tensor:
        if 0 in self.shape:
            return super()._stored_values()
        wide = torch.promote_types(self.dtype, torch.float32)
        return self.rotated(self.rotated_matrix._with(dtype=wide).dequantize()).to(self.dtype)

    def rounded_input(self, x: Tensor) -> Tensor:
        if self.activation is None or self.transposed:
            return super().rounded_input(x)
        return self.rotated(self.activation.fake_quantize(self.rotated(x)))

    def _as_stored(self, values: Tensor) -> tuple[AffineTensor, Tensor]:
        if self.transposed:
            return self._transposed()._as_stored(values.transpose(-2, -1))
        return self.rotated_matrix, self.rotated(values)

    def _slice(self, dim: int, start: int, end: int) -> Self:
        inputs = self._dim_of_inputs
        size = self.shape[inputs]
        if dim == inputs and any(edge % self.rotation for edge in (start, end) if edge != size):
            raise self._unsupported(
                f"slicing inputs at {start}:{end}, which are rotated in blocks of {self.rotation}"
            )
        return super()._slice(dim, start, end)

    def stored_format(self) -> str:
        return f"{super().stored_format()}, rotated by {self.rotation}"

    def meta_to_json(self) -> dict[str, Any]:
        return {**super().meta_to_json(), "rotation": self.rotation}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        return {**super().meta_from_json(data), "rotation": data["rotation"]}

    def check_meta(self) -> None:
        super().check_meta()
        size = self.rotation
        columns = self.shape[-2 if self.transposed else -1]
        if type(size) is not int or size < 1 or size & (size - 1) or columns % size:
            raise ValueError(
                f"rotation must be a power of two that divides the {columns} inputs, got {size!r}"
            )
        if self.activation is not None and self.activation.static:
            raise ValueError(
                f"{type(self).__name__} has no static scale of its rotated input, got {self.activation}"
            )


class RotatedTable(RotatedTensor, TableTensor):
    """A rotated weight in codes of a lookup table, such as MXFP4 and NVFP4."""

    tensor_attrs: ClassVar[tuple[str, ...]] = TableTensor.tensor_attrs
    _plain = TableTensor


def blocks_to_rotate(columns: int, most: int) -> int:
    """The largest power of two that divides `columns`, up to `most`."""
    return min(columns & -columns, most)


def rotated_blocks(values: Tensor, size: int, dims: Sequence[int] = (-1,)) -> Tensor:
    """`values` with these dimensions rotated in blocks of `size`, differentiable."""
    for dim in dims if size > 1 else ():
        turned = kernels.block_hadamard.reference(values.transpose(dim, -1), size, 0)
        values = turned.transpose(dim, -1)
    return values
