"""TernaryTensor: a BitNet b1.58 weight for inference, -1, 0 or 1 times one scale, in 2 bits an element.

| tensor | shape                  | dtype                                                                        |
|--------|------------------------|------------------------------------------------------------------------------|
| codes  | [..., N, ceil(K / 4)]  | uint8: code + 2 of four elements, the first in the lowest bits               |
| scale  | [..., 1, 1]            | float32: mean magnitude of the [N, K] matrix                                 |

Its linear (`lowbit.linear.frozen.ternary`) rounds the input to int8 with one scale a token; the sums are exact. The
result equals that of training (`lowbit.tensor.trained.bitnet`) to the bit. The one exception is a bias where the
small-batch kernel reads the 2 bits (`lowbit_kernels.matmul.ternary_mm`).
Source: arXiv 2402.17764.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from lowbit.linear.frozen.ternary import rounded_tokens
from lowbit.numerics.granularity import PerTensor
from lowbit.numerics.number_format import Int
from lowbit.numerics.packing import pack, packed_size, unpack
from lowbit.numerics.spec import Spec
from lowbit.tensor.core import InnerShapes, check_weight, stored_shape
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.requantize import rescale, write_exactly


def magnitude(weight: Tensor) -> Tensor:
    """Sum of the magnitudes of each matrix of `weight` [..., N, K]: float64 [..., 1, 1]. In float64 the order of
    summation, and with it the sharding, changes no bit of the scale."""
    return torch.linalg.vector_norm(weight, 1, (-2, -1), keepdim=True, dtype=torch.float64)


def scale_of(magnitude: Tensor, numel: int) -> Tensor:
    """The mean magnitude of `numel` elements, in float32: positive, or NaN where it is not finite."""
    mean = (magnitude / max(numel, 1)).float()
    scale = mean.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(mean.isfinite(), scale, torch.nan)


def ternarize(weight: Tensor, scale: Tensor) -> Tensor:
    """int8 codes of `weight` [..., N, K]: weight / scale, rounded, in -1 .. 1; 0 under a scale of NaN."""
    codes = (weight.float() / scale).round_().clamp_(-1, 1)
    return codes.nan_to_num_(0.0).to(torch.int8)


def pack_ternary(codes: Tensor) -> Tensor:
    return pack(codes + 2, 2)


def shapes_of_ternary(shape: Sequence[int]) -> InnerShapes:
    """The inner tensors of ternary values [..., N, K]: packed codes, and one scale for each matrix."""
    return {
        "codes": ((*shape[:-1], packed_size(shape[-1], 2)), torch.uint8),
        "scale": ((*shape[:-2], 1, 1), torch.float32),
    }


def unpack_ternary(packed: Tensor, columns: int) -> Tensor:
    return unpack(packed, 2, columns).view(torch.int8) - 2


class TernaryTensor(AffineTensor):
    """A frozen ternary weight; see the module. `lowbit.train.convert_` makes them of a trained BitNet model."""

    tensor_attrs = ("codes", "scale")
    meta_attrs = ("transposed",)

    stored_as = "ternary"
    spec = Spec(Int(2), PerTensor())
    activation = None
    rounds_inputs = True
    zero_point = None

    def __new__(cls, weight: Tensor) -> Self:
        """Ternarize `weight` [..., N, K]; each matrix of a stack has its own scale.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        check_weight(weight)
        tensors = _encoded(weight.detach())
        return cls.from_inner(tensors, {"transposed": False}, weight.shape, weight.dtype)

    def _stored_values(self) -> Tensor:
        """Values [..., N, K] in this tensor's dtype: code · scale."""
        return (self._load(self.shape[-1]) * self.scale).to(self.dtype)

    def rounded_input(self, x: Tensor) -> Tensor:
        """In int8, a scale a token, as in training."""
        return rounded_tokens(x)

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        return shapes_of_ternary(stored_shape(self, shape))

    def requantize_(self, values: Tensor) -> None:
        """Raises NotImplementedError for values that are not a multiple of the present ones. Some values are zero, so
        their mean magnitude is below the scale: rounding would alter even unchanged values."""
        if values.shape == self.shape:
            weight, stored = self._as_stored(values)
            if rescale(weight, stored) or write_exactly(weight, stored):
                return
        raise self._unsupported(
            "changes other than by a positive factor, since all its elements share one scale (call "
            "lowbit.dequantize_(model) before merging into it)"
        )

    def _encode(self, values: Tensor, joint: Tensor | None = None) -> dict[str, Tensor | None]:
        return {**_encoded(values.transpose(-2, -1) if self.transposed else values)}

    def _blocks_along(self, dim: int) -> int:
        """Each matrix has one scale for all its rows and columns."""
        return 0 if dim >= self.ndim - 2 else 1

    def meta_to_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        return {"transposed": False}


def _encoded(weight: Tensor) -> dict[str, Tensor | None]:
    scale = scale_of(magnitude(weight), weight.shape[-2:].numel())
    return {"codes": pack_ternary(ternarize(weight, scale)), "scale": scale}
