"""Arithmetic with frozen low-bit weights, as tools that merge adapters into a model do it.

    weight + delta, weight.norm(), ...     the dequantized values take part: a plain tensor
    weight += delta, weight.data = values  the result is quantized again, in the weight's own scheme

Writing quantizes again, so a change smaller than half a quantization step is mostly lost. Each block keeps its scale
unless a new one is nearer: values that don't change keep their bits, and a small change that is taken back leaves
nothing behind. `lowbit.dequantize_(model)` before merging loses nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit.affine import quantize_affine
from lowbit.tensor.affine_tensor import AffineTensor, check_weight
from lowbit.tensor.base import LowbitTensor, aten, check_not_flat
from lowbit.tensor.row_parts import row_parts
from lowbit.tensor.ternary import TernaryTensor

_BEFORE = "call lowbit.dequantize_(model) before merging into it"


@AffineTensor.implements(
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.where.self),
    *(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar),
    *(aten.neg.default, aten.abs.default, aten.isfinite.default, aten.isnan.default),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.eq.Scalar, aten.ne.Scalar),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten.amax.default, aten.amin.default, aten.std.correction),
    aten.linalg_vector_norm.default,
)
def _read(func: Any, args: Any, kwargs: Any) -> Tensor:
    return func(*tree_map(_values, args), **tree_map(_values, kwargs))


def _values(x: Any) -> Any:
    return x.dequantize() if isinstance(x, AffineTensor) else x


@AffineTensor.implements(
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor),
    *(aten.add_.Scalar, aten.mul_.Scalar, aten.div_.Scalar),
)
def _change(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Computed in float32, or float64 for such weights."""
    target, *others = args
    others = tree_map(_values, others)
    if not isinstance(target, AffineTensor):
        return func(target, *others, **kwargs)
    check_not_flat(target, "a change")
    wide = torch.promote_types(target.dtype, torch.float32)
    requantize_(target, func(target._with(dtype=wide).dequantize(), *others, **kwargs))
    return target


def requantize_(weight: AffineTensor, values: Tensor) -> None:
    """Write `values` [..., N, K] into `weight`, in its scheme; each block keeps its scale where that is nearer.

    Warns that it rounds. Raises ValueError for values that are not finite or of another shape, NotImplementedError for
    ternary weights. The weight is then as it was.
    """
    if isinstance(weight, TernaryTensor):  # of which not even its own values give it back
        raise weight._unsupported(f"changes, since all its elements share one scale ({_BEFORE})")
    if values.shape != weight.shape:
        raise ValueError(f"values of shape {tuple(values.shape)} for {weight!r}")
    check_weight(values, f"what is to become {type(weight).__name__} {tuple(weight.shape)}")
    warnings.warn(
        f"{type(weight).__name__} of {weight.spec.format} takes new values, rounded to its own codes: changes below "
        f"half the distance of two of them are lost. To lose nothing, {_BEFORE}",
        stacklevel=1,  # this line, so that all weights together warn once
    )
    if weight.transposed:
        weight, values = weight._untransposed(), values.transpose(-2, -1)
    if weight.spec.shares_rows:
        _requantize(weight, values)
    else:
        for part, own in _rows_of(weight, values):
            _requantize(part, own)


def _rows_of(weight: Any, values: Tensor) -> Any:
    """Parts of both, over the same memory, with few enough elements for the temporaries of quantizing."""
    if weight.ndim > 2:
        for expert, own in zip(weight.unbind(), values.unbind(), strict=True):
            yield from _rows_of(expert, own)
        return
    start = 0
    for own in row_parts(values):
        yield weight[start : start + len(own)], own
        start += len(own)


def _requantize(weight: AffineTensor, values: Tensor) -> None:
    spec = weight.spec
    if weight.numel() == 0:
        return
    x = spec._pad(values.contiguous())
    block = spec.block_size(x.shape)
    fmt = spec.format
    kept = quantize_affine(
        x, block, weight.scale, weight.zero_point, fmt.dtype, fmt.quant_min, fmt.quant_max
    )
    anew, scale, zero_point = spec.quantize(values, weight.scale.dtype)
    own = _error(weight, values, kept, weight.scale, weight.zero_point)
    keeps = own <= _error(weight, values, anew, scale, zero_point)
    of_elements = keeps
    for dim, size in enumerate(block):
        of_elements = of_elements.repeat_interleave(size, dim)
    # As bytes: float8 has fewer operations.
    codes = torch.where(of_elements, kept.view(torch.uint8), anew.view(torch.uint8)).view(
        kept.dtype
    )
    weight.codes.copy_(weight._store(codes, spec))
    weight.scale.copy_(torch.where(keeps, weight.scale, scale))
    if zero_point is not None and weight.zero_point is not None:
        weight.zero_point.copy_(torch.where(keeps, weight.zero_point, zero_point))


def _error(
    weight: AffineTensor, values: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    """Squared error of each block, of which padding is no part."""
    spec = weight.spec
    found = spec.dequantize(codes, scale, zero_point, values.shape, torch.float32)
    square = spec._pad((found - values).square())
    for dim, size in enumerate(spec.block_size(values.shape)):
        square = square.unflatten(dim, (-1, size)).sum(dim + 1)
    return square


def assign(weight: AffineTensor, values: Any) -> None:
    """`weight.data = values`: from then on it has the inner tensors of a low-bit tensor stored alike, or new ones,
    quantized of plain values. What aliases the weight keeps the old ones.

    Raises ValueError for another shape, dtype or device, and as `requantize_` does.
    """
    facts = {
        "shape": (tuple(values.shape), tuple(weight.shape)),
        "dtype": (values.dtype, weight.dtype),
        "device": (values.device, weight.device),
    }
    for what, (got, own) in facts.items():
        if got != own:
            raise ValueError(f"assigning .data of {what} {got} to {weight!r}, which has {own}")
    if isinstance(values, LowbitTensor):
        if not weight._is_stored_like(values):
            raise ValueError(
                f"assigning {values!r} as .data of {weight!r}: they are stored differently; assign "
                "values.dequantize() to quantize them anew"
            )
        source: Any = values
    else:
        source = weight.clone()
        requantize_(source, values)
    for name, t in source.inner_tensors().items():
        setattr(weight, name, t)
