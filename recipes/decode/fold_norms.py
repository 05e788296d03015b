"""Weights of norms, folded into the linears that read them.

    (factor · x ∘ w) Aᵀ = factor · x (A ∘ w)ᵀ     factor = 1 / sqrt(mean(x²) + eps), w of each column

A norm without a weight multiplies a position by one number, which can as well come after the linears. What they give is
then as large as x makes it, which bfloat16 and float32 have room for; float16 may not.
"""

from __future__ import annotations

import torch
from torch import nn

from recipes.llama import Block, Llama

NORMS = ("attention_norm", "mlp_norm")


@torch.no_grad()
def fold_norms_(model: Llama) -> None:
    """Multiply the columns of query, key, value, gate and up by the weight of the norm before them, and drop it.

    In place, before quantizing; what the model computes stays, but for roundings. Norms without a weight stay too.
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        _fold(block, NORMS[0], (attention.query, attention.key, attention.value))
        _fold(block, NORMS[1], (mlp.gate, mlp.up))


def _fold(block: Block, name: str, linears: tuple[nn.Linear, ...]) -> None:
    norm = getattr(block, name)
    if norm.weight is None:
        return
    for linear in linears:
        linear.weight.mul_(norm.weight)
    bare = nn.RMSNorm(norm.normalized_shape, norm.eps, elementwise_affine=False)
    setattr(block, name, bare.train(norm.training))


def are_folded(model: Llama) -> bool:
    """Whether no block's norm has a weight."""
    return all(getattr(block, name).weight is None for block in model.blocks for name in NORMS)
