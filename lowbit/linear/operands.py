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

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_is_compiling = torch.compiler.is_dynamo_compiling
_has_transforms = torch._C._are_functorch_transforms_active
_unwrapped: Any = torch._C._functorch.unwrap_if_dead

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
        of_class = kept and type(kept[0]) is type(weight) is not Tensor
        if of_class and getattr(weight, "is_stored_plain", False) and not _is_compiling():
            # and no reference to the weight itself: torch swaps no tensor that has one, so `model.to` would fail
            ctx.form = type(weight), weight.meta()
        ctx.operands = operands
        return y.detach()  # not a view, which autograd would not let nn.ReLU(inplace=True) change

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), needs, kept = grads, ctx.needs_input_grad, ctx.saved_tensors
        if kept and type(kept[0]) is Tensor and hasattr(ctx, "form"):
            kept = _of_its_class(kept[0], *ctx.form), *kept[1:]
        of_x, of_weight, *more = ctx.operands.gradients(grad, kept, needs)
        of_bias = None
        if needs[2]:
            of_bias = grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad
        return of_x, of_weight, of_bias, None, *more, *[None] * (len(needs) - 4 - len(more))


def _of_its_class(values: Tensor, kind: Any, meta: Mapping[str, Any]) -> Any:
    """The weight in high precision that a forward pass kept, of this class and metadata, of which a hook of saved
    tensors has made plain `values`, as `torch.autograd.graph.save_on_cpu(pin_memory=True)` does."""
    shape, strides = values.shape, kind._strides(values.shape, meta)
    inner = {"weight": values.detach().contiguous()}
    return kind.from_inner(inner, meta, shape, values.dtype, strides=strides)


_apply: Any = super(torch.autograd.Function, RoundedLinear).apply


def rounded_product(
    x: Tensor, weight: Any, bias: Tensor | None, operands: Operands, *others: Any
) -> Tensor:
    """`RoundedLinear.apply`. Eager code calls the function of C below it, since torch's own `apply` looks at each
    argument in Python. It would take a tenth of the host's time for a product in low bits."""
    if _is_compiling() or _has_transforms():
        found: Tensor = RoundedLinear.apply(x, weight, bias, operands, *others)
        return found
    bias = None if bias is None else _unwrapped(bias)
    found = _apply(_unwrapped(x), weight, bias, operands, *others)
    return found


# ---- what a weight remembers -----------------------------------------------------------------------------------

_MOST_KNOWN = 4
"""Decisions that a weight remembers: prefill and decoding alternate, with and without a residual."""


class _Known:
    """A decision on a weight: for such `arguments` this was `found`. Never changed, only replaced."""

    __slots__ = ("arguments", "found")

    def __init__(self, arguments: tuple[Any, ...], found: Any) -> None:
        self.arguments, self.found = arguments, found

    def __deepcopy__(self, memo: Any) -> _Known:
        """The decision holds for a copy of the weight too."""
        return self


def known(weight: Any, x: Tensor, arguments: tuple[Any, ...]) -> Any:
    """What was found for a product of this weight and an x with equal `arguments`; None where nothing was, and for an x
    that is not plain."""
    if type(x) is Tensor and not _has_transforms():
        for one in weight._known_products:
            if one.arguments == arguments:
                return one.found
    return None


def remember(weight: Any, x: Tensor, arguments: tuple[Any, ...], found: Any) -> None:
    """Let `known` give `found`, for the last few kinds of input.

    Args:
        weight: the weight that remembers.
        x: its input. Nothing is remembered for one that is not plain.
        arguments: all that `found` depends on and that can change during the life of the weight.
        found: the decision, not None.
    """
    if type(x) is Tensor:
        # A tuple is searched faster than a spec is hashed. It is replaced, because other threads may search it.
        latest = weight._known_products[: _MOST_KNOWN - 1]
        weight._known_products = (_Known(arguments, found), *latest)


class Uncopied:
    """Holds a tensor as an attribute of a weight, and is empty in a copy of the weight, which has other tensors."""

    def __init__(self, tensor: Any = None) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return Uncopied, ()


class Values(torch.autograd.Function):
    """`weight.values()` of a TrainableTensor, a plain tensor, whose gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        return weight.values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
