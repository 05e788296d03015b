"""What a block does with one new position between its linears, as ops of their own: attention, silu times up; then the
last norm, and the choice of the next token.

With one position each of them takes as long as a launch does, so there are few. RMS norm multiplies a position by one
number, and a weight, which `fold_norms_` has put into the linears: they take x as it is, and what follows them computes
the number, while they run. The new query and key are turned by their position's angle and the cache takes the new key
and value in the same launch that reads it. On a GPU that can, a launch begins while the one before it ends; above all
the linear after it, which sets itself up meanwhile.

Only the positions up to the new one count in attention. The op reads their number on the device, so that one CUDA graph
serves every length, and reads no more of the cache than that: a mask over the whole cache would read all of it, and one
block a head, as general attention kernels have with one query, leaves most of a GPU idle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.llama import rotate


def factor_of(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps) over the last dimension, which is kept: float32."""
    return (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()


@torch.library.custom_op("lowbit_recipes::attend_next", mutates_args=("keys", "values"))
def attend_next(
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

    query [B, H, 1, E], key and value [B, K, 1, E] of the new position, H a multiple of K, not turned yet, and made from
    x [B, 1, D] before its norm: each counts times 1 / sqrt(mean(x²) + eps). cos and sin [S or more, E/2] of all
    positions; position int64 [1], below S; x, cos and sin contiguous. Of the caches keys and values [B, K, S, E],
    contiguous, `position` is written. Where launches overlap (compute capability 9.0 and above), x, `position` and what
    the caches hold must be older than the launch before this one, which made the new query: they are read while it
    runs.
    """
    if query.is_cuda:
        from recipes.decode.attention import flash_decode

        return flash_decode(query, key, value, x, eps, cos, sin, position, keys, values)
    return reference(query, key, value, x, eps, cos, sin, position, keys, values)


@attend_next.register_fake
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
    """The formula with a mask over the whole cache."""
    cos, sin, factor = cos[position], sin[position], factor_of(x, eps)[:, None]
    query, key, value = ((t * factor).to(t.dtype) for t in (query, key, value))
    keys.index_copy_(2, position, rotate(key, cos, sin))
    values.index_copy_(2, position, value)
    mask = torch.arange(keys.shape[2], device=keys.device) <= position
    turned = rotate(query, cos, sin)
    y = F.scaled_dot_product_attention(turned, keys, values, attn_mask=mask[None], enable_gqa=True)
    return y.contiguous()


@torch.library.custom_op("lowbit_recipes::gate_next", mutates_args=())
def gate_next(gate: Tensor, up: Tensor, x: Tensor, eps: float) -> Tensor:
    """silu(gate) · up, computed in float32: [B, 1, F] in gate's dtype, contiguous (SwiGLU, arXiv 2002.05202).

    gate and up [B, 1, F] are made from x [B, 1, D], contiguous, before its norm, which must be older than the launch
    that made them: as for `attend_next`.
    """
    if not gate.is_cuda:
        factor = factor_of(x, eps)
        return (F.silu(gate * factor) * (up * factor)).to(gate.dtype).contiguous()
    from recipes.decode.kernels import gate_rows

    return gate_rows(gate, up, x, eps)


@gate_next.register_fake
def _(gate: Tensor, up: Tensor, x: Tensor, eps: float) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("lowbit_recipes::norm_next", mutates_args=())
def norm_next(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension: RMS norm (arXiv 1910.07467), computed in float32.

    x [..., D], weight [D]; the result is contiguous, in x's dtype.
    """
    if not x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps).contiguous()
    from recipes.decode.kernels import norm_rows

    return norm_rows(x, weight, eps)


@norm_next.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("lowbit_recipes::choose_next", mutates_args=("token", "position"))
def choose_next(logits: Tensor, token: Tensor, position: Tensor) -> None:
    """The most likely token, of equal ones the first, takes the place of `token`, and `position` goes on by one.

    logits [B, 1, V], token int64 [B, 1], position int64 [1].
    """
    if logits.is_cuda:
        from recipes.decode.kernels import choose_rows

        choose_rows(logits, token, position)
    else:
        token.copy_(logits.argmax(-1))
        position.add_(1)


@choose_next.register_fake
def _(logits: Tensor, token: Tensor, position: Tensor) -> None:
    return None
