"""Checks of tensors: of a weight that is to be quantized, of what it is rounded to, and of operations that a flattened
view does not have."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.numerics.row_chunks import count_nonfinite, row_chunks
from lowbit.tensor.core.base import LowbitTensor


def check_not_flat(tensor: LowbitTensor, what: str) -> None:
    if (error := flat_error(tensor, what)) is not None:
        raise error


def flat_error(tensor: LowbitTensor, what: str) -> NotImplementedError | None:
    """The error of an operation that no flattened view has; None for another tensor."""
    if tensor.flat_from is None:
        return None
    return tensor._unsupported(f"{what} of a flattened view; view it as {tensor.flat_from} first")


def check_weight(weight: Tensor, name: str = "weight") -> None:
    """Raise ValueError unless `weight` is a real floating tensor, of at least two dimensions, and finite."""
    if isinstance(weight, LowbitTensor):
        raise ValueError(
            f"{name} is already quantized: {weight!r}; dequantize it or start from the original"
        )
    if not weight.dtype.is_floating_point:
        raise ValueError(
            f"{name} has dtype {weight.dtype}; only real floating-point weights can be quantized "
            "(float32, bfloat16, float16): convert it or leave it out with filter_fn"
        )
    if weight.dtype.itemsize < 2:
        raise ValueError(
            f"{name} has dtype {weight.dtype}, which is low-bit already; leave it out with filter_fn"
        )
    if weight.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; a quantized weight has 2 or more dimensions"
        )
    if not weight.is_meta and (bad := count_nonfinite(weight)):
        raise ValueError(
            f"{name} has {bad} NaN or infinite values of {weight.numel()}; repair or reload it before quantizing"
        )


def nears_end(values: Tensor, dtype: torch.dtype) -> bool:
    """True if the magnitude of an element of `values` is at least half of the largest number of `dtype`."""
    if values.is_meta or not values.numel() or torch.compiler.is_compiling():
        return False
    ends = [end.abs() for chunk in row_chunks(values.detach()) for end in chunk.aminmax()]
    return float(torch.stack(ends).max()) >= torch.finfo(dtype).max / 2


def check_finite(rounded: LowbitTensor, values: Tensor) -> None:
    """Raise ValueError where `rounded`, which holds finite `values`, is infinite: near the end of a dtype the nearest
    code may lie beyond it. In MXFP4, 6e4 is 65536, which float16 does not hold."""
    if nears_end(values, rounded.dtype) and (bad := count_nonfinite(rounded.dequantize())):
        limit, largest = torch.finfo(rounded.dtype).max, float(values.detach().abs().max())
        is_narrow = rounded.dtype is torch.float16
        way = (
            "torch.bfloat16 and torch.float32, which reach 3e38" if is_narrow else "smaller values"
        )
        raise ValueError(
            f"{bad} values of {values.numel()} round to infinity: the largest is {largest:g}, and the codes nearest to "
            f"them are beyond {limit:g}, the largest number of {rounded.dtype}. Accepted: {way}, or leave the weight "
            "out with filter_fn"
        )
