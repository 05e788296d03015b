"""Float8Tensor: float8 values (e4m3 or e5m2) with a scale for each block.

x̂ = value · scale with scale = max|x| / 448 (e4m3; 57,344 for e5m2). Codes are stored as the float8 dtype itself,
in the logical shape padded to whole blocks. All else is as in `AffineTensor`, without a zero point.

With the scale format "e8m0" (MXFP8; the blocks of DeepSeek-V3.1) scales are powers of two in uint8, as
`lowbit.numerics.scale_format` stores them. Other scales of `PerBlock` are float32 whatever the weight's dtype, as
checkpoints of DeepSeek-V3 have them (arXiv 2412.19437) and as the products of blocks read them. One scale is shared by
thousands of elements, so its bytes do not count.
Source: Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.granularity import PerBlock
from lowbit.numerics.number_format import Float8
from lowbit.numerics.packing import as_bytes
from lowbit.numerics.spec import Spec
from lowbit.schemes.presets import MXFP8WeightOnly
from lowbit.tensor.frozen.affine_tensor import AffineTensor

E4M3 = torch.float8_e4m3fn
SCALE_OF_BLOCKS = "weight_scale_inv"
"""The name of the scales beside "weight" in checkpoints with blocks. Despite the name they multiply."""


MXFP8 = MXFP8WeightOnly().weight
"""MXFP8: e4m3 and a power of two for each 32 inputs. `Spec.same_values` does not ask how powers were chosen."""


def is_mxfp8(spec: Spec) -> bool:
    return MXFP8.same_values(spec)


class Float8Tensor(AffineTensor):
    """A weight in float8; make one with `Float8Tensor.from_float(weight, Float8WeightOnly())`."""

    stored_as = "float8"

    @classmethod
    def stores(cls, spec: Spec) -> bool:
        return isinstance(spec.format, Float8)

    @classmethod
    def from_blocks(
        cls,
        values: Tensor,
        scale: Tensor,
        block: tuple[int, int],
        dtype: torch.dtype,
        activation: Spec | None = None,
    ) -> Self:
        """A weight from float8 values and scales of blocks, as checkpoints have them.

        Args:
            values: float8 [..., N, K].
            scale: [..., N/a rounded up, K/b rounded up], of a floating dtype, stored as float32; or float8_e8m0fnu,
                or its bits in uint8, for a weight whose scales stay powers of two (`scale_format="e8m0"`).
            block: (a, b), the rows and columns of a block.
            dtype: of the weight.
            activation: how products round their inputs; None: not at all.

        Raises ValueError for scales of another shape or dtype, and for blocks so much larger than the weight that
        padding would prevail.
        """
        if scale.dtype is torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        are_powers = scale.dtype is torch.uint8
        if not are_powers and not scale.is_floating_point():
            raise ValueError(f"scales of {scale.dtype}; accepted: floating-point numbers")
        spec = Spec(Float8(values.dtype), PerBlock(*block))
        if are_powers:
            spec = replace(spec, mapping="symmetric_no_clipping_err", scale_format="e8m0")
        blocks = spec.blocks(values.shape)
        if tuple(scale.shape) != blocks:
            raise ValueError(
                f"a float8 weight {tuple(values.shape)} with scales {tuple(scale.shape)}; in blocks of {block[0]} x "
                f"{block[1]} it has scales {blocks}"
            )
        spec.check_padding(values.shape)
        rows, columns = values.shape[-2:]
        padding = (0, -columns % block[1], 0, -rows % block[0])
        codes = F.pad(as_bytes(values), padding).view(values.dtype) if any(padding) else values
        scale = scale.contiguous() if are_powers else scale.float()
        return cls(codes.contiguous(), scale, None, spec, values.shape, dtype, activation)
