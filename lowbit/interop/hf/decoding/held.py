"""The decoders that a model keeps from call to call, and when they no longer fit it.

A CUDA graph reads addresses. So a decoder serves a model as long as its modules, their settings and the addresses of
their tensors are the same; values may change in place. Decoders go with the model.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbit.interop.hf.decoding.quantized import layer_of
from lowbit.interop.hf.decoding.step import Decoder
from lowbit.tensor.core.base import LowbitTensor

MOST_DECODERS = 4
"""Decoders of a model, one a batch size and format of the cache."""
LEAST, STEP = 256, 1024
"""Capacities are powers of two from LEAST to STEP, and multiples of STEP."""
SETTINGS = (bool, int, float, str, type(None))
"""Types of attributes that are compared."""
STOCK = ("torch.", "transformers.", "lowbit.")
"""Packages whose modules keep no settings in dictionaries."""
TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
MOST_SHOWN = 16
"""Entries of a dictionary that are compared by value; of longer ones their number is."""

_held: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, Decoder]]] = (
    weakref.WeakKeyDictionary()
)


_turns: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_turns_lock = threading.Lock()


@contextlib.contextmanager
def borrowed_decoder(
    model: nn.Module, batch: int, tokens: int, device: torch.device, kv_cache: str | None = None
) -> Iterator[Decoder]:
    """The decoder of `model` for sequences of `tokens`: one that it has, or a new one for this batch size and this
    format of its cache.

    Other threads wait for their turn, since the attention of the model's config is another one meanwhile. A call
    within the context, such as by a streamer, gets another decoder.
    """
    with _turns_lock:
        turn = _turns.setdefault(model, threading.RLock())
    with turn:
        decoders = _fitting(model, device)
        key = batch if kv_cache is None else (batch, kv_cache)
        decoder = decoders.pop(key, None)
        if decoder is None or decoder.capacity < tokens:
            decoder = None  # its memory goes first
            decoder = Decoder(model, batch, capacity_for(tokens), device, layer_of(kv_cache))
        try:
            yield decoder
        finally:
            decoders.pop(key, None)
            decoders[key] = decoder  # the latest one last
            while len(decoders) > MOST_DECODERS:
                del decoders[next(iter(decoders))]


def _fitting(model: nn.Module, device: torch.device) -> dict[Any, Decoder]:
    """The decoders of the model as it is now."""
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    facts = [*autocast, *_facts(model)]
    known, decoders = _held.get(model, (None, {}))
    if known != facts:
        decoders = {}
        _held[model] = facts, decoders
    return decoders


def capacity_for(tokens: int) -> int:
    """The slots of a cache for so many tokens."""
    capacity = LEAST
    while capacity < min(tokens, STEP):
        capacity *= 2
    return capacity if tokens <= capacity else -(-tokens // STEP) * STEP


def _facts(model: nn.Module) -> list[Any]:
    """What a graph of the model depends on, besides the values of its tensors: the modules, their hooks and
    functions, the addresses of their tensors, and their attributes, and those of configs, that are numbers, names or
    switches."""
    everywhere = torch.nn.modules.module
    found: list[Any] = [*everywhere._global_forward_hooks, *everywhere._global_forward_pre_hooks]
    for module in model.modules():
        own = vars(module)
        found += [id(module), type(module), [v for v in own.values() if type(v) in SETTINGS]]
        found += [*module._forward_hooks, *module._forward_pre_hooks, type(module).forward]
        # Not the functions themselves: a bound one would keep the model.
        functions = [v for k, v in own.items() if callable(v) and not k.startswith("_compiled")]
        found += [(id(v), getattr(v, "__code__", None)) for v in functions]
        if isinstance(module, PreTrainedModel):
            settings = vars(module.config).items()
            found += [
                (k, v) for k, v in settings if type(v) in SETTINGS and "_implementation" not in k
            ]
        if not type(module).__module__.startswith(STOCK):  # an adapter has more
            found += [
                repr(v) if len(v) < MOST_SHOWN else len(v)
                for k, v in own.items()
                if type(v) in (dict, list, tuple, set) and k not in TORCH
            ]
        for t in (*module._parameters.values(), *module._buffers.values()):
            found += [one.data_ptr() for one in _plain(t)]
    return found


def _plain(t: Tensor | None) -> Iterator[Tensor]:
    """The plain tensors of a parameter or buffer, or of its place."""
    if isinstance(t, LowbitTensor):
        for part in t.inner_tensors().values():
            yield from _plain(part)
    elif t is not None:
        yield t
