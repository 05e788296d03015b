"""New values for a frozen weight, in its own scheme: a block keeps its scale where that is nearer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.packing import as_bytes
from lowbit.numerics.row_chunks import row_chunks


def requantize(weight: Any, values: Tensor) -> None:
    """Write `values` [..., N, K] into the codes and scales of an AffineTensor of this shape that is not transposed."""
    if weight.spec.shares_rows:
        _requantize(weight, values)
    else:
        for part, own in _row_chunks(weight, values):
            _requantize(part, own)


def write(weight: Any, values: Tensor, qparams: tuple[Tensor, Tensor | None] | None = None) -> None:
    """Write `values` [..., N, K] into the codes of an AffineTensor, by these scales and zero points, which it stores
    too. What siblings share of its scales stays. `values` are as it stores them, where it is transposed."""
    spec = weight.spec
    if weight.transposed:
        weight = weight._transposed()
    own = weight.scale_values(), weight.zero_point
    scale, zero_point = qparams or own
    codes, _, _ = spec.quantize(spec.pad(values.contiguous()), qparams=(scale, zero_point))
    weight.codes.copy_(weight._store(codes, spec))
    if not torch.equal(scale, own[0]):
        kept = None if spec.scales is None else weight.inner_tensors()
        parts = {"scale": scale} if kept is None else spec.scales.encode_given(scale, kept)
        weight.scale.copy_(parts["scale"])
    if zero_point is not None:
        weight.zero_point.copy_(zero_point)


def holds(weight: Any, values: Tensor) -> bool:
    """True if `values` [..., N, K] are those of an AffineTensor of this shape that is not transposed, up to the
    rounding of the coarser dtype. Rounding moves values to both sides; a change of all to one side, such as a factor of
    1.01 in bfloat16, counts as a change.

    An average of a frozen weight computes such values. Most schemes would choose other scales for them: a group of int4
    codes -7 .. 7 gets a smaller scale each time.
    """
    if weight.numel() == 0 or weight.is_meta or torch.compiler.is_compiling():
        return False
    coarser = max(torch.finfo(t.dtype).eps for t in (weight, values))
    whole = weight.spec.shares_rows
    parts = [(weight, values)] if whole else _row_chunks(weight, values)
    return all(_is_near(own, part.dequantize(), 2 * coarser) for part, own in parts)


def _is_near(values: Tensor, held: Tensor, tolerance: float) -> bool:
    held = held.to(torch.promote_types(values.dtype, torch.float32))
    change = values - held
    along = (change * held).sum(dtype=torch.float64).abs()
    size = held.square().sum(dtype=torch.float64)
    near = (change.abs_() <= held.abs() * tolerance).all()
    return bool(near & (along <= tolerance / 8 * size))


def _row_chunks(weight: Any, values: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Chunks of both, over the same memory, small enough for the temporaries of quantization."""
    if weight.ndim > 2:
        for expert, own in zip(weight.unbind(), values.unbind(), strict=True):
            yield from _row_chunks(expert, own)
        return
    start = 0
    for own in row_chunks(values):
        yield weight[start : start + len(own)], own
        start += len(own)


def _requantize(weight: Any, values: Tensor) -> None:
    spec = weight.spec
    if weight.numel() == 0:
        return
    x = spec.pad(values.contiguous())
    own = (weight.scale_values(), weight.zero_point)
    kept, _, _ = spec.quantize(x, qparams=own)
    parts, qparams = weight._new_scales(x)
    new, _, _ = spec.quantize(x, qparams=qparams)
    own_error = _squared_error(weight, values, kept, *own)
    keeps = own_error <= _squared_error(weight, values, new, *qparams)
    keeps_element = keeps
    for dim, size in enumerate(spec.block_size(x.shape)):
        keeps_element = keeps_element.repeat_interleave(size, dim)
    weight.codes.copy_(weight._store(_where(keeps_element, kept, new), spec))
    for name, t in parts.items():
        held = getattr(weight, name)
        held.copy_(_where(keeps, held, t))


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """torch.where of two tensors of one dtype, float8 too, which has fewer operations."""
    return torch.where(condition, as_bytes(a), as_bytes(b)).view(a.dtype)


def _squared_error(
    weight: Any, values: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    """Squared error of each block, without its padding."""
    spec = weight.spec
    found = spec.dequantize(codes, scale, zero_point, values.shape, torch.float32)
    square = spec.pad((found - values).square())
    for dim, size in enumerate(spec.block_size(values.shape)):
        square = square.unflatten(dim, (-1, size)).sum(dim + 1)
    return square
