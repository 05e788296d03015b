"""Fake quantization on and off: `enable_`, `disable_`, and `with high_precision(model)`.

    qat.disable_(model)                        # the model computes what the plain one computes, to the bit
    qat.enable_(model, activations=False)      # the weights alone are rounded
    with qat.high_precision(model):            # off inside, and as before afterwards
        teacher = model(tokens).logits

The switch is an attribute of each prepared weight (`FakeQuantizedTensor.off`). torch.compile makes one graph for each
state that it meets and keeps both. Copies and pickles of a model have the state. State dicts do not hold it, and
loading one leaves it as it is. Under FSDP2 every rank calls the switch, and the next gather has the form of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.convert import check_module, find_owners
from lowbit.numerics.settings import check_flag
from lowbit.numerics.sharded import held_locally, is_fsdp_module
from lowbit.tensor.core.regather import forget_gathered, reshard
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor, Off


def prepared_weights(model: nn.Module) -> dict[str, FakeQuantizedTensor]:
    """Fully qualified name → this rank's part of each prepared weight, a tied one once.

    Reshards FSDP2 modules. Raises TypeError for anything but a module, ValueError where none is prepared.
    """
    check_module(model)
    reshard(model)
    found = {}
    for (module, name, fqn), *_ in find_owners(model).values():
        weight = held_locally(module._parameters[name])
        if isinstance(weight, FakeQuantizedTensor):
            found[fqn] = weight
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no prepared weights; call lowbit.qat.prepare_(model, scheme) first"
        )
    return found


def change(
    model: nn.Module,
    weights: dict[str, FakeQuantizedTensor],
    assign: Callable[[str, FakeQuantizedTensor], None],
) -> None:
    """Call `assign` of the name and the weight for each of `weights`, the prepared weights of `model`. It may change
    their metadata, in which the next gather of FSDP2 then begins anew."""
    changed = set()
    for fqn, weight in weights.items():
        before = weight.meta()
        assign(fqn, weight)
        if weight.meta() != before:
            changed.add(id(weight))
    if changed:
        forget_gathered(model, changed)


def enable_(model: nn.Module, weights: bool = True, activations: bool = True) -> None:
    """Switch the fake quantization of all prepared weights on, in place.

    Args:
        model: prepared by `lowbit.qat.prepare_`, possibly sharded by FSDP2 since (then call this on every rank).
        weights: whether products see the weights rounded.
        activations: whether products round their inputs, where the scheme rounds them.

    With both False, outputs and gradients equal those of the plain model to the bit. An exception is a weight with
    several uses under autocast, whose gradients the plain model sums in 16 bits and this one in the weight's dtype.

    `convert_` quantizes weights in every state alike.

    Raises:
        TypeError: `model` is not a module, or what is given is not a bool.
        ValueError: nothing is prepared.
    """
    check_flag("weights", weights)
    check_flag("activations", activations)
    change(model, prepared_weights(model), lambda fqn, w: w.switch(weights, activations))


def disable_(model: nn.Module) -> None:
    """Switch the fake quantization of all prepared weights of `model` off, in place: `enable_` with both off."""
    enable_(model, weights=False, activations=False)


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """The context in which fake quantization is off. Afterwards each weight is in the state that it had before.

    A backward pass may follow the context. Activation checkpointing then computes the forward pass again with fake
    quantization off, if the call was that of `model` itself. A backward pass of FSDP2, or one that has calls of both
    states under activation checkpointing, must run inside the context.

    Raises TypeError and ValueError as `enable_` does.
    """
    weights = prepared_weights(model)
    states = {fqn: weight.off for fqn, weight in weights.items()}
    change(model, weights, lambda fqn, w: w.switch(False, False))
    sharded = any(is_fsdp_module(module) for module in model.modules())
    hook = model.register_forward_hook(_BackwardOff(weights, sharded))
    try:
        yield
    finally:
        hook.remove()
        reshard(model)
        change(model, weights, _as_in(states))


def _as_in(states: dict[str, Off]) -> Callable[[str, FakeQuantizedTensor], None]:
    def assign(fqn: str, weight: FakeQuantizedTensor) -> None:
        weight.off = states[fqn]

    return assign


class _BackwardOff:
    """A forward hook of a model whose fake quantization is off. It switches it off again in the backward pass of the
    outputs, for what activation checkpointing computes there again, and afterwards back. Under FSDP2, which has dropped
    the gathered weights of that state, it raises RuntimeError."""

    def __init__(self, weights: dict[str, FakeQuantizedTensor], sharded: bool) -> None:
        self.weights, self.sharded = weights, sharded
        self.running = False

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if (
            torch.compiler.is_compiling()
        ):  # the graph of the backward pass has the state of forward already
            return
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin)

    def _begin(self, grad: Tensor) -> None:
        if self.running or all(weight.off == "all" for weight in self.weights.values()):
            return
        if self.sharded:
            raise RuntimeError(
                "the backward pass of a forward pass inside of lowbit.qat.high_precision, which has ended: under FSDP2 "
                "call backward inside of it"
            )
        states = {fqn: weight.off for fqn, weight in self.weights.items()}

        def end() -> None:
            self.running = False
            for fqn, weight in self.weights.items():
                weight.off = states[fqn]

        self.running = True
        torch.autograd.Variable._execution_engine.queue_callback(end)
        for weight in self.weights.values():
            weight.switch(False, False)
