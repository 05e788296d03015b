"""The attention "lowbit" of transformers: SDPA, and a kernel for one token over the codes of a `KVCache`."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lowbit_kernels.decoding.quantize_to_cache import dequantized, raw
from lowbit_kernels.decoding.quantized_attention import quantized_attention

NAME = "lowbit"


class CachedStates(NamedTuple):
    """Keys or values of a `KVCache` in place of a tensor, from its `update` to the attention.

    Attributes:
        codes, scale, zero: of all slots, as `lowbit_kernels.quantize_to_cache` describes them.
        length: int64 [1], tokens that the cache has seen.
        window: slots in use.
        ring: True if token t is in slot t % window.
        width: channels of a head.
        has_kernel: True if a kernel reads the codes.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    length: Tensor
    window: int
    ring: bool
    width: int
    has_kernel: bool

    def dequantize(self, dtype: torch.dtype, count: int | None = None) -> Tensor:
        """The values of all slots, or of the first `count` where there is no ring: [batch, heads, slots, width], the
        oldest token first. NaN where there is no ring and more tokens came than there are slots, as by the kernel."""
        parts = (self.codes, self.scale, self.zero)
        if self.ring:
            codes, scale, zero = (None if p is None else self._in_order(p) for p in parts)
        else:
            used = self.window if count is None else count
            codes, scale, zero = (None if p is None else p[:, :, :used] for p in parts)
            scale = cast("Tensor", scale).masked_fill(self.length > self.window, torch.nan)
        return dequantized(cast("Tensor", codes), cast("Tensor", scale), zero, self.width).to(dtype)

    def _in_order(self, part: Tensor) -> Tensor:
        slots = torch.arange(self.window, device=part.device)
        order = (slots + self.length * (self.length > self.window)) % self.window
        return raw(part).index_select(2, order).view(part.dtype)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the interface of transformers.

    One token of each sequence over the codes of a `KVCache` runs in a kernel, with no mask or one that is the same for
    all heads. Everything else dequantizes the cache and calls SDPA, or with a softcap or sinks the model's own "eager".

    Args:
        module: the model's attention layer.
        query: [batch, heads, tokens, width].
        key, value: what the cache's `update` returned.
        attention_mask: bool [batch or 1, 1, tokens, slots], or another mask that SDPA takes.
        dropout, scaling, softcap, s_aux, options: those of transformers' attention functions.

    Returns:
        [batch, tokens, heads, width], and None or the weights of "eager".
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, CachedStates) and isinstance(value, CachedStates):
        if key.has_kernel and dropout == 0.0 and _is_one_token(query, attention_mask, options):
            mask = None if attention_mask is None else attention_mask[:, 0, 0]
            found = quantized_attention(
                *(query, key.codes, key.scale, value.codes, value.scale, key.length, value.zero),
                *(mask, None, s_aux),
                scale=scale,
                window=key.window,
                softcap=softcap or 0.0,
                ring=key.ring,
            )
            return found.transpose(1, 2), None
        if attention_mask is None:
            slots = torch.arange(key.window, device=query.device)
            attention_mask = (slots < key.length)[None, None, None]
        key, value = key.dequantize(query.dtype), value.dequantize(query.dtype)
    key, value = cast("Tensor", key), cast("Tensor", value)
    if attention_mask is not None and attention_mask.shape[-1] > key.shape[2]:
        attention_mask = attention_mask[..., : key.shape[2]]  # of a prompt in an empty cache
    options |= {"dropout": dropout, "scaling": scale}
    more = {name: x for name, x in (("softcap", softcap), ("s_aux", s_aux)) if x is not None}
    if more:
        attend = sys.modules[type(module).__module__].eager_attention_forward
        attention_mask = _added(attention_mask, query, key)
    else:
        attend = sdpa_attention_forward
    result = attend(module, query, key, value, attention_mask, **options, **more)
    return cast("tuple[Tensor, Tensor | None]", result)


def _is_one_token(query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """True if the kernel computes this attention."""
    if query.shape[2] != 1 or options.get("position_bias") is not None:
        return False
    return mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1)


def _added(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as "eager" takes it, which adds it to the scores."""
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, least
        )
    return mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
