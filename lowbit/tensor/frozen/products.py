"""torch.matmul and its kind with a frozen weight on either side, by the products that the weight has.

`x @ weight` rounds its inputs where the scheme does, by the linear of the transpose. A stack of experts takes rounded
inputs, and multiplies in high precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.tensor.core import GROUPED, MATMULS, LowbitTensor, of_stack, of_swapped
from lowbit.tensor.frozen.blocked import BlockedTensor

_OF_EXPERTS = {*GROUPED, *MATMULS}
_MATMUL = {torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}


def multiplied(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The product `func(*args, **kwargs)` by another of the weight's products; None if it has no other form."""
    product = _arranged(*args) if func in _MATMUL and len(args) == 2 and not kwargs else None
    if product is None and func in PRODUCTS:
        product = PRODUCTS[func](*args, **kwargs)
    return product


def rounded_for_experts(func: Any, args: Any) -> Any:
    """`args` with the operands as `rounded_pair` gives them, where `func` multiplies stacked weights."""
    return (*rounded_pair(*args[:2]), *args[2:]) if func in _OF_EXPERTS and len(args) > 1 else args


def _arranged(x: Any, weight: Any) -> Tensor | None:
    """x @ weight, where the weight stands first or is a stack, by the product that it has; None for x @ matrix."""
    if isinstance(x, LowbitTensor) and isinstance(weight, LowbitTensor):
        return None
    if isinstance(x, BlockedTensor):
        return of_swapped(x, weight)
    return of_stack(x, weight) if weight.ndim == 3 else None


def _of_inputs_first(input: Any, other: Any, out: Any = None) -> Tensor | None:
    """x @ weight [K, N] that rounds its inputs, by the linear of its transpose; None for others."""
    is_weight = isinstance(other, BlockedTensor) and other.ndim == 2 and not other.transposed
    if not is_weight or isinstance(input, LowbitTensor) or out is not None:
        return None
    return F.linear(input, other.t()) if other.rounds_inputs else None


def _added_of_inputs_first(input: Any, mat1: Any, mat2: Any, **others: Any) -> Tensor | None:
    product = None if others else _of_inputs_first(mat1, mat2)
    return None if product is None else product + input


PRODUCTS: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.matmul, torch.linalg.matmul), _of_inputs_first),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__), _of_inputs_first),
    **dict.fromkeys(
        (torch.mm, Tensor.mm), lambda input, mat2, out=None: _of_inputs_first(input, mat2, out)
    ),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _added_of_inputs_first),
}
"""Functions that a frozen weight computes itself: each returns None where torch's own way serves. Who has another
function adds it."""


def rounded_pair(x: Any, weight: Any) -> tuple[Any, Any]:
    """Both operands of a product of stacked weights [E, K, N], which runs in high precision: x rounded as the weight's
    products round it, and the weight without that rule. Experts [E, N, K] may stand on the left."""
    if isinstance(x, BlockedTensor) and not isinstance(weight, LowbitTensor) and weight.ndim == 3:
        inputs, plain = rounded_pair(weight.transpose(-2, -1), x)
        return plain, inputs.transpose(-2, -1)
    is_stack = isinstance(weight, BlockedTensor) and weight.ndim == 3
    if not is_stack or isinstance(x, LowbitTensor):
        return x, weight
    plain = weight if weight.activation is None else weight._with(activation=None)
    return weight.rounded_input(x), plain
