"""The aten operations of an AffineTensor beyond those of the base: transposition, rows, experts, products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.products import quantized_linear
from lowbit.tensor.affine_tensor import AffineTensor
from lowbit.tensor.base import LowbitTensor, aten, check_not_flat


@AffineTensor.implements(aten.t.default, aten.transpose.int)
def _transpose(func: Any, args: Any, kwargs: Any) -> AffineTensor:
    self = args[0]
    check_not_flat(self, "transposition")
    dims = {d % self.ndim for d in args[1:3]} if len(args) > 1 else {0, 1}
    if len(dims) == 1:
        return self._with()
    if dims != {self.ndim - 2, self.ndim - 1}:
        raise self._unsupported(f"transposing dimensions {sorted(dims)} (accepted: the last two)")
    return self._transposed()


@AffineTensor.implements(aten.permute.default)
def _permute(func: Any, args: Any, kwargs: Any) -> AffineTensor:
    """`.T` and `.mT` arrive here."""
    self, dims = args[0], [d % args[0].ndim for d in args[1]]
    check_not_flat(self, "a permutation")
    identity = list(range(self.ndim))
    if dims == identity:
        return self._with()
    if dims != [*identity[:-2], self.ndim - 1, self.ndim - 2]:
        raise self._unsupported(f"permuting dimensions as {dims} (accepted: the last two swapped)")
    return self._transposed()


@AffineTensor.implements(aten.index_select.default, aten.index.Tensor)
def _index(func: Any, args: Any, kwargs: Any) -> AffineTensor:
    self, dim, rows = args if func is aten.index_select.default else (args[0], 0, args[1][0])
    check_not_flat(self, "indexing")
    if (
        dim != 0
        or self.transposed
        or (func is aten.index.Tensor and len(args[1]) != 1)
        or rows.ndim != 1
    ):
        raise self._unsupported("indexing but by one 1-D index of dimension 0")
    if rows.dtype is torch.bool:
        if len(rows) != self.shape[0]:
            raise IndexError(
                f"a mask of {len(rows)} elements over the {self.shape[0]} rows of {self!r}"
            )
        rows = rows.nonzero().squeeze(1)
    elif func is aten.index.Tensor:
        rows = torch.where(rows < 0, rows + self.shape[0], rows)
    return self._take(rows)


@AffineTensor.implements(aten.embedding.default)
def _embedding(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Gather the rows' codes, then dequantize only those."""
    self, indices = args[0], args[1]
    if self.transposed:
        raise self._unsupported("an embedding of its transpose")
    rows = self._take(indices.reshape(-1)).dequantize()
    return rows.view(*indices.shape, *self.shape[1:])


@AffineTensor.implements(aten.mm.default, aten.addmm.default, aten.linear.default)
def _matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Products that arrive below autograd, as DTensor's do."""
    if func is aten.addmm.default:
        bias, x, weight = args
        if kwargs:
            raise weight._unsupported(f"addmm with {kwargs}")
    else:
        x, weight, bias = (*args, None)[:3]
    if not isinstance(weight, AffineTensor) or isinstance(x, LowbitTensor):
        quantized = x if isinstance(x, LowbitTensor) else weight
        raise quantized._unsupported(f"{func} in that position (accepted: input @ weight)")
    if func is aten.linear.default or weight.transposed:
        stored = weight if func is aten.linear.default else weight._untransposed()
        return quantized_linear(x, stored, bias)
    product = x @ weight.dequantize().to(x.dtype)
    return product if bias is None else product + bias


@AffineTensor.implements(aten.bmm.default, aten._grouped_mm.default)
def _products_of_experts(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Products of all experts at once, in high precision: the dequantized weights in either position."""
    for weight in (x for x in args[:2] if isinstance(x, AffineTensor)):
        if weight.activation is not None:  # whose rounding is for inputs and not for gradients
            raise weight._unsupported(
                f"{func}, as its scheme quantizes inputs (accepted: F.linear of one expert, weight[i], at a time, or a "
                "weight-only scheme)"
            )
    plain = [x for x in args[:2] if not isinstance(x, LowbitTensor)]
    if not plain:
        raise args[0]._unsupported(f"{func} of two low-bit tensors (accepted: one of them plain)")
    dtype = plain[0].dtype
    first, second = (
        x.dequantize().to(dtype) if isinstance(x, AffineTensor) else x for x in args[:2]
    )
    return func(first, second, *args[2:], **kwargs)
