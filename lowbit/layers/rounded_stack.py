"""Experts with learned scales as the products of their module see them, rounded when something reads them.

A grouped product rounds them by itself, forward and backward, so that a step does not hold the rounded stacks of a
layer (`lowbit.linear.rounded_linear.RoundingOfExperts`). All other operations get the values, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit.linear import fused_rounding
from lowbit.linear.frozen.checks import in_transform
from lowbit.linear.lazy_stack import LazyStack
from lowbit.linear.operands import RoundedLinear, Values
from lowbit.linear.rounded_linear import RoundingOfExperts, rounding_of
from lowbit.tensor.trained.learned_scales import settled_by
from lowbit.tracing import tracer


def seen_by_experts(weight: Any, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The FakeQuantizedTensor `weight` [E, N, K], or [E, K, N], by these scales, in its dtype."""
    if not _rounds_later(weight):
        return settled_by(weight, scale, zero)
    trains = any(t is not None and t.requires_grad for t in (weight, scale, zero))
    if torch.is_grad_enabled() and trains:
        return _Rounded.apply(weight, scale, zero)
    return RoundedStack(weight, scale, zero)


def _rounds_later(weight: Any) -> bool:
    """True if one pass of a kernel rounds the weight: rounding again then costs less than the memory of a copy."""
    if torch.compiler.is_compiling() or in_transform() or tracer.active is not None:
        return False
    if weight.is_gathered or not weight.rounds_weight or weight.input_spec is not None:
        return False
    is_narrow = weight.dtype is weight.weight.dtype and weight.dtype.itemsize == 2
    return (
        weight.ndim == 3 and is_narrow and fused_rounding.runs(weight.scheme.weight, weight.weight)
    )


class _Rounded(torch.autograd.Function):
    """Tells autograd that the stack is a function of the weight, for what looks below torch's functions, such as other
    autograd Functions."""

    @staticmethod
    def forward(ctx: Any, weight: Any, scale: Tensor, zero: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight.weight, scale, zero)
        ctx.rounding = rounding_of(weight, weight.weight.dtype)
        return RoundedStack(weight, scale, zero)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *scales = ctx.saved_tensors
        return ctx.rounding.learned(grads[0], weight, [*scales, None], None)


class RoundedStack(LazyStack):
    """See the module. Made by `seen_by_experts`.

    parts: the FakeQuantizedTensor [E, P, Q], its scale and its zero point.
    """

    what = "experts under QAT"
    parts: tuple[Any, Tensor, Tensor | None]
    is_turned = False

    def __new__(cls, weight: Any, scale: Tensor, zero: Tensor | None) -> RoundedStack:
        learned = (t for t in (scale, zero) if t is not None)
        self = cls.of(weight.shape, weight, (weight.weight, *learned))
        self.parts = weight, scale, zero
        return self

    def _made(self) -> Tensor:
        return settled_by(*self.parts)

    def _swapped(self) -> LazyStack:
        found: LazyStack = _Swapped.apply(self) if self.requires_grad else _swapped(self)
        return found

    def _product(self, x: Tensor, offsets: Tensor) -> Tensor:
        weight, scale, zero = self.parts
        own = Values.apply(weight)
        how = vars(rounding_of(weight, own.dtype))
        rounding = RoundingOfExperts(**how, turned=self.is_turned)
        return RoundedLinear.apply(x, own, None, rounding, offsets, scale, zero)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _swapped(stack: RoundedStack) -> RoundedStack:
    turned = RoundedStack.of(stack.shape[:1] + stack.shape[:0:-1], stack.parts[0], stack.sources)
    turned.parts, turned.is_turned = stack.parts, True
    return turned


class _Swapped(torch.autograd.Function):
    """As `_Rounded`, of a stack and its transpose."""

    @staticmethod
    def forward(ctx: Any, stack: RoundedStack) -> RoundedStack:
        return _swapped(stack)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].mT


def _plain(x: Any) -> Any:
    """The values below autograd, where `_Rounded` has their gradient."""
    if not isinstance(x, RoundedStack):
        return x
    with torch.no_grad():
        values = settled_by(*x.parts)
    return values.mT if x.is_turned else values
