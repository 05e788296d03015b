"""A static cache of transformers whose keys and values are in 8 or 4 bits.

    int8     scale = bf16(max |x| / 127),  code = round(x / scale)                      x ≈ code · scale
    float8   scale = bf16(max |x| / 448),  code = e4m3(x / scale)                       x ≈ code · scale
    int4     scale = bf16((max x − min x) / 15), zero = bf16(min x), code = round((x − zero) / scale)
                                                                                        x ≈ code · scale + zero

x is the key (after rotation) or the value of one token and head. A head of E channels takes E + 2 bytes in 8 bits and
E / 2 + 4 in 4 bits, for 2 E in 16 bits.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.utils import logging

from lowbit.interop.hf.attention import NAME, CachedStates
from lowbit.interop.hf.invariant import NAME as INVARIANT
from lowbit.numerics.settings import is_whole
from lowbit_kernels.decoding import quantized_attention_sm90
from lowbit_kernels.decoding.quantize_to_cache import quantize_to_cache, raw

logger = logging.get_logger(__name__)

FORMATS = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "int4": torch.uint8}
KEYS, VALUES = ("int8", "float8"), ("int8", "float8", "int4")
STEP = 32
"""Slots of a cache are a multiple of this, and so are the channels of codes."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class KVCache(StaticCache):
    """A static cache in 8 or 4 bits, for `generate(past_key_values=...)` and for a model's forward.

    With the model's attention set to "lowbit", one new token reads the codes themselves, in a kernel on GPUs of compute
    capability 9.0. Other attention functions and other devices read a dequantized copy, one layer at a time.

        model.set_attn_implementation("lowbit")
        cache = KVCache(model.config, max_cache_len=4096)
        model.generate(**inputs, past_key_values=cache, max_new_tokens=200)

    A prompt in an empty cache attends to its own keys and values in high precision; later tokens attend to the codes.
    Sliding-window layers hold a ring of as many tokens as their window has. Shapes and addresses are static, so
    torch.compile and CUDA graphs take the cache.

    Args:
        config: the model's `config`.
        max_cache_len: tokens that a sequence may have. Beyond it the output is NaN.
        keys: "int8" or "float8".
        values: "int8", "float8" or "int4".

    Raises:
        TypeError: `config` or `max_cache_len` is something else.
        ValueError: an unknown format, a `max_cache_len` below 1, or a model with layers that a static cache of keys and
            values does not describe. `update` raises it for another batch size, or for a prompt that is too long.
    """

    def __init__(
        self, config: PreTrainedConfig, max_cache_len: int, keys: str = "int8", values: str = "int8"
    ) -> None:
        for name, got, taken in (("keys", keys, KEYS), ("values", values, VALUES)):
            if got not in taken:
                raise ValueError(f"KVCache takes {name} in {', '.join(taken)}, got {got!r}")
        if not isinstance(config, PreTrainedConfig) or not is_whole(max_cache_len):
            raise TypeError(
                "KVCache takes the config of a model and a length as an int, got "
                f"{type(config).__name__} and {type(max_cache_len).__name__}; call KVCache(model.config, 4096)"
            )
        if max_cache_len < 1:
            raise ValueError(
                f"KVCache(max_cache_len={max_cache_len}) holds no token; give the length of prompt and answer"
            )
        max_cache_len = int(max_cache_len)
        # Tensors of inference mode would take no token outside of it.
        with torch.inference_mode(False):
            super().__init__(config=config, max_cache_len=max_cache_len)
            text = config.get_text_config(decoder=True)
            dtypes = FORMATS[keys], FORMATS[values]
            layers = cast("list[Any]", vars(self)["layers"])
            layers[:] = (_quantized(layer, text, max_cache_len, *dtypes) for layer in layers)
        has_cross_attention = getattr(text, "is_encoder_decoder", False) and len(layers) > 1
        self._latest = -1 if has_cross_attention else None
        """For an encoder-decoder the layer that was updated last: two updates in a row are those of both attentions."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write the new keys and values [batch, heads, tokens, width] of a layer, and return what its attention reads.

        Raises ValueError for an encoder-decoder that got the cache as it is, for both of its attentions.
        """
        if self._latest is not None:
            if layer_idx == self._latest:
                raise ValueError(
                    "KVCache holds the keys and values of a decoder's own attention, and this model writes those of "
                    "its encoder to it too; pass transformers' EncoderDecoderCache(cache, DynamicCache())"
                )
            self._latest = layer_idx
        found: tuple[Any, Any] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return found


