"""Float8Tensor: float8 values (e4m3 or e5m2) with a scale for each block.

x̂ = value · scale with scale = max|x| / 448 (e4m3; 57,344 for e5m2). Codes are stored as the float8 dtype itself,
in the logical shape padded to whole blocks. All else is as in `AffineTensor`, without a zero point.
Source: Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

from lowbit.scheme import Float8, Spec
from lowbit.tensor.affine_tensor import AffineTensor


class Float8Tensor(AffineTensor):
    """A weight in float8; make one with `Float8Tensor.from_float(weight, Float8WeightOnly())`."""

    stored_as = "float8"

    @classmethod
    def stores(cls, spec: Spec) -> bool:
        return isinstance(spec.format, Float8)
