"""What transformers' own forward of stacked experts needs of low-bit weights, where lowbit's forward leaves it the work
(`lowbit.layers.routed_experts`): in float32, and with gradients.

In graphs, transformers multiplies weights that are not bfloat16 by an op of its own, which waits for the host.
"""

from __future__ import annotations

import torch
from transformers.integrations import moe

from lowbit.tensor.frozen.affine_ops import products_of_experts
from lowbit.tensor.frozen.affine_tensor import AffineTensor

if hasattr(moe, "_grouped_mm_fallback"):
    fallback = torch.ops.transformers.grouped_mm_fallback.default
    AffineTensor.implements(fallback)(products_of_experts)
