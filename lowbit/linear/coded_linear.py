"""The linear of a fake-quantized weight as a product of codes, where the converted weight multiplies codes too.

    y  = x̂ ŵᵀ + b      = (Cx Cwᵀ) · sx[m] · sw[n] + b      C: int8 or float8 codes, s: scales
    dx = dy ŵ           where x does not clip, else 0
    dw = dyᵀ x̂          where w does not clip, else 0

A symmetric scheme with a scale a row of the weight, and one a token or one for all inputs, has scales that are the same
along the sum. So the product of codes is exact up to the last rounding, and equals that of the converted model
(`lowbit.linear.frozen.codes_product`). Gradients are those of the straight-through estimator in high precision. With a
`MixedPrecision` scheme for `gradients` they are products of codes as well, as in `lowbit.linear.low_bit_linear`:

    dx = (dy · sw)^ Cw          dy times the weight's scales, rounded along its rows
    dw = dŷᵀ z                  z: x rounded along its columns, as dy is; with one scale for all inputs z is x̂ itself

Backward keeps codes of x, one byte an element, and not x. It computes the weight's codes again from the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lowbit_kernels as kernels
from lowbit.linear.frozen.checks import check_linear, refuse_second_derivative, unflattened
from lowbit.linear.frozen.codes_product import CodesProduct, Described, codes_product
from lowbit.linear.frozen.eight_bits import scale_of_rows
from lowbit.linear.frozen.kinds import representation_of
from lowbit.linear.low_bit_linear import Codes, low_bit_gradients, of_last_input, transposed
from lowbit.linear.operands import Kept, RoundedLinear
from lowbit.numerics.float32 import computed_again
from lowbit.numerics.packing import pack
from lowbit.numerics.spec import Spec
from lowbit.numerics.straight_through import StraightThrough, where_bits
from lowbit.schemes.mixed_precision import MixedPrecision
from lowbit.schemes.scheme import Scheme
from lowbit.tracing import tracer
from lowbit.tracing.tracer import Note


class CodedWeight(NamedTuple):
    """The weight [N, K] of a product of codes."""

    codes: Tensor
    """[N, K]."""
    scale: Tensor
    """[N, 1]."""
    handle: Tensor
    """The plain tensor [N, K] that takes the gradient of the rounded weight. Nothing reads its values."""
    source: Tensor
    """Where backward finds the codes again: the weight's values, or its codes before the clamp."""


class CodedInput(NamedTuple):
    """The input [M, K] of a product of codes."""

    codes: Tensor
    """[M, K or more]; what is more is 0."""
    scale: Tensor
    """[M, 1] or [1, 1]."""
    handle: Tensor
    """The plain tensor [M, K] that takes the gradient of the rounded input. Nothing reads its values."""
    turned: Codes | None
    """z of the formula, transposed: codes [K, M16], and the scale of each row or of all."""


def described(shape: torch.Size, scheme: Scheme) -> Described:
    """The weight of this shape that a scheme converts to."""
    stored_as = representation_of(scheme.weight).stored_as or ""
    return Described(shape, scheme.weight, scheme.activation, stored_as)


def product_of(x: Tensor, weight: Any) -> CodesProduct | None:
    """How x [..., K] and this FakeQuantizedTensor are multiplied as codes; None where the converted weight multiplies
    otherwise, or where rounding is off."""
    rounds = weight.rounds_weight and weight.input_spec is not None
    if not rounds or weight.transposed or weight.ndim != 2:
        return None
    return codes_product(x, described(weight.shape, weight.scheme))


# ---- operands --------------------------------------------------------------------------------------------------------


def coded_weight(values: Tensor, spec: Spec, joint: Tensor | None = None) -> CodedWeight:
    """Plain `values` [N, K], rounded by the scales that they have now. `joint`: as for `Spec.choose_qparams`."""
    own = values.detach()
    dtype = spec.scale_dtype_for(values.dtype)
    scale, _ = spec.choose_qparams(own, dtype, joint)
    return coded_weight_by(values, spec, scale, spec.may_clip(dtype))


def coded_weight_by(values: Tensor, spec: Spec, scale: Tensor, clips: bool = True) -> CodedWeight:
    """Plain `values` [N, K], rounded by this scale. `clips`: False where no value lies beyond the range."""
    own = values.detach()
    if not clips:
        codes, _, _ = spec.quantize(own, qparams=(scale, None))
        return CodedWeight(codes, scale, values, own)
    codes, inside = spec.quantize_by(own, scale)
    return CodedWeight(codes, scale, _passing(values, inside), own)


def _passing(x: Tensor, inside: Tensor) -> Tensor:
    """x, with a gradient of zero where it clips. Keeps a bit an element."""
    return StraightThrough.apply(x, x.detach(), pack(inside.to(torch.uint8), 1), where_bits)


def dynamic_input(
    x: Tensor, given: Tensor, spec: Spec, product: CodesProduct, turned_as: str | None
) -> CodedInput:
    """x [M, K], rounded with a scale a token. `given`: x as the layer got it, which layers may share. `turned_as`: the
    format of z; None where no product reads it."""
    own = x.detach()

    def found() -> tuple[Tensor, ...]:
        rows = product.codes_of(own, spec)
        if turned_as is None:
            return rows
        _, _, *columns = kernels.quantize_rowcol.quantize_rowcol(own, turned_as, rows=False)
        return *rows, *columns

    codes, scale, *turned = of_last_input(given, (x.dtype, spec, product, turned_as), found)
    handle = x
    if spec.may_clip(torch.float32):
        handle = _passing(x, spec.quantize_by(own, scale)[1])
    return CodedInput(codes, scale, handle, (turned[0], turned[1]) if turned else None)


