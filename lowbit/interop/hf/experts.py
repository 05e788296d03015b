"""What transformers' own forward of stacked experts needs of low-bit weights, where lowbit's forward leaves it the work
(`lowbit.layers.routed_experts`): in float32, and with gradients.

transformers multiplies by an op of its own, which waits for the host, where torch has no grouped product: in graphs
weights that are not bfloat16, and on older GPUs all. Its gradient is another op from 5.23 on, and Python before that.

- Weights of QAT give the op rounded values, as to any operation of a forward pass.
- Frozen weights stay packed for backward (`product`), and have no gradient.
- Weights that train in 8 bits or fewer have no such product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from lowbit.linear.frozen.experts import stacked_product
from lowbit.linear.operands import Kept, rounded_product
from lowbit.tensor.core import LowbitTensor
from lowbit.tensor.core.reading import FORWARD_OPS
from lowbit.tensor.frozen.products import PRODUCTS, rounded_pair
from lowbit.tensor.trained.trainable import TrainableTensor


class _Frozen:
    """The operands of the op: x and frozen experts [E, K, N], whose values backward makes again."""

    def output(
        self, x: Tensor, weight: Any, bias: None, needs: Sequence[bool], offsets: Tensor
    ) -> tuple[Tensor, Kept]:
        y = stacked_product(x, weight, offsets)
        if y is None:
            y = fallback.default(x, weight.dequantize().to(x.dtype), offsets)
        return y, (weight.detach(), offsets)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor, None]:
        weight, offsets = kept
        values = weight.dequantize().to(grad.dtype)
        return fallback.default(grad, values.mT, offsets), None


_FROZEN: Any = _Frozen()


def product(x: Tensor, weight: Any, offs: Tensor) -> Tensor:
    """transformers' op of x [M, K], frozen experts [E, K, N] and the ends of their rows, int [E]."""
    return rounded_product(*rounded_pair(x, weight), None, _FROZEN, offs)


def _product(input: Any, weight: Any, offs: Tensor) -> Tensor | None:
    if isinstance(input, LowbitTensor):
        return None
    if torch.compiler.is_dynamo_compiling():
        from lowbit.interop.hf import experts_in_graph

        return experts_in_graph.product(input, weight, offs)
    return product(input, weight, offs)


def _refused(func: Any, args: Any, kwargs: Any) -> Tensor:
    weight = next(x for x in args if isinstance(x, TrainableTensor))
    raise NotImplementedError(
        f"the grouped product that transformers takes in graphs for {weight.dtype}, of experts that train as "
        f"{type(weight).__name__}; accepted: bfloat16 by model.to(torch.bfloat16), the model without torch.compile, or "
        "a filter_fn that leaves its experts out"
    )


if hasattr(moe, "_grouped_mm_fallback"):  # from transformers 5.3 on
    fallback: Any = torch.ops.transformers.grouped_mm_fallback
    FORWARD_OPS.add(fallback)
    PRODUCTS[fallback] = _product
    TrainableTensor.implements(fallback.default)(_refused)
