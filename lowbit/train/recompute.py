"""The values that a training step keeps for the backward pass; it computes the others again.

A linear with low-bit products keeps its input as codes, one byte an element. The operations between two products keep
their own inputs in high precision: a SwiGLU its gate and its up projection, an RMSNorm the residual stream. So the
codes can be computed again from tensors that are kept anyway. `keep_products` recomputes everything between the
products, by PyTorch's selective activation checkpointing.

For one block of a Llama, in bytes a token (D the model's width, H the width of its SwiGLU; attention with as many key
and value heads as query heads):

    codes of the four inputs of linears                    3 D + H     computed again
    a norm that a plain linear reads as well               2 D         computed again
    residual stream (twice), query, key, value, attention  12 D        kept
    gate and up projection                                 4 H         kept
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"),
    *("aten::_int_mm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"),
    *("lowbit::scaled_mm", "lowbit::block_scaled_mm", "lowbit::grouped_scaled_mm"),
    "lowbit::grouped_block_mm",
    *("lowbit::linear_output", "lowbit::ternary_mm", "lowbit::weight_linear"),
    *("lowbit::grouped_linear", "lowbit::expert_linear", "lowbit::dynamic_linear"),
}
"""Operators whose results are kept, besides those of attention."""
ATTENTION = "aten::_scaled_dot_product_"


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint` that keeps the results of matrix products and attention.

    Norms, activation functions, rotations and the codes of low-bit products run again in the backward pass; products do
    not. So a step takes a few percent longer. Gradients have the same bits as without checkpointing::

        y = checkpoint(block, x, use_reentrant=False, context_fn=lowbit.train.keep_products)

    Works with and without torch.compile. The checkpointed function must not change tensors in place, as PyTorch
    requires of selective checkpointing.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().split(".")[0]
    kept = name in PRODUCTS or name.startswith(ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
