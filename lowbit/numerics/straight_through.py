"""The straight-through estimator: the gradient of a rounded value, where it passes the rounding (arXiv 1308.3432)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.packing import unpack


def where_set(grad: Tensor, mask: Tensor | None) -> Tensor:
    """`grad` where `mask` is True, else 0. None: it passes everywhere."""
    return grad if mask is None else torch.where(mask, grad, 0.0)


def where_bits(grad: Tensor, bits: Tensor) -> Tensor:
    """`where_set` of a mask that `packing.pack(mask, 1)` packed."""
    return torch.where(unpack(bits, 1, grad.shape[-1]).to(torch.bool), grad, 0.0)


class StraightThrough(torch.autograd.Function):
    """`values` in place of `input`, whose gradient is `passed(grad, mask)`. It keeps the mask alone."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        passed: Callable[..., Tensor] = where_set,
    ) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.passed = passed
        return values.detach()  # not a view, which autograd would not let anyone change in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.passed(grads[0], *ctx.saved_tensors), None, None, None
