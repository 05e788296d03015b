"""The cache of `lowbit.hf.generate` in 8 and 4 bits: codes, with a scale for each token and head, as in `KVCache`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowbit.interop.hf.decoding.cache import SlotLayer, Slots, autocast
from lowbit.interop.hf.kv_cache import FORMATS, Codes
from lowbit_kernels.decoding.quantized_attention import quantized_attention

NAMES = {"int8": ("int8", "int8"), "float8": ("float8", "float8"), "int8_int4": ("int8", "int4")}
"""Formats of keys and values, by the name of a cache."""


def layer_of(kv_cache: str | None) -> Callable[[Slots], SlotLayer]:
    """The layers of a cache of that name. ValueError for other names."""
    if kv_cache is None:
        return SlotLayer
    if kv_cache not in NAMES:
        raise ValueError(
            f"generate takes a kv_cache of {', '.join(NAMES)}, or None, got {kv_cache!r}"
        )
    keys, values = NAMES[kv_cache]
    return functools.partial(QuantizedSlotLayer, keys=FORMATS[keys], values=FORMATS[values])


class QuantizedSlotLayer(SlotLayer):
    """The codes of one layer. A prompt in an empty cache reads its own keys and values, all else reads the codes."""

    def __init__(self, slots: Slots, keys: torch.dtype, values: torch.dtype) -> None:
        super().__init__(slots)
        self.dtypes = keys, values
        self.seen: Tensor | None = None
        """Tokens in the cache, the new one included; int64 [1]."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        with _disable_current_modes():  # real tensors, also where the forward is traced
            self.codes = Codes(key_states, value_states, self.slots.capacity, *self.dtypes)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        key_states, value_states = autocast(key_states), autocast(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, begin = self.slots, self.slots.filled
        before = slots.position
        if before is None:
            before = torch.full((1,), begin, dtype=torch.int64, device=key_states.device)
        self.seen = self.codes.write(key_states, value_states, before, slots.capacity)
        self.given = key_states, value_states
        if slots.position is None and begin > 0:
            end = begin + key_states.shape[2]
            keys, values = self.codes.states(self.seen, slots.capacity)
            dtype = key_states.dtype
            self.given = keys.dequantize(dtype, end), values.dequantize(dtype, end)
        return self.given

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int, **options: Any
    ) -> Tensor:
        """Attention of one new token, which `update` wrote to the cache."""
        codes, first = self.codes, self.slots.start
        seen = cast("Tensor", self.seen)
        if window:
            oldest = seen - window
            first = oldest if first is None else torch.maximum(oldest, first)
        return quantized_attention(
            *(query, codes.keys, codes.key_scale, codes.values, codes.value_scale),
            *(seen, codes.value_zero, None, first),
            window=self.slots.capacity,
            **options,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of all slots."""
        return self.codes.tensors()
