"""`linear`, `grouped_linear` and `chosen_product` of a graph of torch.compile, which takes them whole.

A weight that is made inside the graph (`lowbit.layers.frozen`) has no attributes while torch.compile traces Python.
These functions run later, when the operations of the graph are traced, and decide then. Traced code imports this module
itself, since the import brings the compiler along. The digest of the sources is in the key of the weight.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lowbit.linear.frozen import experts
from lowbit.linear.frozen.checks import autocast_dtype
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
        self.first: tuple[Any, int | None, torch.dtype | None] = (lambda: None, None, None)
        """The input of the latest first call: a weak reference, how often it was written to, and the dtype of autocast
        around the call."""
        self.operands: tuple[Any, Tensor | None] | None = None
        """The weight and the bias of all, from the first call to the last."""
        self.equal = 0
        """How many of the calls since have read the first input."""
        self.outputs: tuple[Tensor, ...] | None = None


_CALLS: dict[tuple[str, int], _Calls] = {}
"""By the place of the siblings, without their index, and their number."""
_GROUPS: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any, int]]] = weakref.WeakKeyDictionary()
"""By what traces a graph: the siblings whose first one it has called, each with what traces the graph inside, such as
that of a checkpoint, that has the call, and the index of the one that comes next."""


MOST_ALIKE = 3
"""Siblings alike in one graph that guards compare as objects (`is_named`)."""


def is_named(siblings: Any, index: int) -> bool:
    """True if guards of the graph that torch.compile traces see the name of these siblings: those of the fourth layer
    alike, and of all after it.

    Guards have to see that siblings belong together. torch 2.11 compares objects in Python, at each call. It skips the
    guard of a name while a module does not change. But a graph with a name serves no other layer, so it has to be one
    of many layers, which leaves few others to serve.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    groups = _GROUPS.get(output.root_tracer, [])
    alike = [other for _, other, _ in groups if other.places == siblings.places]
    if index == 0:
        return len(alike) >= MOST_ALIKE
    return any(other is siblings for other in alike[MOST_ALIKE:])


def number_of(siblings: Any, index: int) -> int:
    """The number of these siblings in the graph that torch.compile traces, in the order of their first calls.

    The first one starts a number, and the others follow in their order. One that the graph calls without those before
    it gets -1, and so do all after it: its weight is not at hand in the graph. A graph inside the graph, such as that
    of a checkpoint, begins anew with its siblings, but not with the numbers, since it may run between siblings.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    groups = _GROUPS.setdefault(output.root_tracer, [])
    own = weakref.ref(output.current_tracer), siblings
    if index == 0:
        groups.append((*own, 1))
        return len(groups) - 1
    for number in reversed(range(len(groups))):
        if groups[number][:2] == own:
            is_next = groups[number][2] == index
            groups[number] = (*own, index + 1 if is_next else -1)
            return number if is_next else -1
    return -1


@taken_whole
def sibling_linear(x: Tensor, weight: Any, bias: Tensor | None, place: str, number: int) -> Tensor:
    """`linear` of one of the siblings that `lowbit.layers.frozen.share_product` describes.

    The first one computes all outputs, if all read the same input when this was traced before.

    Args:
        x: [..., K].
        weight: the weights of all siblings as one, [sum of N, K], for the first one; None for the others.
        bias: the biases of all, [sum of N], where they have some; None for all but the first one.
        place: the index among the siblings, their N, and a name that layers alike share.
        number: which of the siblings of the graph these are (`number_of`).
    """
    at, sizes, path = place.split(" ", 2)
    index, parts = int(at), [int(size) for size in sizes.split(",")]
    calls = _CALLS.setdefault((f"{sizes} {path}", number), _Calls())
    written = None if x.is_inference() else x._version
    cast = autocast_dtype(x.device.type)
    if index == 0:
        calls.first, calls.equal, calls.outputs = (weakref.ref(x), written, cast), 0, None
        calls.operands = weight, bias
        same, calls.same = calls.same, False  # as long as the last one was not called
        if same:
            calls.outputs = any_linear(x, weight, bias).split(parts, -1)
    first, then, cast_then = calls.first
    is_same = first() is x and (index == 0 or (written == then is not None and cast == cast_then))
    calls.equal += is_same
    assert calls.operands is not None
    weight, bias = calls.operands
    y = calls.outputs[index] if is_same and calls.outputs is not None else None
    if index == len(parts) - 1:
        calls.same, calls.outputs, calls.operands = calls.equal == len(parts), None, None
    if y is not None:
        return y
    own = slice(sum(parts[:index]), sum(parts[: index + 1]))
    return any_linear(x, weight[own], None if bias is None else bias[own])
