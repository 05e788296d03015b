"""Products of the weights that `lowbit.train` prepares that are not `F.linear`: `x @ w`, those of the experts in a 3-D
weight, and the one inside of nn.MultiheadAttention.

A matrix product is that of the weight's linear: transposed, a weight is one of its class over the same memory, and of
experts each has a linear of its own. Grouped products, whose sizes only the device knows, and attention's run in high
precision on the values that stand for input and weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lowbit import tracer
from lowbit.tensor.base import LowbitTensor, aten, check_not_flat
from lowbit.tensor.bitnet import BitNetTensor, straight_through
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.mixed_precision import MixedPrecisionTensor
from lowbit.tensor.trainable import KEEP_OUT, Values
from lowbit.train_scheme import IN_ATTENTION

_KINDS: tuple[type[Any], ...] = (MixedPrecisionTensor, Int8WeightTensor, BitNetTensor)


@MixedPrecisionTensor.implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func: Any, args: Any, kwargs: Any) -> MixedPrecisionTensor:
    """Of what FSDP2 gathered, over the weight that the codes stand for."""
    self = args[0]
    check_not_flat(self, "transposition")
    weight = func(self.values(), *args[1:], **kwargs)
    return MixedPrecisionTensor.from_inner(
        {"weight": weight}, self.meta(), weight.shape, self.dtype
    )


def _check(x: Any, weight: Any) -> None:
    if not isinstance(weight, _KINDS) or isinstance(x, LowbitTensor):
        raise NotImplementedError(
            f"a product of a {type(x).__name__} and a {type(weight).__name__}: only the second may be in low bits; "
            f"accepted: input @ weight, or {KEEP_OUT}"
        )


def _matmul(x: Tensor, weight: Any) -> Tensor:
    """x [..., K] by weight [K, N], or x [E, M, K] by weight [E, K, N]."""
    _check(x, weight)
    if weight.ndim != 2 and not x.ndim == weight.ndim == 3:
        raise NotImplementedError(
            f"a product of {tuple(x.shape)} and {weight!r}; accepted: a weight [K, N], or [E, K, N] with an input "
            "[E, M, K]"
        )
    if x.shape[-1] != weight.shape[-2] or (weight.ndim == 3 and len(x) != len(weight)):
        raise ValueError(
            f"a product of {tuple(x.shape)} and {tuple(weight.shape)}: K or the number of experts differs"
        )
    stored_as_linear: Any = weight.transpose(-2, -1)
    if weight.ndim == 2:
        return F.linear(x, stored_as_linear)
    pairs = zip(x.unbind(), stored_as_linear.unbind(), strict=True)
    return torch.stack([F.linear(own, expert) for own, expert in pairs])


def _addmm(input: Tensor, mat1: Tensor, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`mat1` [M, K] by the weight `mat2` [K, N], plus `input`."""
    _check(mat1, mat2)
    if (beta, alpha) != (1, 1):
        raise mat2._unsupported(f"addmm with beta={beta}, alpha={alpha} (accepted: 1, 1)")
    product = _matmul(mat1, mat2)
    return product + input.to(product.dtype)


def _grouped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A grouped product of torch in high precision, and a note of it."""

    def run(x: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
        _check(x, weight)
        n, k = weight.shape[-1], weight.shape[-2]
        m, why = x.shape[:-1].numel(), "grouped products run in high precision"
        tracer.note(m, n, k, why, weight)
        values = Values.apply(weight).to(x.dtype)
        if isinstance(weight, BitNetTensor):
            x = straight_through(x)
        return function(x, values, *args, **kwargs)

    return run


def _attention(*args: Any, **kwargs: Any) -> Any:
    """nn.MultiheadAttention multiplies by its out_proj.weight where no override of F.linear reaches."""

    def as_plain(x: Any) -> Any:
        if not isinstance(x, _KINDS):
            return x
        n, k = x.shape
        m, why = args[0].shape[:-1].numel(), f"{IN_ATTENTION}, in high precision"
        tracer.note(m, n, k, why, x)
        return Values.apply(x).to(x.dtype)

    return F.multi_head_attention_forward(*map(as_plain, args), **tree_map(as_plain, kwargs))


_MATMULS = (
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__),
    *(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm),
)
_GROUPED = (torch._grouped_mm, getattr(F, "grouped_mm", torch._grouped_mm))
for _kind in _KINDS:
    _kind.products.update(dict.fromkeys(_MATMULS, _matmul))
    _kind.products.update(dict.fromkeys((torch.addmm, Tensor.addmm), _addmm))
    _kind.products.update({function: _grouped(function) for function in _GROUPED})
for _kind in (MixedPrecisionTensor, Int8WeightTensor):  # BitNet has no product there
    _kind.products[F.multi_head_attention_forward] = _attention
