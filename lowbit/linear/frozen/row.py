"""A row of the list of products, what its functions are, and how autograd differentiates it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.linear.operands import Kept

Weight = Any
"""A LowbitTensor [N, K] with the attributes of an AffineTensor. Both import this package, so it does not name them."""
Condition = Callable[[Tensor, Weight, Tensor | None], bool]
Implementation = Callable[..., Tensor]
"""(x, weight, bias) -> product, or (x, weight, bias, residual) -> product + residual."""


class Row(NamedTuple):
    """One row of the list, and the operands of its product for `RoundedLinear`: x, and a frozen weight.

    The gradient of x is a product with the dequantized weight.
    """

    name: str
    """The name in reports."""
    condition: Condition
    implementation: Implementation
    takes_residual: bool = False
    source: str = ""
    """Names the code of a registration for the caches of compiled graphs; empty for built-in rows."""

    def output(
        self, x: Tensor, weight: Weight, bias: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor, Kept]:
        return self.implementation(x, weight, bias), (weight.detach(),)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, None]:
        if not needs[0]:
            return None, None
        with torch._C.DisableTorchFunctionSubclass():
            return grad @ kept[0].dequantize().to(grad.dtype), None
