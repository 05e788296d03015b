"""What transformers' own forward of stacked experts needs of low-bit weights, where lowbit's forward leaves it the work
(`lowbit.layers.routed_experts`): in float32, and with gradients.

In graphs, transformers multiplies weights that are not bfloat16 by an op of its own, which waits for the host. Weights
of QAT give it rounded values, as to any operation of a forward pass. Frozen ones see it below autograd, and its
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from lowbit.tensor.core.reading import FORWARD_OPS
from lowbit.tensor.frozen.affine_ops import products_of_experts
from lowbit.tensor.frozen.affine_tensor import AffineTensor


def _gradients(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """The gradient of the input, and in place of the frozen weight's, which no caller reads, uninitialised memory."""
    _, weight, offs, grad = args
    values = weight.dequantize().to(grad.dtype)
    return fallback.default(grad, values.transpose(-2, -1), offs), torch.empty_like(values)


if hasattr(moe, "_grouped_mm_fallback"):
    fallback: Any = torch.ops.transformers.grouped_mm_fallback
    backward: Any = torch.ops.transformers.grouped_mm_fallback_backward
    FORWARD_OPS.add(fallback)
    AffineTensor.implements(fallback.default)(products_of_experts)
    AffineTensor.implements(backward.default)(_gradients)
