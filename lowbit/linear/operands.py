"""The one autograd Function of linears with rounded operands: y = x̂ · ŵᵀ + b.

A flow says how it rounds x and w, what its backward pass keeps of them, and by which products it finds their gradients:
an object with the two methods of `Operands`. The gradient of the bias is the sum of the rows of y's gradient.

    flow                              operands
    a frozen quantized weight         `lowbit.linear.frozen.row.Row`
    a weight in high precision        `lowbit.linear.dequantized.DequantizedOperands`
    products in low bits              `lowbit.linear.low_bit_linear.LowBitOperands`, of experts `GroupedOperands`
    BitNet                            `lowbit.linear.ternary.TernaryOperands`
    QAT, rounded values               `lowbit.linear.rounded_linear.Rounding`
    QAT, products of codes            `lowbit.linear.coded_linear.CodedOperands`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Kept = tuple[Tensor | None, ...]
"""The tensors that a forward pass keeps for the backward. It keeps a low-bit weight as an alias, `weight.detach()`:
a weight that a graph holds could not be moved or cast, because torch then swaps the tensors of a subclass."""


class Operands(Protocol):
    """How one call rounds and multiplies its operands."""

    def output(
        self, x: Tensor, weight: Any, bias: Tensor | None, needs: Sequence[bool], *others: Any
    ) -> tuple[Tensor, Kept]:
        """y [..., N], and what `gradients` gets.

        Args:
            x: [..., K].
            weight: [N, K], or [E, N, K] of experts.
            bias: [N].
            needs: True for each of x, weight and bias whose gradient is wanted.
            others: further arguments of the caller: tensors, or None.
        """

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The gradients of x and the weight, then those of `others` that have one. `needs`: True for each argument of
        `RoundedLinear.apply` whose gradient is wanted, in their order."""


class RoundedLinear(torch.autograd.Function):
    """See the module. Arguments: x, the weight, the bias, the operands, and further arguments of their `output`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Tensor | None, operands: Operands, *others: Any
    ) -> Tensor:
        y, kept = operands.output(x, weight, bias, ctx.needs_input_grad, *others)
        ctx.save_for_backward(*kept)
        ctx.operands = operands
        return y.detach()  # not a view, which autograd would not let nn.ReLU(inplace=True) change

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), needs = grads, ctx.needs_input_grad
        of_x, of_weight, *more = ctx.operands.gradients(grad, ctx.saved_tensors, needs)
        of_bias = None
        if needs[2]:
            of_bias = grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad
        return of_x, of_weight, of_bias, None, *more, *[None] * (len(needs) - 4 - len(more))


class Values(torch.autograd.Function):
    """`weight.values()` of a TrainableTensor, a plain tensor, whose gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        return weight.values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