def constant_input(x: Tensor, spec: Spec, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of x [M, K] by a static scale [1, 1] that is a constant, and the handle."""
    codes, inside = spec.quantize_by(x.detach(), scale)
    return codes, _passing(x, inside)


# ---- the product -----------------------------------------------------------------------------------------------------


def coded_linear(
    x: Tensor,
    weight: Any,
    own: CodedWeight,
    bias: Tensor | None,
    product: CodesProduct,
    static: Any = None,
) -> Tensor:
    """x [..., K] times the FakeQuantizedTensor `weight` [N, K], transposed, plus bias [N]: [..., N] in x's dtype.

    Args:
        own: the weight as this product sees it.
        product: of `product_of`.
        static: a module that rounds its input by a static scale (`lowbit.layers.static_input`).
    """
    check_linear(x, weight, bias)
    (n, k), m = weight.shape, math.prod(x.shape[:-1])
    gradients: MixedPrecision | None = weight.gradients
    why: str | None = tracer.ROUNDED
    if gradients is not None:
        why = gradients.plain_because(x.device, m, n, k)
        gradients = None if why is not None else gradients
    note = tracer.note(m, n, k, why, weight)
    turns = gradients is not None and gradients.grad_weight
    turned_as = None
    if gradients is not None:
        gradients.check_dtype(x.dtype)
        turns = turns and own.handle.requires_grad and torch.is_grad_enabled()
        turned_as = gradients.forward_format if turns else None
    flat = x.reshape(m, k)
    if static is None:
        spec = weight.scheme.activation
        found = dynamic_input(flat, x, spec, product, turned_as)
    else:
        codes, handle, scale = static.coded(flat)
        columns = (transposed(codes, k), scale.view(1)) if turned_as else None
        found = CodedInput(codes, scale_of_rows(flat, scale, codes), handle, columns)
    how = CodedOperands(
        product, weight.scheme.weight, gradients, note, x.dtype, own.handle.dtype, own.handle.shape
    )
    turned = (None, None) if found.turned is None else found.turned
    parts = (found.codes, found.scale, own.codes, own.scale, own.source, *turned)
    y = RoundedLinear.apply(found.handle, own.handle, bias, how, *parts)
    return unflattened(y, x)


class CodedOperands(NamedTuple):
    """The formula of the module. `output` takes the handles of x and the weight, and the parts of both."""

    product: CodesProduct
    spec: Spec
    gradients_in: MixedPrecision | None
    """The scheme of backward products in low bits."""
    note: Note | None
    dtype: torch.dtype
    """The dtype of y."""
    weight_dtype: torch.dtype
    shape: torch.Size
    """The shape of the weight."""

    def output(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: Sequence[bool],
        x_codes: Tensor,
        x_scale: Tensor,
        codes: Tensor,
        scale: Tensor,
        source: Tensor,
        *turned: Tensor | None,
    ) -> tuple[Tensor, Kept]:
        of_weight = (source, scale) if needs[0] else (None, None)
        of_x = ((x_codes, x_scale) if turned[0] is None else turned) if needs[1] else ()
        if self.note is not None:
            fmt = kernels.dynamic_linear.FORMATS[x_codes.dtype]
            tracer.record(self.note, "output", fmt)
        y = self.product.multiply(x_codes, x_scale, codes, scale, bias, self.dtype)
        return y, (*of_weight, *of_x)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        refuse_second_derivative("a product of codes (lowbit.qat)")
        source, w_scale, *of_x = kept
        for_x, for_weight = needs[:2]
        scheme = self.gradients_in
        low = (
            for_x and scheme is not None and scheme.grad_input,
            for_weight and scheme is not None and scheme.grad_weight,
        )
        own: Any = codes_again(self.spec, source, w_scale) if for_x else None
        grad_x = grad_weight = None
        if any(low):
            turned = None
            if low[0]:
                codes = transposed(own[0], self.shape[1], after=grad)
                turned = codes, own[1].float().flatten()
            columns = tuple(of_x) if low[1] else None
            grad_x, grad_weight = low_bit_gradients(
                self.note, scheme, grad, turned, columns, self.weight_dtype
            )
        if for_x and not low[0]:
            tracer.record(self.note, "grad_input", grad.dtype)
            grad_x = grad @ self.spec.dequantize(own[0], own[1], None, self.shape, grad.dtype)
        if for_weight and not low[1]:
            tracer.record(self.note, "grad_weight", grad.dtype)
            values = of_x[0][:, : self.shape[1]].float() * of_x[1]
            grad_weight = (grad.t() @ values.to(grad.dtype)).to(self.weight_dtype)
        return grad_x, grad_weight


def codes_again(spec: Spec, source: Tensor, scale: Tensor) -> Codes:
    """The codes and scale of the weight in a backward pass."""
    fmt = spec.format
    if source.dtype is fmt.dtype:
        return source, scale
    if not source.dtype.is_floating_point:
        return source.clamp(int(fmt.quant_min), int(fmt.quant_max)).to(fmt.dtype), scale
    scale = computed_again(scale)
    return spec.quantize(source, qparams=(scale, None))[0], scale
