"""transformers' op of frozen experts (`lowbit.interop.hf.experts`), with a gradient that keeps them packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.linear.frozen.experts import stacked_product
from lowbit.linear.operands import Kept, rounded_product
from lowbit.tensor.frozen.products import rounded_pair

FALLBACK: Any = torch.ops.transformers.grouped_mm_fallback


class _Frozen:
    """The operands of the op: x and frozen experts [E, K, N], whose values backward makes again."""

    def output(
        self, x: Tensor, weight: Any, bias: None, needs: Sequence[bool], offsets: Tensor
    ) -> tuple[Tensor, Kept]:
        y = stacked_product(x, weight, offsets)
        if y is None:
            y = FALLBACK.default(x, weight.dequantize().to(x.dtype), offsets)
        return y, (weight.detach(), offsets)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor, None]:
        weight, offsets = kept
        values = weight.dequantize().to(grad.dtype)
        return FALLBACK.default(grad, values.mT, offsets), None


_FROZEN: Any = _Frozen()


def product(x: Tensor, weight: Any, offs: Tensor) -> Tensor:
    """transformers' op of x [M, K], frozen experts [E, K, N] and the ends of their rows, int [E]."""
    return rounded_product(*rounded_pair(x, weight), None, _FROZEN, offs)
