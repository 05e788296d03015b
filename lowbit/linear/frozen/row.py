"""A row of the list of products, what its functions are, and how autograd differentiates it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lowbit_kernels as kernels
from lowbit.linear.operands import Kept
from lowbit_kernels.runtime.library import FLOATS

MOST_BYTES = 2**27
"""Bytes of a weight that a GPU decodes as a whole for a gradient."""

READ_BY_OPS = ("integers", "float8", "table")
"""The values of `stored_as` whose layout of codes the ops of lowbit_kernels know."""
_is_compiling = torch.compiler.is_compiling

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
    recorded: Implementation | None = None
    """The implementation of products that autograd records, if it is another one."""

    def output(
        self, x: Tensor, weight: Weight, bias: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor, Kept]:
        implementation = self.recorded or self.implementation
        return implementation(x, weight, bias), (weight.detach(),)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, None]:
        if not needs[0]:
            return None, None
        return grad_of_input(grad, kept[0]), None


def grad_of_input(grad: Tensor, weight: Weight, to: Tensor | None = None) -> Tensor:
    """The gradient [..., K] of a product's input, of that of its result [..., N]: a product with the frozen weight
    [N, K], in low bits or plain.

    On a GPU the weight is decoded into memory of limited size, where nothing differentiates this product again.

    Args:
        to: [M, K], to which that of `grad` [M, N] is added in place.
    """

    def product(values: Tensor) -> Tensor:
        values = values.to(grad.dtype)
        return grad @ values if to is None else to.addmm_(grad, values)

    with torch._C.DisableTorchFunctionSubclass():
        if getattr(weight, "stored_as", None) is None:
            return product(weight)
        is_whole = weight.dtype is grad.dtype and weight.numel() * grad.itemsize <= MOST_BYTES
        if not is_whole and grad.is_cuda and not torch.is_grad_enabled() and grad.dtype in FLOATS:
            values = decoded(weight, grad.dtype)
            if values is not None:
                return product(values)
            found = op_matrix(weight, grad.dtype)
            if found is not None:
                size = weight.shape[1]
                own = kernels.input_gradient.input_gradient(grad, **found, size=size)
                return own if to is None else own.add_(to)
        return product(weight.dequantize())


def decoded(weight: Weight, dtype: torch.dtype) -> Tensor | None:
    """The values of a matrix in `dtype`, rounded once, in eager code; None where they exceed `MOST_BYTES`, and where a
    weight in another dtype would round them twice."""
    if weight.ndim != 2 or weight.numel() * dtype.itemsize > MOST_BYTES or _is_compiling():
        return None
    if weight.dtype is not dtype:
        if weight.dtype is not torch.float32 or weight.stored_as not in READ_BY_OPS:
            return None
        weight = weight._with(dtype=dtype)
    values: Tensor = weight.dequantize()
    return values


def op_matrix(weight: Weight, dtype: torch.dtype) -> dict[str, Any] | None:
    """The arguments of the ops of `lowbit_kernels.weight_only` for a matrix [N, K], whose values they round to `dtype`.

    None where they do not read its layout, or would leave out a rounding to the weight's own dtype.
    """
    if weight.ndim != 2 or (weight.dtype is not dtype and weight.dtype is not torch.float32):
        return None
    found = weight.op_arguments()
    has_rows = found is not None and len(found["codes"]) == len(weight)  # blocks of rows pad them
    return found if has_rows else None
