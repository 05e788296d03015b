"""The products of a linear in MXFP8: operands are rounded in groups of 32 along the dimension that a product sums over.

    y  = x̂ ŵᵀ       x and w rounded along K
    dx = dŷ ŵ       dy and w rounded along N
    dw = dŷᵀ x̂      dy and x rounded along M

So w, x and dy are each rounded twice, and the two rounded copies of w differ (arXiv 2506.08027; torchao's
MXFP8 recipe). A code times a power of two is a bfloat16 number. Plain products of the rounded values, in the dtype of
the input with float32 sums, therefore stand for those of the matrix units, up to the order of the sums. In float16 a
code of a small group may be rounded again.

Backward keeps x and the weight, and rounds them along the other dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.frozen.checks import (
    autocast_inputs,
    check_linear,
    refuse_second_derivative,
    unflattened,
)
from lowbit.linear.fused_rounding import rounded
from lowbit.linear.operands import Kept, RoundedLinear, Values
from lowbit.tracing import tracer
from lowbit.tracing.tracer import Note


def microscaled_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N] in x's dtype.

    `weight`: a TrainableTensor with the scheme `MXFP8MixedPrecision`. Runs in high precision where
    `LowbitProducts.plain_because` has a reason. Raises ValueError in float64 where it has none.
    """
    with torch._C.DisableTorchFunctionSubclass():
        check_linear(x, weight, bias)
        x, bias = autocast_inputs(x, weight, bias)
        scheme, (n, k) = weight.scheme, weight.shape
        m = math.prod(x.shape[:-1])
        why = scheme.plain_because(x.device, m, n, k)
        note = tracer.note(m, n, k, why, weight)
        if why is not None:
            return F.linear(x, Values.apply(weight).to(x.dtype), bias)
        scheme.check_dtype(x.dtype)
        how = MicroscaledOperands(scheme, note, type(weight).__name__)
        return unflattened(RoundedLinear.apply(x.reshape(m, k), weight, bias, how), x)


class MicroscaledOperands(NamedTuple):
    """The products that `scheme` names round their operands; the others run in high precision."""

    scheme: Any
    note: Note | None
    kind: str
    """The name of the weight's class, for an error."""

    def output(
        self, x: Tensor, weight: Any, bias: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor, Kept]:
        rounds = self._rounds("output", x.dtype)
        values = weight.values().to(x.dtype)
        y = F.linear(self._along_rows(x, rounds), self._along_rows(values, rounds), bias)
        return y, (weight.detach(), x if needs[1] else None)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        refuse_second_derivative(f"a linear of {self.kind}")
        weight, x = kept
        grad_x = grad_weight = None
        if needs[0]:
            rounds = self._rounds("grad_input", grad.dtype)
            values = weight.values().to(grad.dtype)
            grad_x = self._along_rows(grad, rounds) @ self._along_rows(values.t(), rounds).t()
        if needs[1]:
            rounds = self._rounds("grad_weight", grad.dtype)
            columns = self._along_rows(grad.t(), rounds), self._along_rows(x.t(), rounds)
            grad_weight = (columns[0] @ columns[1].t()).to(weight.dtype)
        return grad_x, grad_weight

    def _rounds(self, product: str, dtype: torch.dtype) -> bool:
        """True if the scheme rounds the operands of this product, of which a trace is told."""
        rounds: bool = getattr(self.scheme, product)
        if self.note is not None:
            tracer.record(self.note, product, self.scheme.forward_format if rounds else dtype)
        return rounds

    def _along_rows(self, x: Tensor, rounds: bool) -> Tensor:
        """A matrix, its groups along the last dimension rounded if `rounds`."""
        return rounded(x.contiguous(), self.scheme.spec, masked=False)[0] if rounds else x
