"""Frozen experts with a low-rank adapter, W + s · A · B, as PEFT adds one to a parameter, before it is added.

PEFT's `target_parameters` gives a module the sum in place of its parameter, by a parametrization that makes the sum at
least twice in each forward pass: torch checks its shape and dtype first. In 16 bits the sum takes four times the bytes
of packed experts. A grouped product needs no sum (`lowbit.linear.frozen.adapted_experts`). All other operations get it
(`lowbit.linear.lazy_stack`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.linear.frozen.adapted_experts import adapted_product
from lowbit.linear.frozen.checks import refuse_transforms
from lowbit.linear.lazy_stack import LazyStack


def adapted_stack(weight: Any, a: Any, b: Any, scale: float) -> Tensor | None:
    """weight + scale · bmm(a, b): not added yet where grouped products can take it so. In graphs, and for weights whose
    products round their inputs, a plain tensor. None where factors have other dtypes or shapes.

    Args:
        weight: frozen experts [E, P, Q].
        a, b: [E, P, R] and [E, R, Q].
        scale: a number.

    Raises NotImplementedError inside of a transform of torch.func.
    """
    if not (type(a) is type(b) is Tensor and a.ndim == b.ndim == 3):
        return None
    if not a.dtype == b.dtype == weight.dtype or not a.device == b.device == weight.device:
        return None
    if weight.shape != (*a.shape[:2], b.shape[2]) or b.shape[:2] != (a.shape[0], a.shape[2]):
        return None
    refuse_transforms(weight)
    if torch.compiler.is_compiling() or weight.rounds_inputs or weight.flat_from is not None:
        return _added(weight, a, b, scale)
    return _not_added(weight, a, b, scale)


def _added(weight: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return weight.dequantize().baddbmm_(a, b, alpha=scale)


def _not_added(weight: Any, a: Tensor, b: Tensor, scale: float) -> AdaptedStack:
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Sum.apply(weight, a, b, scale)
    return AdaptedStack(weight, a.detach(), b.detach(), scale)


class _Sum(torch.autograd.Function):
    """Tells autograd that the stack is a function of its factors, for what looks below torch's functions, such as
    other autograd Functions."""

    @staticmethod
    def forward(ctx: Any, weight: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return AdaptedStack(weight, a, b, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), (grad,) = ctx.saved_tensors, grads
        return None, ctx.scale * (grad @ b.mT), ctx.scale * (a.mT @ grad), None


class AdaptedStack(LazyStack):
    """See the module. Made by `adapted_stack`.

    parts: W [E, P, Q], A [E, P, R], B [E, R, Q] and s.
    """

    what = "a sum of frozen experts and their adapter"
    parts: tuple[Any, Tensor, Tensor, float]

    def __new__(cls, weight: Any, a: Tensor, b: Tensor, scale: float) -> AdaptedStack:
        self = cls.of(weight.shape, weight, (a, b, *weight.inner_tensors().values()))
        self.parts = weight, a, b, scale
        return self

    def _made(self) -> Tensor:
        return _added(*self.parts)

    def _swapped(self) -> LazyStack:
        weight, a, b, scale = self.parts
        return _not_added(weight.transpose(-2, -1), b.mT, a.mT, scale)

    def _product(self, x: Tensor, offsets: Tensor) -> Tensor:
        return adapted_product(x, *self.parts, offsets)
