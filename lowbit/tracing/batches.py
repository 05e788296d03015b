"""Batches, as the flows that run a model over data take them, and the mode in which the model runs on them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """The batch with its tensors on the device of the model's first parameter; a mapping as a dict."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    plain = dict(batch) if hasattr(batch, "keys") else batch  # tree_map enters no BatchEncoding
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, plain)


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a mapping of keyword arguments, a tuple or list of arguments, or one argument."""
    if isinstance(batch, Mapping):  # BatchEncoding of transformers is a UserDict, which is one
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def entry(output: Any, name: str) -> Any:
    """What a model's output has by this name, or None."""
    if isinstance(output, Mapping):
        return output.get(name)
    return getattr(output, name, None)


def output_tensor(output: Any) -> Tensor:
    """The logits, the last hidden state, the tensor itself, or the first one in a tuple or list: the first with
    dimensions if there is one, since a loss may stand before logits."""
    named = [entry(output, name) for name in ("logits", "last_hidden_state")]
    several = list(output) if isinstance(output, tuple | list) else []
    several.sort(key=lambda x: isinstance(x, Tensor) and x.ndim == 0)
    for found in (output, *named, *several):
        if isinstance(found, Tensor):
            return found
    raise TypeError(
        f"the model's output is a {type(output).__name__} without loss, logits or a tensor; accepted: an output with "
        "one of them, or a function of model and batch where the call takes a loss"
    )


def has_tensor(output: Any) -> bool:
    """True if `output_tensor` finds one."""
    with suppress(TypeError):
        output_tensor(output)
        return True
    return False


def compared_tensor(output: Any) -> Tensor | None:
    """What `output_tensor` finds, or else the first tensor of floats in what the output holds by other names: in
    mappings, dataclasses and other objects, tuples and lists. None if there is none."""
    if has_tensor(output):
        found = output_tensor(output)
        return found if found.is_floating_point() else None
    if hasattr(output, "__dict__") and not isinstance(output, Mapping):
        output = vars(output)
    held = list(output.values()) if isinstance(output, Mapping) else output
    within = map(compared_tensor, held if isinstance(held, tuple | list) else ())
    tensors = [tensor for tensor in within if tensor is not None]
    tensors.sort(key=lambda tensor: tensor.ndim == 0)
    return tensors[0] if tensors else None


@contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    """The context at whose end these hooks are removed."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The context in which the model runs in eval mode. Afterwards each module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """The context in which autocast casts a parameter at each use.

    Otherwise autocast keeps the 16-bit copy of a float32 parameter until its outermost context ends. Calls that change
    `p.data` between two passes would then run the model with the values that `p` had in the first one.
    """
    held = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    # A context that was made before, such as a decorator of a forward, enables the cache again. Here it is an outermost
    # context, which drops its copies at its end.
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(held)
        torch.clear_autocast_cache()


@contextmanager
def deterministic() -> Iterator[None]:
    """The context in which operations take their deterministic kernels, where they have some."""
    mode = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = False
            yield
    finally:
        memory.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)
