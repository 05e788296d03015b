"""Attention of one new position over a static cache, as an op of its own.

Only the positions up to the present one count. The op reads the number of them on the device, so that one CUDA graph
serves every length, and reads no more of the cache than that: a mask over the whole cache would read all of it, and
one block a head, as general attention kernels have with one query, leaves most of a GPU idle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("lowbit_recipes::attend_last", mutates_args=())
def attend_last(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """softmax(q · kᵀ / √E) · v over positions 0 to `position`, inclusive: [B, H, 1, E] in query's dtype.

    query [B, H, 1, E]; keys and values [B, K, S, E], contiguous, H a multiple of K; position int64 [1], below S.
    """
    if query.is_cuda:
        from recipes.decode.flash_decoding import flash_decode

        return flash_decode(query, keys, values, position)
    return reference(query, keys, values, position)


@attend_last.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def reference(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """The formula with a mask over the whole cache."""
    mask = torch.arange(keys.shape[2], device=keys.device) <= position
    y = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask[None], enable_gqa=True)
    return y.contiguous()
