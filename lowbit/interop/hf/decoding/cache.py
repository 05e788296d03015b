"""The cache of `lowbit.hf.generate`, and the attention over it that transformers' models call.

A model calls `cache.update(key, value, layer)` and then the attention function by the name in its config. While it
reads a prompt, `update` stores the keys and values and returns all so far. For one new token the op `decode_attention`
stores them too, since it has them in registers, so `update` returns the new ones alone. The attention function gets
no cache; it finds the one that `reading` names.

Slot j of the cache holds token j of the padded sequence. Padding stands on the left: sequence b begins at slot
`start[b]`. All layers keep all slots, those with a sliding window too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from lowbit.interop.hf.decoding.refused import refused
from lowbit.linear.frozen.checks import autocast_dtype
from lowbit_kernels.decoding.decode_attention import attention as prompt_attention
from lowbit_kernels.decoding.decode_attention import decode_attention

NAME = "lowbit_decoding"
"""The attention implementation, as configs name it."""
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The argument by which models take a cache: the first from transformers 5.24 on."""
SCORE_BYTES = 2**28
"""Bytes of the scores that a part of a prompt may take where no kernel avoids them."""

_current: ContextVar[SlotCache] = ContextVar("_current")


@dataclass
class Slots:
    """The number of slots of a cache, and which of them are in use. All layers share them.

    ``filled``: slots in use, on the host, while a prompt is read. ``position``: int64 [1], the slot of the one new
    token, and None while a prompt is read. ``start``: int64 [batch], the first slot of each sequence; None for 0.
    """

    capacity: int
    filled: int = 0
    position: Tensor | None = None
    start: Tensor | None = None


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer: [batch, heads, capacity, width]."""

    is_compileable = True

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots
        self.given: tuple[Tensor, Tensor] | None = None
        """What the last `update` returned."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, _ = key_states.shape
        shape = (batch, heads, self.slots.capacity)
        with _disable_current_modes():  # real tensors, also where the forward is traced
            # Zeros, since the kernel multiplies unused slots of a block by 0.
            self.keys, self.values = (
                t.new_zeros((*shape, t.shape[-1])) for t in (key_states, value_states)
            )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key_states, value_states = autocast(key_states), autocast(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.slots.position is None:
            begin, end = self.slots.filled, self.slots.filled + key_states.shape[2]
            self.keys[:, :, begin:end] = key_states
            self.values[:, :, begin:end] = value_states
            self.given = self.keys[:, :, :end], self.values[:, :, :end]
        else:
            self.given = key_states, value_states
        return self.given

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int, **options: Any
    ) -> Tensor:
        """Attention of one new token, whose key and value `update` returned, over the cache. `options`: scale, softcap
        and sinks."""
        return decode_attention(
            *(query, key, value, self.keys, self.values),
            *(cast("Tensor", self.slots.position), self.slots.start),
            window=window,
            **options,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of all slots."""
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.capacity, 0

    def get_seq_length(self) -> Any:
        position = self.slots.position
        return self.slots.filled if position is None else position[0]

    def get_max_length(self) -> int:
        return self.slots.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.13


def autocast(t: Tensor) -> Tensor:
    """A query, key or value in the dtype in which autocast gives it to SDPA."""
    return t.to(autocast_dtype(t.device.type) or t.dtype)


class SlotCache(Cache):
    """The keys and values of all layers in slots of fixed addresses."""

    def __init__(
        self, model: Any, capacity: int, layer: Callable[[Slots], SlotLayer] = SlotLayer
    ) -> None:
        self.slots = Slots(capacity)
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[layer(self.slots) for _ in range(count)])
        configs = {
            id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)
        }
        self.configs = list(configs.values())
        self.is_checked = False
        """True once a prompt has been read: `_mask` then knows the masks of the model."""

    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(t.nbytes for own in self.layers if own.is_initialized for t in own.tensors())

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let the model call this module's attention, over this cache."""
        before = [config._attn_implementation for config in self.configs]
        token = _current.set(self)
        try:
            for config in self.configs:
                config._attn_implementation_internal = NAME
            yield
        finally:
            for config, name in zip(self.configs, before, strict=True):
                config._attn_implementation_internal = name
            _current.reset(token)


# ---- masks ---------------------------------------------------------------------------------------------------------


class NoTensorError(ValueError, AttributeError):
    """What code gets that takes a `Causal` for a tensor; `hasattr` still answers False."""


@dataclass(frozen=True)
class Causal:
    """A causal mask, with a window of so many positions unless it is 0. It stands for the tensor in a model's code,
    which may only hand it on to the attention.

    ``is_taken``: False for another mask. A model may make one that none of its layers reads.
    """

    window: int = 0
    is_taken: bool = True

    def __getattr__(self, name: str) -> Any:
        raise NoTensorError(refused("the attention of this model", f"it reads {name} of its mask"))

    def __getitem__(self, key: Any) -> Any:
        raise refused("the attention of this model", "it reads a part of its mask")


def _mask(
    *,
    mask_function: Callable[..., Any],
    q_length: int,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Causal:
    """The mask that a model asks transformers for."""
    window = local_size or 0
    is_checked = _current.get().is_checked
    return Causal(
        window, is_checked or (not use_vmap and _is_causal(mask_function, window, device))
    )


def _is_causal(mask_function: Callable[..., Any], window: int, device: Any) -> bool:
    """True if the function of (batch, head, query, key) is the causal mask, as far as some pairs tell."""
    with _disable_current_modes():  # the host reads the result
        try:
            return _agrees(mask_function, window, device)
        except IndexError:
            # it looks up each position of the prompt, such as the image that it belongs to
            return False


def _agrees(mask_function: Callable[..., Any], window: int, device: Any) -> bool:
    reach = window or 64
    near = (-1, 0, 1)
    queries = sorted({max(n * reach + d, 0) for n in (0, 1, 2, 3) for d in (*near, reach // 2)})
    q = torch.tensor(queries, device=device)[:, None]
    behind = torch.tensor([0, 1, 2, reach - 1, reach, reach + 1, 2 * reach, -1, -2], device=device)
    k = (q - behind).clamp(min=0)
    zero = torch.zeros_like(k)
    expected = k <= q
    if window:
        expected = expected & (k > q - window)
    return torch.equal(mask_function(zero, zero, q.expand_as(k), k), expected)


# ---- attention -----------------------------------------------------------------------------------------------------


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """What a model of transformers calls: [batch, queries, heads, width], and no weights."""
    own = _current.get()
    layer = own.layers[module.layer_idx]
    given = layer.given
    if not isinstance(attention_mask, Causal) or position_bias is not None:
        raise refused("the attention of this model", "its mask or bias is its own tensor")
    if not attention_mask.is_taken:
        raise refused(
            "the attention mask of this model", "it is neither causal nor a causal sliding window"
        )
    if given is None or key is not given[0] or value is not given[1]:
        raise refused(
            "the attention of this model",
            "it does not read what the cache returned, as multi-head latent attention does not",
        )
    if dropout:
        raise refused("an attention layer in training mode", "call model.eval() first")
    if key.shape[-1] != value.shape[-1]:
        raise refused("the attention of this model", "keys and values differ in width")
    layer.given = None
    query = autocast(query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if own.slots.position is not None:
        options = {"scale": scale, "softcap": softcap or 0.0, "sinks": s_aux}
        y = layer.attend(query, key, value, attention_mask.window, **options)
    else:
        y = _of_prompt(query, key, value, own.slots, attention_mask.window, scale, softcap, s_aux)
    return y.transpose(1, 2).contiguous(), None


def _of_prompt(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Slots,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the tokens from slot `slots.filled` on over all slots up to them: [batch, heads, tokens, width]."""
    count, used = query.shape[2], keys.shape[2]
    is_plain = slots.start is None and slots.filled == 0 and (not window or used <= window)
    if is_plain and not softcap and sinks is None:
        return prompt_attention(query, keys, values, None, scale)
    row = query.shape[0] * query.shape[1] * used * 4
    step = max(SCORE_BYTES // row, 1) if softcap or sinks is not None else count
    key_at = torch.arange(used, device=query.device)
    found = []
    for begin in range(0, count, step):
        part = query[:, :, begin : begin + step]
        query_at = torch.arange(begin, begin + part.shape[2], device=query.device)[:, None]
        query_at = query_at + slots.filled
        seen = key_at <= query_at
        if window:
            seen = seen & (key_at > query_at - window)
        seen = seen[None, None]
        if slots.start is not None:
            # Padding sees itself: a row without any key would be NaN, which later rows would multiply by 0.
            seen = (seen & (key_at >= slots.start[:, None, None, None])) | (key_at == query_at)
        found.append(prompt_attention(part, keys, values, seen, scale, softcap or 0.0, sinks))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
