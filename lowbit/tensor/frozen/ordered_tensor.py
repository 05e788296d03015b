"""OrderedTensor: an AffineTensor whose groups are any inputs, as GPTQ's act-order ("desc_act") makes them.

    W[n, order[j]] = (code[n, j] − zero_point[n, j // g]) · scale[n, j // g]        y = x[..., order] · sortedᵀ

GPTQ sorts the inputs of a layer by their importance before it cuts groups. The codes here are stored in that order, so
that groups are neighbours and every kernel of an `AffineTensor` multiplies them. A product first gathers the columns of
its input, which costs one more pass over x, and nothing that grows with the weight.

- `codes`, `scale`, `zero_point`: those of `sorted_matrix`, an AffineTensor.
- `order`: int32 [..., 1, K], the input of each stored column. Each expert of a stack has its own.

The inputs cannot be sliced, as a slice of them has no whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lowbit.tensor.core import InnerShapes
from lowbit.tensor.frozen.affine_tensor import AffineTensor


class OrderedTensor(AffineTensor):
    """A weight whose columns are stored in another order. `OrderedTensor.of_sorted(matrix, order)` makes one."""

    tensor_attrs: ClassVar[tuple[str, ...]] = (*AffineTensor.tensor_attrs, "order")
    stored_as = "ordered"
    inputs_are = "whose groups are not neighbours"

    order: Tensor

    @classmethod
    def of_sorted(cls, matrix: AffineTensor, order: Tensor) -> Self:
        """The weight over the memory of a quantized matrix [N, K], whose column j is input `order[j]`.

        Raises ValueError for an order that is not a permutation of K inputs, and for a matrix in another
        representation, or with an activation, which other columns would round.
        """
        columns = matrix.shape[-1]
        if type(matrix) is not AffineTensor or matrix.activation is not None:
            raise ValueError(f"{matrix!r}; accepted: a weight-only AffineTensor [N, K]")
        if matrix.ndim != 2 or matrix.transposed:
            raise ValueError(f"{matrix!r}; accepted: a matrix [N, K]")
        if order.shape != (columns,) or not torch.equal(
            order.long().sort().values, torch.arange(columns, device=order.device)
        ):
            raise ValueError(
                f"an order {tuple(order.shape)} that is not a permutation of {columns} inputs"
            )
        inner = {**matrix.inner_tensors(), "order": order.to(torch.int32)[None]}
        self = cls.from_inner(inner, matrix.meta(), matrix.shape, matrix.dtype)
        self.check_parts()
        return self

    @property
    def sorted_matrix(self) -> AffineTensor:
        """The weight with its inputs in the stored order, over the same memory. Not for a transposed tensor."""
        inner: dict[str, Any] = {**self.inner_tensors(), "zero_point": self.zero_point}
        inner.pop("order")
        return AffineTensor.from_inner(inner, self.meta(), self.shape, self.dtype)

    # ---- AffineTensor's methods ------------------------------------------------------------------------------

    def _stored_values(self) -> Tensor:
        if 0 in self.shape:
            return super()._stored_values()
        values = self.sorted_matrix.dequantize()
        return torch.empty_like(values).scatter_(-1, self._order_of(values), values)

    def in_order(self, values: Tensor) -> Tensor:
        """`values` [..., N, K] or, of a matrix, [..., K] with their columns as they are stored."""
        if self.ndim == 2:
            return values.index_select(-1, self.order[0])
        return values.gather(-1, self._order_of(values))

    def _order_of(self, values: Tensor) -> Tensor:
        return self.order.long().expand_as(values)

    def _as_stored(self, values: Tensor) -> tuple[AffineTensor, Tensor]:
        if self.transposed:
            return self._transposed()._as_stored(values.transpose(-2, -1))
        return self.sorted_matrix, self.in_order(values)

    def _encode(self, values: Tensor, joint: Tensor | None = None) -> dict[str, Tensor | None]:
        return {**super()._encode(values, joint), "order": self.order}

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        found = super().inner_shapes(shape)
        columns = shape[-2] if self.transposed else shape[-1]
        return {**found, "order": ((*shape[:-2], 1, columns), torch.int32)}

    def _common(self, dim: int) -> dict[str, Tensor]:
        return {} if dim < self.ndim - 2 else {"order": self.order}

    def _view(self, shape: tuple[int, ...]) -> Self | None:
        return None

    def check_meta(self) -> None:
        super().check_meta()
        if self.activation is not None:
            raise ValueError(f"{type(self).__name__} rounds no inputs, got {self.activation}")
