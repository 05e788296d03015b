"""QK-clip (Kimi K2, arXiv 2507.20534): shrink the query and key weights of heads whose attention logits grow too large.

Muon's updates have a large spectral norm, and the logits q_i . k_j of some heads grow without bound. After a step, a
head h whose largest logit S_h of that step is above the threshold t is scaled back, so that it would have been t::

    g_h = min(1, t / S_h)
    W_k of a key head  *= sqrt(min of g over the query heads that share it)
    W_q of head h      *= g_h / that factor

With as many key heads as query heads, both are multiplied by sqrt(g_h), as in the paper. Other heads stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowbit.numerics.settings import check_positive
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local, split_as


@torch.no_grad()
def qk_clip_(
    query: nn.Linear, key: nn.Linear, largest: Tensor, *, threshold: float = 100.0
) -> None:
    """Scale the weights (and biases) of one attention layer back, in place; see the module for the formula.

    The logits must be bilinear in the two layers: rotary embeddings between them are fine, norms of queries and keys
    are not, and make the clip unnecessary. The host does not wait for the device.

    Args:
        query: gives the queries, [heads * head size, inputs].
        key: gives the keys, [key heads * head size, inputs]; each is shared by heads / key heads adjacent heads.
        largest: the largest logit of each head since the last clip, over batch, positions and ranks, as it goes into
            softmax: [heads]. A number up to the threshold, NaN or infinity leaves a head as it is.
        threshold: t, above 0.

    Raises:
        ValueError: shapes that don't fit each other, or a threshold that is not above 0.
        TypeError: weights in low bits.
    """
    check_positive("threshold", threshold)
    if not (isinstance(query, nn.Linear) and isinstance(key, nn.Linear)):
        raise TypeError(
            f"query and key must be nn.Linear, got {type(query).__name__} and {type(key).__name__}; their weight alone "
            "may not make the queries and keys: merge adapters of PEFT first, or leave QK-clip out"
        )
    if not isinstance(largest, Tensor):
        raise TypeError(
            f"largest must be a tensor, got {largest!r:.60}; take torch.tensor(largest)"
        )
    heads = largest.numel()
    rows, key_rows = query.weight.shape[0], key.weight.shape[0]
    size = rows // max(heads, 1)
    fits = largest.ndim == 1 and 0 not in (size, key_rows) and rows == heads * size
    if not fits or key_rows % size or heads % (key_rows // size):
        raise ValueError(
            f"largest has shape {tuple(largest.shape)}, query {rows} rows and key {key_rows}: largest holds one number "
            "for each query head, and query and key have the rows of whole heads, the heads a multiple of the key heads"
        )
    weights: list[Tensor] = [query.weight, key.weight]
    for weight in weights:
        if isinstance(local(weight), LowbitTensor):
            raise TypeError(
                f"a weight is a {type(local(weight)).__name__}, which cannot be scaled in place; train query and key "
                "layers in bfloat16 or float32, or leave QK-clip out"
            )
    logits = largest.float()
    factors = torch.where(logits.isfinite() & (logits > threshold), threshold / logits, 1.0).view(
        key_rows // size, -1
    )
    for_key = factors.amin(1).sqrt()
    for_query = (factors / for_key.unsqueeze(1)).view(-1)
    for layer, each in ((query, for_query), (key, for_key)):
        _scale_rows([layer.weight, layer.bias], each.repeat_interleave(size))


def _scale_rows(tensors: Sequence[Tensor | None], factors: Tensor) -> None:
    for tensor in tensors:
        if tensor is not None:
            shaped = factors.to(local(tensor).device).view(-1, *[1] * (tensor.ndim - 1))
            whole = split_as(tensor, shaped.expand(tensor.shape))
            local(tensor).mul_(local(whole))
