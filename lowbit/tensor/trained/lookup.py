"""`F.embedding` of a table that is rounded: of the rows that are looked up, where scales belong to single rows."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.fused_rounding import rounded
from lowbit.linear.rounded_linear import rounding_of
from lowbit.numerics.straight_through import StraightThrough
from lowbit.tensor.trained.quantizers import Scales


def rows_of(
    weight: Any, values: Tensor, indices: Tensor, scales: Scales, *args: Any, **kwargs: Any
) -> Tensor:
    """The rows at `indices` of plain `values` [V, D], rounded as `weight` is.

    Quantizes only the rows that are looked up, where scales belong to single rows. (Inductor 2.13 for CPU
    miscompiles the other order, a gather of rows that were padded to a whole group.)

    Args:
        weight: a FakeQuantizedTensor.
        values: plain, in place of its own.
        indices: of any shape.
        scales: what the quantizer gives.
        args, kwargs: as `F.embedding` takes them after the table.
    """
    scale, zero, joint = scales
    is_learned, shared = scale is not None, weight.scheme.weight.shares_rows
    if shared or not (is_learned or weight.quantizer.rounds_parts):
        if not is_sparse(args, kwargs):
            whole = weight.rounded(values, *scales).to(weight.dtype)
            return F.embedding(indices, whole, *args, **kwargs)
        if not is_learned:
            return _rows_with_sparse_gradient(weight, values, indices, joint, *args, **kwargs)
    if not is_learned:
        return weight.rounded(F.embedding(indices, values, *args, **kwargs)).to(weight.dtype)
    index = indices.reshape(-1)
    rows = F.embedding(index, values, *args, **kwargs)
    table = values.detach() if shared else None  # its scale is that of any rows of it
    if not shared:
        scale, zero = (
            None if t is None else F.embedding(index, t, *args, **kwargs) for t in (scale, zero)
        )
    found = weight.rounded(rows, scale, zero, table)
    return found.view(*indices.shape, values.shape[1]).to(weight.dtype)


def _rows_with_sparse_gradient(
    weight: Any, values: Tensor, indices: Tensor, joint: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """`rows_of` a table that is rounded as a whole. The gradient of the lookup, which is sparse, goes to `values`,
    since rounding has no gradient of a sparse one."""
    if not weight.quantizer.rounds_again:
        raise weight._unsupported(
            f"nn.Embedding(sparse=True) with the quantizer {weight.quantizer.name!r} (accepted: sparse=False)"
        )
    rows = F.embedding(indices, values, *args, **kwargs)
    rounding = rounding_of(weight, values.dtype)
    whole, inside = rounded(values, rounding.weight, rounding.scale_dtype, joint=joint)
    mask = inside.passed(torch.ones_like(whole))
    found = StraightThrough.apply(rows, whole[indices], mask[indices], operator.mul)
    return found.to(weight.dtype)


def is_sparse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if these arguments of F.embedding after the table ask for a sparse gradient."""
    return bool(kwargs.get("sparse", args[4] if len(args) > 4 else False))
