"""The operations of a decode step between its linears: attention, silu times up, the last norm, the next token.

For one new token each of them costs about one launch, so there are few of them. RMS norm multiplies a token by one
factor and by its weight. `fold_norms_` has moved the weights into the linears, which take x unnormalized; the operation
after them computes the factor while they run. The attention launch also rotates the new query and key and writes the
cache. On a GPU with programmatic dependent launch, a launch starts while the previous one ends. Above all, the linear
after it sets itself up during that time.

Attention covers the positions up to the new one. The op reads their number on the device, so one CUDA graph serves
every length, and it reads only that part of the cache. A mask over the whole cache would read all of it. General
attention kernels with one query use one block a head, which leaves most of a GPU idle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.llama import rotate


def rms_factor(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps) over the last dimension, which is kept: float32."""
    return (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()


@torch.library.custom_op("lowbit_recipes::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    x: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """softmax(q · kᵀ / √E) · v over positions 0 to `position`, inclusive: [B, H, 1, E] in query's dtype.

    query, key and value are linear in x before its norm, so each is multiplied by 1 / sqrt(mean(x²) + eps). The op
    writes `position` of the caches. With overlapping launches (compute capability 9.0 and above), x, `position` and
    the caches must be older than the previous launch, which made the query: the op reads them while that launch runs.

    Args:
        query: [B, H, 1, E] of the new token, before rotation; H is a multiple of K.
        key: [B, K, 1, E] of the new token, before rotation.
        value: [B, K, 1, E] of the new token.
        x: [B, 1, D], contiguous: the input of the block's norm.
        eps: the norm adds it to the mean square.
        cos: [S or more, E/2], contiguous: cosines of the rotary angles of all positions.
        sin: the sines of the same angles.
        position: int64 [1], below S.
        keys: cache [B, K, S, E], contiguous.
        values: cache [B, K, S, E], contiguous.
    """
    if query.is_cuda:
        from recipes.decode import kernels

        return kernels.decode_attention(query, key, value, x, eps, cos, sin, position, keys, values)
    return reference(query, key, value, x, eps, cos, sin, position, keys, values)


@decode_attention.register_fake
def _(query: Tensor, *_others: Tensor) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    x: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """The formula with a mask over the whole cache. It takes the arguments of `decode_attention`."""
    cos, sin, factor = cos[position], sin[position], rms_factor(x, eps)[:, None]
    query, key, value = ((t * factor).to(t.dtype) for t in (query, key, value))
    keys.index_copy_(2, position, rotate(key, cos, sin))
    values.index_copy_(2, position, value)
    mask = torch.arange(keys.shape[2], device=keys.device) <= position
    rotated = rotate(query, cos, sin)
    y = F.scaled_dot_product_attention(rotated, keys, values, attn_mask=mask[None], enable_gqa=True)
    return y.contiguous()


@torch.library.custom_op("lowbit_recipes::silu_mul", mutates_args=())
def silu_mul(gate: Tensor, up: Tensor, x: Tensor, eps: float) -> Tensor:
    """silu(gate) · up, computed in float32: [B, 1, F] in gate's dtype, contiguous (SwiGLU, arXiv 2002.05202).

    x must be older than the launch that made gate and up, as in `decode_attention`.

    Args:
        gate: [B, 1, F], linear in x before its norm.
        up: [B, 1, F], linear in x before its norm.
        x: [B, 1, D], contiguous.
        eps: the norm adds it to the mean square.
    """
    if not gate.is_cuda:
        factor = rms_factor(x, eps)
        return (F.silu(gate * factor) * (up * factor)).to(gate.dtype).contiguous()
    from recipes.decode import kernels

    return kernels.silu_mul(gate, up, x, eps)


@silu_mul.register_fake
def _(gate: Tensor, up: Tensor, x: Tensor, eps: float) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("lowbit_recipes::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension: RMS norm (arXiv 1910.07467), computed in float32.

    x [..., D], weight [D]; the result is contiguous, in x's dtype.
    """
    if not x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps).contiguous()
    from recipes.decode import kernels

    return kernels.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("lowbit_recipes::next_token", mutates_args=("token", "position"))
def next_token(logits: Tensor, token: Tensor, position: Tensor) -> None:
    """Write the most likely token (the first of equal ones) to `token`, and increment `position`.

    logits [B, 1, V], token int64 [B, 1], position int64 [1].
    """
    if logits.is_cuda:
        from recipes.decode import kernels

        kernels.argmax_token(logits, token, position)
    else:
        token.copy_(logits.argmax(-1))
        position.add_(1)


@next_token.register_fake
def _(logits: Tensor, token: Tensor, position: Tensor) -> None:
    return None
