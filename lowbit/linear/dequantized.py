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
    unflattened,
)
from lowbit.linear.operands import Kept, RoundedLinear, Values
from lowbit.tracing import tracer

# Without this, reading the shape or dtype of a weight goes through its __torch_function__, at microseconds each.
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


class DequantizedOperands:
    """x, and the values of the weight. Backward dequantizes again, to save memory."""

    @staticmethod
    def output(
        x: Tensor, weight: Any, bias: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor, Kept]:
        with _PlainAttributes():
            return F.linear(x, weight.values().to(x.dtype), bias), (x, weight.detach())

    @staticmethod
    def gradients(
        grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        x, weight = kept
        with _PlainAttributes():
            of_x = grad @ weight.values_again(grad.dtype) if needs[0] else None
            if not needs[1]:
                return of_x, None
            check_first_derivative(weight)  # the weight's term would be missing
            return of_x, (grad.t() @ x).to(weight.dtype)


def dequantized_linear(x: Tensor, weight: Any, bias: Tensor | None, why: str) -> Tensor:
    """x [..., K] times the values of the TrainableTensor `weight` [N, K], transposed, plus bias [N].

    `why`: the reason for high precision, for a trace.
    """
    with _PlainAttributes():
        check_linear(x, weight)
        x, bias = autocast_inputs(x, weight, bias)
        n, k = weight.shape
    m = math.prod(x.shape[:-1])  # Size.numel() would make a symbol of torch.compile a number
    tracer.note(m, n, k, why, weight)
    y = RoundedLinear.apply(x.reshape(m, k), weight, bias, DequantizedOperands)
    return unflattened(y, x)


def grouped_in_high_precision(x: Tensor, weight: Any, offs: Tensor) -> Tensor:
    """torch's grouped product of x [M, K] and the values of the weight [E, K, N]."""
    return torch._grouped_mm(x, Values.apply(weight).to(x.dtype), offs=offs)
