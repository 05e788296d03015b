"""Matrix products of a MixedPrecisionTensor that are written as `x @ w`, and of the experts in a 3-D one.

Transposed, it is such a tensor over the same memory. A batched product is one of `mixed_linear` an expert: each has
scales and rows of its own. Grouped products, whose sizes only the device knows, run in high precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.tensor import seen
from lowbit.tensor.base import LowbitTensor, aten, check_not_flat
from lowbit.tensor.linear import autocast_inputs
from lowbit.tensor.mixed_precision import MixedPrecisionTensor, mixed_linear


@MixedPrecisionTensor.implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func: Any, args: Any, kwargs: Any) -> MixedPrecisionTensor:
    """Of what FSDP2 gathered, over the weight that the codes stand for."""
    self = args[0]
    check_not_flat(self, "transposition")
    weight = func(self.values(), *args[1:], **kwargs)
    return MixedPrecisionTensor.from_inner(
        {"weight": weight}, self.meta(), weight.shape, self.dtype
    )


def _matmul(x: Tensor, weight: Any) -> Tensor:
    """x [..., K] by weight [K, N], or x [E, M, K] by weight [E, K, N]."""
    if not isinstance(weight, MixedPrecisionTensor) or isinstance(x, LowbitTensor):
        raise NotImplementedError(
            f"a product of a {type(x).__name__} and a {type(weight).__name__}: only the second may be a "
            "MixedPrecisionTensor; call .dequantize() on the first for a plain tensor"
        )
    if weight.ndim != 2 and not x.ndim == weight.ndim == 3:
        raise NotImplementedError(
            f"a product of {tuple(x.shape)} and {weight!r}; accepted: a weight [K, N], or [E, K, N] with an input "
            "[E, M, K]"
        )
    if x.shape[-1] != weight.shape[-2] or (weight.ndim == 3 and len(x) != len(weight)):
        raise ValueError(
            f"a product of {tuple(x.shape)} and {tuple(weight.shape)}: K or the number of experts differs"
        )
    x, _ = autocast_inputs(x, weight, None)
    if weight.ndim == 2:
        return mixed_linear(x, _stored_as_linear(weight), None)
    pairs = zip(x.unbind(), _stored_as_linear(weight).unbind(), strict=True)
    return torch.stack([mixed_linear(own, expert, None) for own, expert in pairs])


def _stored_as_linear(weight: Tensor) -> Any:
    """[..., K, N] as [..., N, K]."""
    return weight.transpose(-2, -1)


def _grouped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A grouped product of torch in high precision, and a note of it."""

    def run(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(weight, MixedPrecisionTensor):
            raise NotImplementedError(
                f"{function.__name__} of a {type(x).__name__} and a {type(weight).__name__}: only the second may be a "
                "MixedPrecisionTensor; call .dequantize() on the first for a plain tensor"
            )
        n, k = weight.shape[-1], weight.shape[-2]
        seen.note(x.shape[:-1].numel(), n, k, "grouped products run in high precision")
        return function(x, weight.plain().to(x.dtype), *args, **kwargs)

    return run


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_BY_RANK = (torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
MixedPrecisionTensor.products.update(dict.fromkeys((*_MATMULS, *_BY_RANK), _matmul))
for _function in (torch._grouped_mm, getattr(F, "grouped_mm", torch._grouped_mm)):
    MixedPrecisionTensor.products[_function] = _grouped(_function)
