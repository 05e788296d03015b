"""`linear`, `grouped_linear` and `chosen_product` of a graph of torch.compile, which takes them whole.

A weight that is made inside the graph (`lowbit.layers.frozen`) has no attributes while torch.compile traces Python.
These functions run later, when the operations of the graph are traced, and decide then. Traced code imports this module
itself, since the import brings the compiler along. The digest of the sources is in the key of the weight.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from lowbit.linear.frozen import experts
from lowbit.linear.frozen.frozen_linear import any_linear
from lowbit.linear.frozen.whole import taken_whole


@taken_whole
def linear(x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return any_linear(x, weight, bias, residual)


@taken_whole
def grouped_linear(x: Tensor, weight: Any, offsets: Tensor) -> Tensor:
    return experts.grouped_product(x, weight, offsets)


@taken_whole
def chosen_product(x: Tensor, weight: Any, ids: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    return experts.chosen_product(x, weight, ids, bias, gated)


class _Calls:
    """The calls of sibling linears while torch.compile traces them: first Python, then the operations."""

    def __init__(self) -> None:
        self.same = False
        """True if all read one input the last time. Cross attention does not."""
        self.first: tuple[Any, int | None] = (lambda: None, None)
        """The input of the latest first call: a weak reference, and how often it was written to."""
        self.equal = 0
        """How many of the calls since have read that."""
        self.outputs: tuple[Tensor, ...] | None = None


_CALLS: dict[str, _Calls] = {}
"""By the place of the siblings, without their index."""


@taken_whole
def sibling_linear(x: Tensor, weight: Any, bias: Tensor | None, place: str) -> Tensor:
    """`linear` of one of the siblings that `lowbit.layers.frozen.share_product` describes. The first one computes all
    outputs, if all read the same input when this was traced before. Its weight and bias are those of all."""
    number, sizes, path = place.split(" ", 2)
    index, parts = int(number), [int(size) for size in sizes.split(",")]
    calls = _CALLS.setdefault(f"{sizes} {path}", _Calls())
    written = None if x.is_inference() else x._version
    if index == 0:
        calls.first, calls.equal, calls.outputs = (weakref.ref(x), written), 1, None
        if calls.same:
            calls.outputs = any_linear(x, weight, bias).split(parts, -1)
            return calls.outputs[0]
        own = slice(parts[0])
        return any_linear(x, weight[own], None if bias is None else bias[own])
    first, then = calls.first
    is_same = first() is x and written == then is not None
    calls.equal += is_same
    y = calls.outputs[index] if is_same and calls.outputs is not None else None
    if index == len(parts) - 1:
        calls.same, calls.outputs = calls.equal == len(parts), None
    return any_linear(x, weight, bias) if y is None else y
