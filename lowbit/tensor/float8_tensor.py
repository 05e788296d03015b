"""Float8Tensor: float8 values (e4m3 or e5m2) with a scale for each block.

x̂ = value · scale with scale = max|x| / 448 (e4m3; 57,344 for e5m2). Codes are stored as the float8 dtype itself,
in the logical shape padded to whole blocks. All else is as in `AffineTensor`, without a zero point.

Scales of `PerBlock` are float32 whatever the weight's dtype, as checkpoints of DeepSeek-V3 have them (arXiv 2412.19437)
and as the products of blocks read them. One scale is shared by thousands of elements, so its bytes do not count.
Source: Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

import torch

from lowbit.granularity import PerBlock
from lowbit.scheme import Float8, Spec
from lowbit.tensor.affine_tensor import AffineTensor


class Float8Tensor(AffineTensor):
    """A weight in float8; make one with `Float8Tensor.from_float(weight, Float8WeightOnly())`."""

    stored_as = "float8"

    @classmethod
    def stores(cls, spec: Spec) -> bool:
        return isinstance(spec.format, Float8)

    @classmethod
    def scale_dtype(cls, spec: Spec, dtype: torch.dtype) -> torch.dtype:
        in_blocks = isinstance(spec.granularity, PerBlock)
        return torch.float32 if in_blocks else super().scale_dtype(spec, dtype)
