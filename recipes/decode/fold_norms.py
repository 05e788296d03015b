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

    In place, before quantizing and fusing; what the model computes stays, but for roundings. Norms that have no weight
    stay too.

    Raises:
        ValueError: a linear's weight is quantized, of several linears at once, or float16. Nothing is changed then.
    """
    readers = [(block, *reader) for block in model.blocks for reader in _readers(block)]
    readers = [reader for reader in readers if getattr(reader[0], reader[1]).weight is not None]
    for _, _, linears in readers:
        for linear in linears:
            _check(linear)
    for block, name, linears in readers:
        _fold(block, name, linears)


def _readers(block: nn.Module) -> list[tuple[str, tuple[nn.Linear, ...]]]:
    """A block's norms, and the linears that read each."""
    assert isinstance(block, Block)
    attention, mlp = block.attention, block.mlp
    linears = ((attention.query, attention.key, attention.value), (mlp.gate, mlp.up))
    return list(zip(NORMS, linears, strict=True))


def _check(linear: nn.Module) -> None:
    weight = linear.weight
    if type(linear) is not nn.Linear or type(weight.data) is not torch.Tensor:
        kind = f"a {type(linear).__name__} of {type(weight.data).__name__}"
        raise ValueError(
            f"norms are folded into plain linears, got {kind}; fold first, then quantize or fuse"
        )
    if weight.dtype == torch.float16:
        raise ValueError(
            "what the linears give may overflow float16; take the model in bfloat16 or float32"
        )


def _fold(block: nn.Module, name: str, linears: tuple[nn.Linear, ...]) -> None:
    norm = getattr(block, name)
    for linear in linears:
        linear.weight.mul_(norm.weight)
    bare = nn.RMSNorm(norm.normalized_shape, norm.eps, elementwise_affine=False)
    setattr(block, name, bare.train(norm.training))


def are_folded(model: Llama) -> bool:
    """Whether no block's norm has a weight."""
    return all(getattr(block, name).weight is None for block in model.blocks for name in NORMS)
