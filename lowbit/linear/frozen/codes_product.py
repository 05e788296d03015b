"""The products of `eight_bits` for a caller that has the codes of both operands and keeps them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.frozen.eight_bits import (
    can_int_mm,
    can_static_int_mm,
    has_dynamic_kernel,
    has_static_kernel,
    has_static_scale,
    is_rowwise,
    scaled_sums,
)
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec


class Described(NamedTuple):
    """The attributes of a converted weight [N, K] that the conditions above read, before that weight exists. It has no
    zero points."""

    shape: torch.Size
    spec: Spec
    activation: Spec | None
    stored_as: str
    zero_point: None = None
    transposed: bool = False


class CodesProduct(NamedTuple):
    """How a converted weight multiplies codes of x, for a caller that has those of both and keeps them."""

    by_kernel: bool
    """True if `scaled_mm` multiplies, as in "dynamic_linear" for many tokens and in "static_linear", or torch._int_mm
    does."""
    quantizes: bool
    """True if `quantize_rowcol` gives the codes of x, or the spec of the activation does."""

    def codes_of(self, x: Tensor, activation: Spec) -> tuple[Tensor, Tensor]:
        """Codes [M, K or more] and scale [M, 1] of x [M, K], by the dynamic `activation`."""
        if not self.quantizes:
            return activation.quantize(x)[:2]
        format = kernels.dynamic_linear.FORMATS[activation.format.dtype]
        codes, scale, _, _ = kernels.quantize_rowcol.quantize_rowcol(x, format, columns=False)
        return codes, scale.view(-1, 1)

    def multiply(
        self,
        codes: Tensor,
        scale: Tensor,
        weight_codes: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The product [M, N].

        Args:
            codes, scale: of x: [M, K], and [M, 1] or [1, 1].
            weight_codes, weight_scale: of the weight: [N, K] and [N, 1].
            bias: [N], or None.
            dtype: of the product.
        """
        if not self.by_kernel:
            sums = kernels.scaled_mm.int8_sums(codes, weight_codes)
            return scaled_sums(sums, scale, weight_scale, bias, dtype)
        if padding := codes.shape[1] - weight_codes.shape[1]:
            padded = F.pad(weight_codes.view(torch.int8), (0, padding))
            weight_codes = padded.view(weight_codes.dtype)
        scales = scale.view(-1), weight_scale.float().flatten()
        return kernels.scaled_mm.scaled_mm(codes, weight_codes, *scales, bias=bias, out_dtype=dtype)


def _has_no_zero_points(weight: Described) -> bool:
    activation = weight.activation
    return activation is not None and not (activation.has_zero_point or weight.spec.has_zero_point)


def codes_format(weight: Described) -> str | None:
    """The format in which `codes_product` may multiply, "int8" or "e4m3"; None where it never does."""
    spec, activation = weight.spec, weight.activation
    if activation is None or not _has_no_zero_points(weight):
        return None
    formats = [f for f in (Int(8), Float8()) if spec.format == activation.format == f]
    if not formats or not (is_rowwise(weight, formats[0]) or has_static_scale(weight)):
        return None
    return kernels.dynamic_linear.FORMATS[formats[0].dtype]


def codes_product(x: Tensor, weight: Described) -> CodesProduct | None:
    """How `BUILT_IN` multiplies x by such a weight in 8 bits; None where it does not, or where x has a zero point."""
    if not _has_no_zero_points(weight):
        return None
    if has_dynamic_kernel(x, weight, None):
        return CodesProduct(by_kernel=True, quantizes=True)
    if can_int_mm(x, weight, None):
        return CodesProduct(by_kernel=False, quantizes=False)
    if has_static_kernel(x, weight, None):
        return CodesProduct(by_kernel=True, quantizes=False)
    if can_static_int_mm(x, weight, None):
        return CodesProduct(by_kernel=False, quantizes=False)
    return None
