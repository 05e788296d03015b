"""The codec of fake-quantized weights: what FSDP2 gathers of them.

Codes before the clamp, one byte an element, and scales, which give the same products and gradients to the bit. Learned
scales have besides the residuals of the codes, in another byte. The gradient of a scale takes (ŵ − w)/s to 1/254.
Values are by the scales that travelled: those of the module may have been rounded for the forward pass.

Where the quantizer packs (`PresentScales.packs`), codes are int64 words (`packed_codes`), and scales of e8m0 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.coded_linear import CodedWeight, codes_again
from lowbit.linear.fused_rounding import Inside
from lowbit.numerics.affine import smallest_scale
from lowbit.numerics.blocks import crop
from lowbit.numerics.code_range import within_range
from lowbit.numerics.learned_scales import RESIDUAL_STEPS, gradients, of_factors, rate_of
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Float8
from lowbit.tensor.core import Gather, InnerShapes, Wire, stored_shape
from lowbit.tensor.trained.other_products import is_sparse
from lowbit.tensor.trained.packed_codes import unpacked, words_in


class CodesBeforeClamp:
    """See the file. What travels is the quantizer's answer (`Quantizer.encode`)."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "residual", "scale", "zero_point")

    @staticmethod
    def encode(shard: Any, gather: Gather) -> Wire | None:
        return shard.quantizer.encode(shard, gather)

    def inner_shapes(self: Any, shape: Sequence[int]) -> InnerShapes:
        spec, shape = self.scheme.weight, stored_shape(self, shape)
        of_elements, of_blocks = spec.padded_shape(shape), spec.blocks(shape)
        if self.is_packed:
            words = words_in(of_elements[-1], spec, spec.may_clip(self.scale.dtype))
            of_elements = (*of_elements[:-1], words)
        return {
            name: (of_elements if name in ("codes", "residual") else of_blocks, t.dtype)
            for name, t in self.inner_tensors().items()
        }

    @property
    def is_packed(self: Any) -> bool:
        return self.codes.dtype is torch.int64

    def before_clamp(self: Any) -> Tensor:
        """The codes, one an element, padded to whole blocks."""
        if not self.is_packed:
            return self.codes
        spec = self.scheme.weight
        size = spec.padded_shape(stored_shape(self, self.shape))[-1]
        return unpacked(self.codes, spec, spec.may_clip(self.scale.dtype), size)

    def scale_values(self: Any) -> Tensor:
        """The scales as numbers."""
        if self.scale.dtype is torch.uint8:
            return self.scheme.weight.scales.decode({"scale": self.scale})
        return self.scale

    def clamped(self: Any) -> Tensor:
        """The codes on the grid of the format."""
        fmt, codes = self.scheme.weight.format, self.before_clamp()
        if isinstance(fmt, LookupTable):
            return codes.clamp(fmt.quant_min, fmt.quant_max)
        if not isinstance(fmt, Float8):
            codes = codes.clamp(int(fmt.quant_min), int(fmt.quant_max))
        return codes.to(fmt.dtype)

    def decoded_values(self: Any) -> Tensor:
        """In float32, which the weights had that travel as codes."""
        spec = self.scheme.weight
        return spec.dequantize(
            self.clamped(), self.scale_values(), self.zero_point, self.shape, torch.float32
        )

    def passed(self: Any, grad: Tensor) -> Tensor:
        """The gradient of the weight from that of its values: the same where codes do not clip, zero where they do."""
        fmt = self.scheme.weight.format
        inside = within_range(self.before_clamp().float(), fmt.dtype, fmt.quant_min, fmt.quant_max)
        return Inside(crop(inside, self.shape)).passed(grad)

    def gradients_by(
        self: Any, grad: Tensor, scale: Tensor | None, zero: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the weight and of the parameters `scale` and `zero`, from that of its values."""
        if scale is None:
            return self.passed(grad), None, None
        residual, spec = self.residual.float() / RESIDUAL_STEPS, self.scheme.weight
        found = gradients(grad, self.codes.float(), residual, spec, scale, zero)
        if self.quantizer.absolute:
            return found
        # those of the factor and the offset: by the parameter of the present scale, which did not travel
        least = smallest_scale(torch.float32)
        unit = self.scale.float().abs() / (scale.float().abs() * rate_of(spec)).clamp(min=least)
        return found[0], *of_factors(found[1:], unit)

    def quantized_by(
        self: Any,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        joint: Tensor | None = None,
    ) -> Tensor:
        if self.transposed:
            return self.transpose(-2, -1).quantized_by(scale, zero).transpose(-2, -1)
        return self.differentiable_values(scale, zero)

    def coded_by(
        self: Any,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        joint: Tensor | None = None,
        values: None = None,
    ) -> CodedWeight:
        source = self.before_clamp()
        codes, _ = codes_again(self.scheme.weight, source, self.scale)
        handle = self.differentiable_values(scale, zero, False)
        return CodedWeight(codes, self.scale, handle, source)

    def codes_on_grid(self: Any, scale: Tensor, zero: Tensor | None) -> tuple[Tensor | None, ...]:
        return self.clamped(), self.scale, self.zero_point

    def _look_up(self: Any, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_sparse(args, kwargs):
            raise self._unsupported(
                "nn.Embedding(sparse=True) under FSDP2, which reduces no sparse gradients (accepted: sparse=False)"
            )
        values = self.quantized_by(*self.quantizer.scales_alone(self, "a lookup"))
        return F.embedding(indices, values.to(self.dtype), *args, **kwargs)
