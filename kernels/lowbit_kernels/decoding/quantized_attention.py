"""Attention of one new token of each sequence over a cache of keys and values in 8 and 4 bits.

    k[s], v[s]  = codes · scale, in 4 bits codes · scale + zero                      as `quantize_to_cache` wrote them
    a[b, h, s]  = cap(scale · query[b, h] · k[b, h // G, s])                         for the slots s that h sees
    y[b, h]     = sum_s exp(a[b, h, s]) v[b, h // G, s] / (sum_s exp(a[b, h, s]) + exp(sinks[h]))

    cap         softcap · tanh(a / softcap), or a where softcap is 0
    sinks       the last term is 0 without them

    query       float [B, H, 1, E], H a multiple of K, G = H / K
    key_codes, value_codes, key_scale, value_scale, value_zero   as in `quantize_to_cache`
    length      int64 [1] or [B]: tokens that the cache has seen, the new one included
    window      slots in use. In a ring, token t is in slot t % window; without one y is NaN where length > window
    mask        bool [1, M] or [B, M], M >= window: whether the query sees a token. Entry i belongs to the i-th oldest
                token of the cache, so without a ring to slot i. None: it sees all
    first       int64 [1] or [B]: tokens before this position are padding, which the query does not see, or None
    sinks       float [H] or None
    y           query's dtype [B, H, 1, E], 0 where a query sees nothing

The device reads length, mask and first, so one CUDA graph serves all lengths. No slot beyond `length` is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.decoding import quantized_attention_sm90
from lowbit_kernels.decoding.decode_attention import softmax_attention
from lowbit_kernels.decoding.quantize_to_cache import (
    CACHE,
    check_cache,  # noqa: F401 (a rule below calls it)
    dequantized,
)
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only.weight_operands import ALIGNMENT


@op(
    "empty(query.dtype, B, H, 1, E)",
    flops="4 * B * H * window * E",
    query="float [B, H, 1, E]; one token of each sequence",
    **CACHE,
    mask="bool [...]",
    first="int64 [1] or [B]",
    sinks="float [H]",
    rules={
        "H % K == 0": "heads must be a multiple of the key/value heads, got {H} and {K}",
        "0 < window <= S": "window must be from 1 to the {S} slots of the cache, got {window}",
        "mask is None or (mask.dim() == 2 and mask.shape[0] in (1, B) and mask.shape[1] >= window)": (
            "mask must be [1 or {B}, M] with an entry for each of the {window} slots, got {tuple(mask.shape)}"
        ),
        "check_cache((key_codes, key_scale, None, E), (value_codes, value_scale, value_zero, E))": "",
    },
)
def quantized_attention(
    query: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    length: Tensor,
    value_zero: Tensor | None = None,
    mask: Tensor | None = None,
    first: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
    ring: bool = False,
) -> Tensor:
    """Attention over a quantized cache; see the module's docstring."""
    batch, width = query.shape[0], query.shape[3]
    slots = torch.arange(window, device=query.device)
    oldest = (length % window)[:, None] * (length > window)[:, None]
    age = (slots - oldest) % window  # [1 or B, window]; 0: the oldest token
    count = length.clamp(max=window)[:, None]
    seen = (slots < count).expand(batch, -1)
    if first is not None:
        seen = seen & (age >= first[:, None] - (length[:, None] - count))
    if mask is not None:
        seen = seen & mask.expand(batch, -1).gather(1, age.expand(batch, -1))
    keys = dequantized(key_codes[:, :, :window], key_scale[:, :, :window], None, width)
    zero = None if value_zero is None else value_zero[:, :, :window]
    values = dequantized(value_codes[:, :, :window], value_scale[:, :, :window], zero, width)
    y = softmax_attention(query, keys, values, seen[:, None, None], scale, softcap, sinks)
    if not ring:
        y = torch.where((length > window)[:, None, None, None], torch.nan, y)
    return y.to(query.dtype)


reference = quantized_attention.reference


@quantized_attention.kernel
def _launch(query: Tensor, *given: Any) -> Tensor | None:
    """The kernel for compute capability 9.0 where it takes the operands and the TMA reads the caches, else the
    formula."""
    cache, options = given[:9], given[9:]
    key_codes, key_scale, value_codes, value_scale, _, value_zero, *_ = cache
    if not quantized_attention_sm90.takes(key_codes, value_codes, query.dtype, query.shape[3]):
        return None
    parts = (key_codes, key_scale, value_codes, value_scale, value_zero)
    if any(t is not None and t.data_ptr() % ALIGNMENT for t in parts):
        return None
    ran("quantized_attention", "sm90")
    return quantized_attention_sm90.attend(query, cache, *options)
