"""BlockMixedPrecisionTensor: a high-precision weight whose products see it in float8 with a scale for each 128 x 128
elements (`Float8BlockMixedPrecision`).

Both products of the weight read the same codes. The input's gradient reads their transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.low_bit_linear import Codes
from lowbit.numerics.blocks import crop
from lowbit.numerics.packing import as_bytes
from lowbit.numerics.scale_format import E8M0
from lowbit.schemes.mixed_precision import BLOCK, Float8BlockMixedPrecision
from lowbit.tensor.core import Gather, InnerShapes, LowbitTensor, Wire, stored_shape
from lowbit.tensor.frozen import Float8Tensor
from lowbit.tensor.trained.mixed_precision import MixedPrecisionTensor


class BlockCodes:
    """The codec of a BlockMixedPrecisionTensor: codes [..., N, K128], one byte an element, and scales [..., N/128,
    K/128]. Where shards do not hold whole blocks, the weight itself travels."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "scale")
    meta_attrs: ClassVar[tuple[str, ...]] = ("scheme", "transposed")

    @staticmethod
    def encode(shard: Any, gather: Gather) -> Wire | None:
        whole_blocks = len(gather.shape) > 2 or gather.shape[0] % (BLOCK * gather.ranks) == 0
        if not (whole_blocks and shard.scheme.gathers_codes(shard.weight)):
            return None
        codes, scale = shard.row_codes()
        return Wire(shard.gathered, {"codes": codes, "scale": scale})

    def inner_shapes(self: Any, shape: Sequence[int]) -> InnerShapes:
        *experts, n, k = stored_shape(self, shape)
        blocks = (-(-n // BLOCK), -(-k // BLOCK))
        return {
            "codes": ((*experts, n, blocks[1] * BLOCK), self.codes.dtype),
            "scale": ((*experts, *blocks), torch.float32),
        }

    def decoded_values(self: Any) -> Tensor:
        def values(codes: Tensor, scale: Tensor) -> Tensor:
            found = kernels.block_scaled_mm.values(codes, scale).to(self.dtype)
            return crop(found, (len(found), self.shape[-1]))

        if self.ndim == 2:
            return values(self.codes, self.scale)
        return torch.stack([values(*pair) for pair in zip(self.codes, self.scale, strict=True)])

    def rows(self: Any, indices: Tensor) -> Tensor:
        codes = as_bytes(self.codes)[indices].view(self.codes.dtype)
        scale = self.scale[indices // BLOCK].repeat_interleave(BLOCK, -1)
        return crop((codes.float() * scale).to(self.dtype), (*indices.shape, self.shape[-1]))

    def row_codes(self: Any) -> Codes:
        return self.codes, self.scale

    def transposed_codes(self: Any, after: Tensor | None = None) -> Codes:
        codes, (n, k) = self.codes, self.shape[-2:]
        if extra := -n % BLOCK:
            codes = F.pad(as_bytes(codes), (0, 0, 0, extra)).view(codes.dtype)
        stack = codes if codes.dim() == 3 else codes.unsqueeze(0)
        turned = kernels.transpose_codes.transpose_codes(stack, k, after)
        return turned.view(*self.shape[:-2], *turned.shape[1:]), self.scale.mT.contiguous()

    def _slice(self: Any, dim: int, start: int, end: int) -> Any:
        size = self.shape[dim]
        if self.ndim > 2 or (start, end) == (0, size):
            return LowbitTensor._slice(self, dim, start, end)
        if dim != 0 or start % BLOCK or (end % BLOCK and end != size):
            raise self._no_view(
                f"slicing dimension {dim} at {start}:{end} (accepted: rows in whole blocks of {BLOCK})"
            )
        tensors = {
            "codes": self.codes[start:end],
            "scale": self.scale[start // BLOCK : -(-end // BLOCK)],
        }
        return self._with(tensors, (end - start, *self.shape[1:]))


class BlockMixedPrecisionTensor(MixedPrecisionTensor, codec=BlockCodes):
    """A trainable weight [..., N, K] with products in float8 blocks. `weight` is the high-precision tensor inside."""

    schemes = (Float8BlockMixedPrecision,)
    stays = ""

    scheme: Float8BlockMixedPrecision

    def row_codes(self) -> Codes:
        """The weight [..., N, K] as the output's product reads it: codes [..., N, K128] and the scales of tiles."""
        codes, scale, _, _ = self._quantize(rows=True)
        return codes, scale

    def transposed_codes(self, after: Tensor | None = None) -> Codes:
        """The weight [..., N, K] as the product for the input's gradient reads it: codes [..., K, N128] and the scales
        of tiles."""
        _, _, codes, scale = self._quantize(rows=False)
        return codes, scale

    def _quantize(self, rows: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own, power_of_two = self.weight, self.scheme.power_of_two
        return kernels.quantize_blocks.quantize_blocks(
            own, tiles=True, rows=rows, columns=not rows, power_of_two=power_of_two
        )

    def expert_codes(self) -> Codes:
        """`row_codes` of experts [E, N, K]: codes [E, N, K128], scales [E, N/128, K/128]."""
        return self.row_codes()

    def expert_codes_t(self, scale: Tensor | None = None, after: Tensor | None = None) -> Codes:
        """`transposed_codes` of experts [E, N, K]: codes [E, K, N128], scales [E, K/128, N/128]."""
        return self.transposed_codes(after)

    def frozen(self) -> Float8Tensor:
        """The weight for inference: the codes that the output's product reads."""
        codes, scale = self.row_codes()
        padded = F.pad(as_bytes(codes), (0, 0, 0, -self.shape[-2] % BLOCK)).view(codes.dtype)
        spec, activation = self.scheme.stored
        if isinstance(spec.scales, E8M0):
            scale = spec.scales.bytes_of(scale)
        return Float8Tensor(padded, scale, None, spec, self.shape, self.dtype, activation)
