"""The attention "lowbit_invariant" of transformers, which `lowbit.inference.invariant_` gives a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from lowbit.layers.invariant import attention

NAME = "lowbit_invariant"


def invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention by the interface of transformers: [batch, tokens, heads, width], and no weights.

    Raises NotImplementedError for dropout, a soft cap, sinks, a bias of positions, and a mask of floats.
    """
    refused = {
        "dropout": dropout or None,
        "softcap": options.get("softcap"),
        "sinks (s_aux)": options.get("s_aux"),
        "position_bias": options.get("position_bias"),
        "a paged cache": options.get("cache"),
    }
    for what, given in refused.items():
        if given is not None:
            raise NotImplementedError(
                f"{type(module).__name__}: invariant attention has no {what}, got {given!r}; leave it out, or use the "
                "model without lowbit.inference.invariant_"
            )
    if attention_mask is not None:
        if attention_mask.dtype.is_floating_point:
            raise NotImplementedError(
                f"{type(module).__name__}: invariant attention takes a mask of bool, got {attention_mask.dtype}; pass "
                "attention_mask [batch, tokens] to the model"
            )
        attention_mask = attention_mask[..., : key.shape[2]]  # of a prompt in an empty cache
    own = getattr(module, "is_causal", True) if is_causal is None else is_causal
    tokens = query.shape[2]
    if own and attention_mask is None and tokens > 1:  # a prompt, at the beginning of the cache
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    y = attention(
        query, key, value, attention_mask, is_causal=own and attention_mask is None, scale=scaling
    )
    return y.transpose(1, 2), None


def set_attention(model: nn.Module) -> None:
    """Let all models of transformers in `model` attend by this function."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation(NAME)


AttentionInterface.register(NAME, invariant_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
