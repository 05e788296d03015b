"""The linear of a fake-quantized weight, which keeps its operands for backward and not their rounded values.

    y = x̂ · ŵᵀ + b        x̂, ŵ: x and w rounded; x̂ = x in a scheme without activation

    grad_x = (grad_y · ŵ) where x̂ passes gradients        grad_w = (grad_yᵀ · x̂) where ŵ passes gradients

`F.linear(x̂, ŵ)` would keep x̂ and ŵ, and the two roundings a mask of each. x and w are there anyway: the model holds w,
and layers that read the same input share x. So backward rounds both again, which takes one pass over each, and a step
takes the memory of a high-precision one.

In graphs of torch.compile the input is rounded outside, since the compiler keeps x̂ in place of x. There the weight is
rounded again by the fused kernel, where it runs (`lowbit.linear.fused_rounding.IN_GRAPHS`).

With learned scales, the gradients of w, its scale and its zero point are those of `lowbit.numerics.learned_scales`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear import fused_rounding
from lowbit.linear.frozen.checks import unflattened
from lowbit.linear.fused_rounding import fake_quantize, learned_fake_quantize
from lowbit.numerics.learned_scales import qparams
from lowbit.numerics.spec import Spec
from lowbit.tensor.core.base import LowbitTensor
from lowbit.trace import tracer


@dataclass(frozen=True)
class Rounding:
    """How a product rounds its operands.

    Attributes:
        weight: the spec of the weight.
        scale_dtype: of its scales, where they are computed from it.
        activation: the spec of the input; None where it is not rounded.
        constant_codes: whether the gradient of learned scales is that of constant codes.
    """

    weight: Spec
    scale_dtype: torch.dtype
    activation: Spec | None = None
    constant_codes: bool = False


class _RoundedLinear(torch.autograd.Function):
    """See the module. `scale` and `zero` are the parameters of learned scales, or None; `joint` is what the scales of
    siblings share, or None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        zero: Tensor | None,
        joint: Tensor | None,
        rounding: Rounding,
    ) -> Tensor:
        ctx.save_for_backward(x, _alias(weight), scale, zero, joint)
        ctx.rounding = rounding
        own = x
        if rounding.activation is not None:
            own, _ = fused_rounding.rounded(x, rounding.activation, masked=False)
        values, _ = _rounded_weight(weight, (scale, zero, joint), rounding, x.dtype)
        tracer.rounded(values, weight)
        return F.linear(own, values, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        scale, zero, _ = scales
        (grad,), rounding, needs = grads, ctx.rounding, ctx.needs_input_grad
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _differentiable_gradients(grad, ctx.saved_tensors, rounding, needs)
        own, from_x = x, None
        if rounding.activation is not None:
            own, from_x = fused_rounding.rounded(x, rounding.activation)
        grad_x = grad_weight = grad_bias = grad_scale = grad_zero = from_weight = None
        if needs[0] or scale is None:
            values, from_weight = _rounded_weight(weight, scales, rounding, grad.dtype, grad)
        if needs[0]:
            grad_x = grad @ values
            grad_x = grad_x if from_x is None else from_x.passed(grad_x)
        if needs[1] or needs[3] or needs[4]:
            grad_weight = (grad.t() @ own).to(weight.dtype)
            if scale is None:
                grad_weight = from_weight.passed(grad_weight)  # type: ignore[union-attr]
            elif isinstance(weight, LowbitTensor):
                found = weight.gradients_by(grad_weight, scale, zero)  # type: ignore[attr-defined]
                grad_weight, grad_scale, grad_zero = found
            else:
                grad_weight, grad_scale, grad_zero = fused_rounding.learned_gradients(
                    grad_weight, weight, rounding.weight, (scale, zero), rounding.constant_codes
                )
        if needs[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, grad_scale, grad_zero, None, None


def _alias(weight: Tensor) -> Tensor:
    """A low-bit weight that a graph holds could not be moved or cast, which swaps the tensors of a subclass."""
    return weight.detach() if isinstance(weight, LowbitTensor) else weight


def _rounded_weight(
    weight: Tensor,
    scales: Sequence[Tensor | None],
    rounding: Rounding,
    dtype: torch.dtype,
    after: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """The weight as the product sees it, and where its gradient passes (not for learned scales). `scales`: scale, zero
    and joint."""
    spec, (scale, zero, joint) = rounding.weight, scales
    if isinstance(weight, LowbitTensor):
        values, inside = weight.decoded()  # type: ignore[attr-defined]
        return values.to(dtype), inside
    if scale is None:
        masked = after is not None
        own = rounding.scale_dtype
        return fused_rounding.rounded(weight, spec, own, dtype, after, masked, joint)
    found = qparams(spec, scale, zero)
    return fused_rounding.rounded_by(weight, spec, found, dtype, after), None


def _differentiable_gradients(
    grad: Tensor,
    operands: tuple[Tensor | None, ...],
    rounding: Rounding,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients with a graph, for second derivatives. `operands`: x, the weight, its scale, its zero point, and
    joint."""
    x, weight, *scales = operands
    y = _kept(x, weight, None, *scales, rounding)  # type: ignore[arg-type, call-arg]
    learn = needs[0], needs[1], needs[3], needs[4]
    wanted = [t for t, need in zip(operands[:4], learn, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True) if wanted else ())
    of_x, of_weight, of_scale, of_zero = (next(found) if need else None for need in learn)
    return of_x, of_weight, grad.sum(0) if needs[2] else None, of_scale, of_zero, None, None


def _kept(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    zero: Tensor | None,
    joint: Tensor | None,
    rounding: Rounding,
) -> Tensor:
    """The product as operations that autograd records one by one."""
    if rounding.activation is not None:
        x = fake_quantize(x, rounding.activation)
    if isinstance(weight, LowbitTensor):
        own: Any = weight
        values = own.fake_quantized() if scale is None else own.quantized_by(scale, zero)
    elif scale is None:
        values = fake_quantize(weight, rounding.weight, rounding.scale_dtype, joint)
    else:
        spec, constant = rounding.weight, rounding.constant_codes
        values = learned_fake_quantize(weight, scale, zero, spec, constant)
    values = values.to(x.dtype)
    tracer.rounded(values, weight)
    return F.linear(x, values, bias)


def rounded_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rounding: Rounding,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    joint: Tensor | None = None,
) -> Tensor:
    """x [..., K] times the weight [N, K] transposed, both rounded, plus bias [N]: differentiable in all tensors.

    The weight is plain, or the form of codes that FSDP2 gathers: `decoded()` gives its values and where their gradient
    passes, and `gradients_by` the gradients where scales are learned. `scale` and `zero` are the parameters of learned
    scales; None for scales that the weight itself gives. `joint`: what these share with those of siblings, or None.
    """
    compiling = torch.compiler.is_compiling()
    keeps = False
    if compiling:
        is_plain = not isinstance(weight, LowbitTensor)
        keeps = not (is_plain and fused_rounding.runs(rounding.weight, weight, in_backward=True))
    if keeps or not torch.is_grad_enabled():
        return _kept(x, weight, bias, scale, zero, joint, rounding)
    if compiling and rounding.activation is not None:
        x = fake_quantize(x, rounding.activation)
        own = rounding
        rounding = Rounding(own.weight, own.scale_dtype, constant_codes=own.constant_codes)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 would not do for K = 0
    y = _RoundedLinear.apply(flat, weight, bias, scale, zero, joint, rounding)
    return unflattened(y, x)
