"""The linear of a weight that is dequantized for its products, which run in high precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.frozen.checks import (
    autocast_inputs,
    check_first_derivative,
    check_linear,
    flattened,
    in_rows,
    remembered,
    unflattened,
)
from lowbit.linear.operands import Kept, Uncopied, remember, rounded_product
from lowbit.tracing import tracer

_is_compiling = torch.compiler.is_dynamo_compiling
# Without this, reading the shape or dtype of a weight goes through its __torch_function__, at microseconds each.
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


class DequantizedOperands:
    """x, and the values of the weight. Backward dequantizes again, to save memory.

    `alias`: a weight over the same inner tensors, for backward. It has a version of its own, so autograd keeps the
    inner tensors and compares theirs. None in graphs of torch.compile, which keep an alias of each call.
    """

    def __init__(self, alias: Any) -> None:
        self.alias = alias

    @staticmethod
    def of(weight: Any) -> DequantizedOperands:
        """The operands of a product of this TrainableTensor, which holds its alias."""
        if _is_compiling():
            return _IN_GRAPHS
        held = weight.__dict__.get("_alias")
        own = None if held is None else held.tensor
        for name in weight.tensor_attrs:
            if own is None or getattr(own, name) is not getattr(weight, name):
                own = weight._with()
                weight._alias = Uncopied(own)
                break
        return DequantizedOperands(own)

    def output(
        self, x: Tensor, weight: Any, bias: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor, Kept]:
        with _PlainAttributes():
            own: Any = self.alias
            kept = (weight.detach(),) if own is None else own.inner_tensors().values()
            values = (weight if own is None else own).values().to(x.dtype)
            return unflattened(F.linear(flattened(x), values, bias), x), (x, *kept)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        x, weight = kept[0], kept[1] if self.alias is None else self.alias
        with _PlainAttributes():
            rows = flattened(grad)
            of_x = None
            if needs[0]:
                of_x = unflattened(rows @ weight.values_again(grad.dtype), grad)
            if not needs[1]:
                return of_x, None
            check_first_derivative(weight)  # the weight's term would be missing
            return of_x, (rows.t() @ flattened(x)).to(weight.dtype)


_IN_GRAPHS = DequantizedOperands(None)


def dequantized_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """x [..., K] times the values of the TrainableTensor `weight` [N, K], transposed, plus bias [N]."""
    with _PlainAttributes():
        x, bias, arguments, how = remembered(x, weight, bias)
        if how is None:
            check_linear(x, weight, bias)
            x, bias = autocast_inputs(x, weight, bias)
            n, k = weight.shape
            # Size.numel() would make a symbol of torch.compile a number.
            m = math.prod(x.shape[:-1])
            tracer.note(m, n, k, "weight dequantized", weight)
            if arguments is not None:
                remember(weight, x, arguments, DequantizedOperands)
        return rounded_product(x, weight, bias, DequantizedOperands.of(weight))


def grouped_in_high_precision(x: Tensor, weight: Any, offs: Tensor) -> Tensor:
    """torch's grouped product of x [M, K] and the values of the weight [E, K, N]. Backward makes these again."""
    return rounded_product(x, weight, None, _GROUPED, offs)


class GroupedValues:
    """The operands of torch's grouped product of a TrainableTensor [E, K, N]."""

    def output(
        self, x: Tensor, weight: Any, bias: None, needs: Sequence[bool], offsets: Tensor
    ) -> tuple[Tensor, Kept]:
        y = torch._grouped_mm(x, weight.values().to(x.dtype), offs=offsets)
        return y, (weight.detach(), x if needs[1] else None, offsets)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        weight, x, offsets = kept
        check_first_derivative(weight)
        grad = in_rows(grad)
        of_x = of_weight = None
        if needs[0]:  # first, so that the values are gone before the gradient of the weight comes
            of_x = torch._grouped_mm(grad, weight.values_again(grad.dtype).mT, offs=offsets)
        if needs[1]:
            of_weight = grouped_gradient(x, grad, offsets, weight.transposed).to(weight.dtype)
        return of_x, of_weight


_GROUPED: Any = GroupedValues()


def grouped_gradient(x: Tensor, grad: Tensor, offsets: Tensor, turned: bool) -> Tensor:
    """xᵀ · grad over the rows of each expert, [E, K, N]. `turned`: in the memory of [E, N, K]."""
    if turned:
        return torch._grouped_mm(grad.t(), x, offs=offsets).mT
    return torch._grouped_mm(x.t(), grad, offs=offsets)
