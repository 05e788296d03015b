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
    remembered,
    unflattened,
)
from lowbit.linear.operands import Kept, Uncopied, Values, remember, rounded_product
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


def dequantized_linear(x: Tensor, weight: Any, bias: Tensor | None, why: str) -> Tensor:
    """x [..., K] times the values of the TrainableTensor `weight` [N, K], transposed, plus bias [N].

    `why`: the reason for high precision, for a trace.
    """
    with _PlainAttributes():
        x, bias, arguments, how = remembered(x, weight, bias)
        if how is None:
            check_linear(x, weight, bias)
            x, bias = autocast_inputs(x, weight, bias)
            n, k = weight.shape
            # Size.numel() would make a symbol of torch.compile a number.
            m = math.prod(x.shape[:-1])
            tracer.note(m, n, k, why, weight)
            if arguments is not None:
                remember(weight, x, arguments, DequantizedOperands)
        return rounded_product(x, weight, bias, DequantizedOperands.of(weight))


def grouped_in_high_precision(x: Tensor, weight: Any, offs: Tensor) -> Tensor:
    """torch's grouped product of x [M, K] and the values of the weight [E, K, N]."""
    return torch._grouped_mm(x, Values.apply(weight).to(x.dtype), offs=offs)
