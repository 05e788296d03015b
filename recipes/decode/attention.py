"""Attention of one new position over a static cache, as an op of its own, with what comes before it.

The new query and key are turned by their position's angle and the cache takes the new key and value in the same launch
that reads it: four launches less in each block. Only the positions up to the new one count. The op reads their number
on the device, so that one CUDA graph serves every length, and reads no more of the cache than that: a mask over the
whole cache would read all of it, and one block a head, as general attention kernels have with one query, leaves most of
a GPU idle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.llama import rotate


@torch.library.custom_op("lowbit_recipes::attend_next", mutates_args=("keys", "values"))
def attend_next(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """softmax(q · kᵀ / √E) · v over positions 0 to `position`, inclusive: [B, H, 1, E] in query's dtype.

    query [B, H, 1, E], key and value [B, K, 1, E] of the new position, not turned yet, H a multiple of K; cos and sin
    [1, E/2] of it; position int64 [1], below S. Of the caches keys and values [B, K, S, E], contiguous, `position` is
    written.
    """
    if query.is_cuda:
        from recipes.decode.flash_decoding import flash_decode

        return flash_decode(query, key, value, cos, sin, position, keys, values)
    return reference(query, key, value, cos, sin, position, keys, values)


@attend_next.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """The formula with a mask over the whole cache."""
    keys.index_copy_(2, position, rotate(key, cos, sin))
    values.index_copy_(2, position, value)
    mask = torch.arange(keys.shape[2], device=keys.device) <= position
    turned = rotate(query, cos, sin)
    y = F.scaled_dot_product_attention(turned, keys, values, attn_mask=mask[None], enable_gqa=True)
    return y.contiguous()
