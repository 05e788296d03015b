"""What transformers' own forward of stacked experts needs of low-bit weights, where lowbit's forward leaves it the work
(`lowbit.layers.routed_experts`): in float32, and with gradients.

transformers multiplies by an op of its own, which waits for the host, where torch has no grouped product: in graphs
weights that are not bfloat16, and on older GPUs all. Its gradient is another op from 5.23 on, and Python before that.

- Weights of QAT give the op rounded values, as to any operation of a forward pass.
- Frozen weights stay packed for backward, and have no gradient (`lowbit.interop.hf.frozen_experts`).
- Weights that train in 8 bits or fewer have no such product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from lowbit.tensor.core import LowbitTensor
from lowbit.tensor.core.reading import FORWARD_OPS
from lowbit.tensor.frozen.products import PRODUCTS
from lowbit.tensor.trained.trainable import TrainableTensor


def _product(input: Any, weight: Any, offs: Tensor) -> Tensor | None:
    if isinstance(input, LowbitTensor):
        return None
    if torch.compiler.is_dynamo_compiling():
        from lowbit.interop.hf import experts_in_graph

        return experts_in_graph.product(input, weight, offs)
    from lowbit.interop.hf import frozen_experts

    return frozen_experts.product(input, weight, offs)


def _refused(func: Any, args: Any, kwargs: Any) -> Tensor:
    weight = next(x for x in args if isinstance(x, TrainableTensor))
    raise NotImplementedError(
        f"experts that train as {type(weight).__name__} in {weight.dtype} have no product by transformers' op "
        "grouped_mm_fallback, which serves weights other than bfloat16 in graphs, and GPUs before compute capability "
        "8.0; accepted: a newer GPU, and there bfloat16 by model.to(torch.bfloat16) or no torch.compile; or "
        "a filter_fn that leaves its experts out"
    )


if hasattr(moe, "_grouped_mm_fallback"):  # from transformers 5.3 on
    fallback: Any = torch.ops.transformers.grouped_mm_fallback
    FORWARD_OPS.add(fallback)
    PRODUCTS[fallback] = _product
    TrainableTensor.implements(fallback.default)(_refused)