def _quantized(
    layer: Any, config: PreTrainedConfig, length: int, keys: torch.dtype, values: torch.dtype
) -> Any:
    """The layer in place of one of `StaticCache`; layers without keys stay."""
    if type(layer) is StaticLayer:
        return QuantizedLayer(length, config, keys, values)
    if type(layer) is StaticSlidingWindowLayer:
        return QuantizedSlidingLayer(layer.max_cache_len, config, keys, values)
    if isinstance(layer, StaticLayer):
        raise ValueError(
            f"KVCache has no form of transformers' {type(layer).__name__}; use StaticCache for this model"
        )
    return layer


class Codes:
    """The memory of a layer's keys and values: codes, scales and zeros of all slots.

    Args:
        key_states, value_states: keys and values of that shape, [batch, heads, any, width], dtype and device.
        tokens: slots; there is memory for the next multiple of `STEP`.
        key_dtype, value_dtype: of the codes.
    """

    def __init__(
        self,
        key_states: Tensor,
        value_states: Tensor,
        tokens: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
    ) -> None:
        batch, heads, _, self.key_width = key_states.shape
        self.value_width = value_states.shape[-1]
        whole = batch, heads, -(-tokens // STEP) * STEP

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((*whole, *shape), dtype=dtype, device=key_states.device)

        def codes(width: int, dtype: torch.dtype) -> Tensor:
            is_4bit = dtype == torch.uint8
            step = STEP if is_4bit else STEP // 2
            return zeros(-(-width // step) * step // (1 + is_4bit), dtype=dtype)

        self.keys = codes(self.key_width, key_dtype)
        self.values = codes(self.value_width, value_dtype)
        self.key_scale, self.value_scale = (zeros(dtype=torch.bfloat16) for _ in range(2))
        has_zero = value_dtype == torch.uint8
        self.value_zero = zeros(dtype=torch.bfloat16) if has_zero else None
        self.has_kernel = self.key_width == self.value_width and quantized_attention_sm90.takes(
            self.keys, self.values, key_states.dtype, self.key_width
        )

    def tensors(self) -> tuple[Tensor, ...]:
        found = (self.keys, self.key_scale, self.values, self.value_scale, self.value_zero)
        return tuple(t for t in found if t is not None)

    def write(
        self, key: Tensor, value: Tensor, length: Tensor, window: int, ring: bool = False
    ) -> Tensor:
        """Write tokens after the first `length`; returns how many there are then. See `quantize_to_cache`."""
        own = (self.keys, self.key_scale, self.values, self.value_scale, length, self.value_zero)
        return quantize_to_cache(key, value, *own, window=window, ring=ring)

    def states(
        self, length: Tensor, window: int, ring: bool = False
    ) -> tuple[CachedStates, CachedStates]:
        """Keys and values of the slots in use, of which `length` tokens have come."""
        common, zero, kernel = (length, window, ring), self.value_zero, self.has_kernel
        return (
            CachedStates(self.keys, self.key_scale, None, *common, self.key_width, kernel),
            CachedStates(self.values, self.value_scale, zero, *common, self.value_width, kernel),
        )


def _outside_inference_mode() -> Any:
    """The context in which tensors are made that take values in every mode; torch.compile does not trace it."""
    is_compiling = torch.compiler.is_compiling()
    return contextlib.nullcontext() if is_compiling else torch.inference_mode(False)


class QuantizedLayer(StaticLayer):
    """Keys and values of one layer as codes; see `KVCache`.

    Args:
        max_cache_len: tokens, for a sliding window those of the window.
        config: of the text model; its attention decides what `update` returns.
        key_dtype, value_dtype: of the codes.
    """

    ring = False
    cumulative_length: Tensor

    def __init__(
        self,
        max_cache_len: int,
        config: PreTrainedConfig,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
    ) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.config, self.key_dtype, self.value_dtype = config, key_dtype, value_dtype
        self.is_empty = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate codes and scales for keys and values of these shapes."""
        if key_states.dtype not in FLOATS:
            raise TypeError(f"KVCache takes keys of {FLOATS}, got {key_states.dtype}")
        if self.config._attn_implementation == INVARIANT:
            raise NotImplementedError(
                "KVCache with a model of lowbit.inference.invariant_, whose prompts would not attend to the codes; "
                "leave past_key_values out, or pass transformers' DynamicCache"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        dtypes = self.key_dtype, self.value_dtype
        with _outside_inference_mode():
            self.codes = Codes(key_states, value_states, self.max_cache_len, *dtypes)
            self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (*self.codes.tensors(), self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)  # so that CUDA graphs need no copies
        if self.device.type == "cuda" and self.config._attn_implementation != NAME:
            logger.warning_once(
                f"KVCache: the attention {self.config._attn_implementation!r} reads a dequantized copy of the cache; "
                "model.set_attn_implementation('lowbit') reads the codes themselves"
            )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write the new keys and values [batch, heads, tokens, width], and return what the attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states)
        reads_codes = self.config._attn_implementation == NAME
        was_empty, self.is_empty = self.is_empty, False
        tokens = key_states.shape[-2]
        whole = self._whole_states(key_states, value_states, was_empty)
        before = self.cumulative_length.view(1)
        seen = self.codes.write(key_states, value_states, before, self.max_cache_len, self.ring)
        self.cumulative_length.add_(tokens)
        if whole is not None:
            return whole
        if reads_codes and was_empty and tokens > 1:
            return key_states, value_states
        key, value = self.codes.states(seen, self.max_cache_len, self.ring)
        if reads_codes and tokens == 1:
            return key, value
        return key.dequantize(key_states.dtype), value.dequantize(value_states.dtype)

    def _check(self, key_states: Tensor) -> None:
        batch, heads, tokens, width = key_states.shape
        made = (self.batch_size, self.num_heads, self.k_head_dim)
        if (batch, heads, width) != made:
            raise ValueError(
                f"this KVCache was made for (batch, heads, width) {made}, got {(batch, heads, width)}; "
                "make a new cache for another batch or model"
            )
        if tokens > self.max_cache_len and not self.ring:
            raise ValueError(
                f"KVCache(max_cache_len={self.max_cache_len}) does not hold {tokens} tokens; give a larger one"
            )

    def _whole_states(
        self, key_states: Tensor, value_states: Tensor, was_empty: bool
    ) -> tuple[Tensor, Tensor] | None:
        """The states that a chunk reads in place of the cache, where the cache can't hold them all; here never."""
        return None

    def reset(self) -> None:
        """Forget all tokens, and keep the memory and its addresses."""
        self.is_empty = True
        self.cumulative_length.zero_()
        if self.is_initialized:
            for tensor in self.codes.tensors():
                raw(tensor).zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each sequence the tokens of sequence `beam_idx[i]`."""
        if self.is_initialized:
            for tensor in map(raw, self.codes.tensors()):
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def crop(self, tokens: int) -> None:
        """Forget tokens, as assisted generation asks.

        Args:
            tokens: below 0: how many are forgotten, the latest first; above 0: how many stay.
        """
        if tokens > 0:
            self.cumulative_length.clamp_(max=tokens)
        else:
            self.cumulative_length.add_(tokens).clamp_(min=0)

    def offload(self) -> None:
        """Refused: the cache stays on its device."""
        raise NotImplementedError("KVCache has no offloading; use StaticCache(offloading=True)")

    prefetch = offload


class QuantizedSlidingLayer(QuantizedLayer):
    """The last tokens of a sliding window, in a ring: token t is in slot t % window. See `QuantizedLayer`."""

    is_sliding = True
    ring = True
    cumulative_length_int = 0
    """Tokens seen; the sizes of masks depend on it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """`QuantizedLayer.update`; a chunk that overfills the window reads the tokens before it too."""
        found = super().update(key_states, value_states)
        self.cumulative_length_int += key_states.shape[-2]
        return found

    def _whole_states(
        self, key_states: Tensor, value_states: Tensor, was_empty: bool
    ) -> tuple[Tensor, Tensor] | None:
        tokens, seen = key_states.shape[-2], self.cumulative_length_int
        if tokens == 1 or seen + tokens <= self.max_cache_len:
            return None
        if was_empty:
            return key_states, value_states
        first, last = (1, None) if seen >= self.max_cache_len else (0, seen)
        cached = self.codes.states(self.cumulative_length.view(1), self.max_cache_len, True)
        old = (x.dequantize(key_states.dtype) for x in cached)
        keys, values = (x[:, :, first:last] for x in old)
        return torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2)

    get_mask_sizes = StaticSlidingWindowLayer.get_mask_sizes

    def crop(self, tokens: int) -> None:
        """Refused once the ring is full: later tokens have replaced those that would come back."""
        left = tokens if tokens > 0 else self.cumulative_length_int + tokens
        if self.cumulative_length_int > self.max_cache_len and left < self.cumulative_length_int:
            raise NotImplementedError(
                f"KVCache does not take back tokens of a sliding window of {self.max_cache_len}; generate without "
                "prompt_lookup_num_tokens and assistant_model, or with transformers' own cache"
            )
        super().crop(tokens)
        self.cumulative_length_int = min(self.cumulative_length_int, max(left, 0))

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.cumulative_length_int

    def reset(self) -> None:
        """Forget all tokens, and keep the memory and its addresses."""
        super().reset()
        self.cumulative_length_int = 0
