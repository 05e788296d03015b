"""New values for a frozen weight, in its own scheme: multiples of the old ones change its scales alone. For others a
block keeps its scale where that is nearer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.blocks import block_sums, for_elements
from lowbit.numerics.packing import as_bytes
from lowbit.numerics.row_chunks import row_chunks
from lowbit.tensor.core import check_finite, nears_end

REACH = 1.01
"""How far a value may be beyond what scales reach, to keep them. Rounding moves the largest one by more."""
GAIN = 0.9
"""Scales of which siblings may share a part (`Spec.joins`) stay where they reach the values, unless new ones lower the
squared error by more than a tenth. A weight does not know whether it has siblings, so one without pays for it too: in
float8 with one scale 2 to 6% of the squared error on average and 10% at most (0.4 dB), where the values shrank to a
1.5th and less; in NVFP4 nothing to 1.5%, since each block takes the nearer scale."""


def requantize(weight: Any, values: Tensor) -> None:
    """Write `values` [..., N, K] into the codes and scales of an AffineTensor of this shape that is not transposed."""
    if weight.spec.shares_rows:
        _requantize(weight, values)
    else:
        for part, own in _row_chunks(weight, values):
            _requantize(part, own)


def check_room(weight: Any, values: Tensor, change: Callable[[Any, Tensor], None]) -> None:
    """Raise ValueError where `change`, which is `requantize` or `write`, would make `weight` infinite or NaN. The
    weight stays unchanged. `values` may be of a wider dtype, as sums with adapters are."""
    if nears_end(values, weight.dtype):
        trial = weight.clone()
        change(trial, values)
        check_finite(trial, values)


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


def write_exactly(weight: Any, values: Tensor) -> bool:
    """Write `values` [..., N, K] into the codes of an AffineTensor that is not transposed, if its present scales give
    them exactly. Returns whether it did."""
    if weight.is_meta or torch.compiler.is_compiling():
        return False
    if weight.numel() == 0:
        return True
    found = []
    for part, own in _row_chunks(weight, values):
        trial = part.clone()._with(dtype=own.dtype)
        write(trial, own)
        if not torch.equal(trial.dequantize(), own):
            return False
        found.append((part, trial.codes))
    for part, codes in found:
        part.codes.copy_(codes)
    return True


def widen(weight: Any, factor: Tensor) -> None:
    """Let the part of the scales that an AffineTensor shares with siblings reach `factor` times as far: a power of two,
    float32 [..., 1, 1]. Its values stay, except those whose scales, or codes in float8, would be below the smallest
    normal number: they are rounded again."""
    weight = weight._transposed() if weight.transposed else weight
    values = weight._with(dtype=torch.promote_types(weight.dtype, torch.float32)).dequantize()
    if weight.spec.scales is None:
        write(weight, values, (weight.scale * factor, None))
        return
    scale = weight.scale_values()
    shared = getattr(weight, weight.spec.scales.joint)
    shared.div_(factor)
    parts = {name: getattr(weight, name) for name in weight.spec.scales.shared}
    nearest = weight.spec.scales.nearest(scale, parts)
    weight.scale.copy_(weight.spec.scales.encode_given(nearest, parts)["scale"])
    if not torch.equal(nearest, scale):
        requantize(weight, values)


def rescale(weight: Any, values: Tensor) -> bool:
    """Multiply the scales of an AffineTensor that is not transposed, and keep its codes, where every block of `values`,
    of its shape [..., N, K], is a positive multiple of the block that it holds. Returns whether it did: not for other
    values, and not where the format of the scales lacks a product.

    New scales would lose more: those of int3 for values of the codes -4 .. 3 are smaller, and searched ones are not
    found again.
    """
    if weight.numel() == 0 or weight.is_meta or torch.compiler.is_compiling():
        return False
    found = []
    for part, own in _row_chunks(weight, values):
        ratio = _ratio(part, own)
        scales = None if ratio is None else _multiplied(part, ratio)
        if scales is None:
            return False
        found.append((part, scales))
    for part, scales in found:
        for name, t in scales.items():
            getattr(part, name).copy_(t)
    return True


def _ratio(weight: Any, values: Tensor) -> Tensor | None:
    """By what each block of `values` is a multiple of the one that `weight` holds, up to the rounding of their dtype:
    one positive float64 number for each scale. None where a block is not such a multiple."""
    spec, dtype = weight.spec, torch.promote_types(values.dtype, torch.float32)
    held, own = weight._with(dtype=values.dtype).dequantize().to(dtype), values.to(dtype)
    square, along = (_block_sums(spec, held.double() * x) for x in (held, own))
    ratio = torch.where(square == 0, 1.0, along / square)
    expected = held.double() * _for_elements(spec, ratio, values)
    size = _for_elements(spec, ratio.abs() * square.sqrt(), values)
    # what values round to, and what a rotation of a block does
    tolerance = torch.finfo(values.dtype).eps * expected.abs() + 2.0**-22 * size
    is_multiple = ((own - expected).abs() <= tolerance).all() & (ratio > 0).all()
    return ratio if bool(is_multiple) else None


def _multiplied(weight: Any, ratio: Tensor) -> dict[str, Tensor] | None:
    """The inner tensors of scales and zero points times `ratio`. None where their format does not hold the products."""
    if bool((ratio == 1).all()):
        return {}
    spec, scale = weight.spec, weight.scale_values()
    wanted = scale.double() * ratio
    if spec.scales is None and not spec.rounds_minimum:
        held = wanted.to(scale.dtype)
        parts, tolerance = {"scale": held}, torch.finfo(scale.dtype).eps
    elif spec.scales is not None and spec.scales.is_byte:
        kept = weight.inner_tensors()
        held = spec.scales.nearest(wanted.float(), kept)
        parts = {"scale": spec.scales.encode_given(held, kept)["scale"]}
        tolerance = torch.finfo(torch.float32).eps
    else:
        return None
    if not bool(((held.double() - wanted).abs() <= tolerance * wanted.abs()).all()):
        return None
    if weight.zero_point is not None and spec.zero_point_is_value:
        parts["zero_point"] = (weight.zero_point.double() * ratio).to(weight.zero_point.dtype)
    return parts


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
    parts = _row_chunks(weight, values)
    return all(_is_near(own, part.dequantize(), 2 * coarser) for part, own in parts)


def is_nearest(weight: Any, values: Tensor) -> bool:
    """True if each code of `weight` is the one nearest to `values` [..., N, K] by its scale, or one of two that are.

    `weight`: an AffineTensor of integers without zero points, of this shape, that is not transposed."""
    parts = _row_chunks(weight, values)
    return weight.numel() == 0 or all(_is_nearest(part, own) for part, own in parts)


def _is_nearest(weight: Any, values: Tensor) -> bool:
    spec = weight.spec
    step = _for_elements(spec, weight.scale_values(), values)
    error = weight._with(dtype=torch.float32).dequantize().sub_(values.float()).abs_()
    return bool((error <= step * (0.5 + 2.0**-10)).all())


def _is_near(values: Tensor, held: Tensor, tolerance: float) -> bool:
    held = held.to(torch.promote_types(values.dtype, torch.float32))
    change = values - held
    along = (change * held).sum(dtype=torch.float64).abs()
    size = held.square().sum(dtype=torch.float64)
    near = (change.abs_() <= held.abs() * tolerance).all()
    return bool(near & (along <= tolerance / 8 * size))


def _row_chunks(weight: Any, values: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Chunks of both, over the same memory, small enough for the temporaries of quantization. Rows of a matrix that
    share scales stay together, and so do experts that share one."""
    if weight.ndim > 2 and not weight.spec.granularity.spans(0, weight.ndim):
        for expert, own in zip(weight.unbind(), values.unbind(), strict=True):
            yield from _row_chunks(expert, own)
        return
    if weight.spec.granularity.shares_rows:
        yield weight, values
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
    # squares of values beyond 1e19 are infinite by both scales, of which the new ones fit
    new_error = _squared_error(weight, values, new, *qparams)
    if spec.joins and spec.scales is None:
        own_error = torch.where(qparams[0] <= REACH * own[0], GAIN * own_error, own_error)
    keeps = own_error.isfinite() & (own_error <= new_error)
    keeps_element = _for_elements(spec, keeps, x)
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
    found = weight.spec.dequantize(codes, scale, zero_point, values.shape, torch.float32)
    return _block_sums(weight.spec, (found - values).square())


def _block_sums(spec: Any, values: Tensor) -> Tensor:
    """The sum of each block of `values` [..., N, K]."""
    padded = spec.pad(values)
    return block_sums(padded, spec.block_size(padded.shape))


def _for_elements(spec: Any, of_blocks: Tensor, values: Tensor) -> Tensor:
    """A number for each block of `values` as one for each of its elements."""
    block = spec.block_size(spec.padded_shape(values.shape))
    return for_elements(of_blocks, block, values.shape)
