"""Fake quantization whose scales and zero points are trained along with the weight.

    ŵ = dequantize(quantize(w))                     by `lowbit.affine`, with the trained scale s and zero z

    ∂ŵ/∂w = 1 where the code lies within the range, else 0
    ∂ŵ/∂s = (ŵ − w)/s within the range, else (ŵ − z)/s, the code at the end of the range
    ∂ŵ/∂z = 0 within the range, else 1

s is the scale of a block. z is the value that its zero point stands for: −zero_point · s for mappings with an integer
zero point, which is rounded; the zero point itself for "float_zero_point"; 0 for mappings that have none to choose.
Sources: LSQ (arXiv 1902.08153) for s, LSQ+ (arXiv 2004.09576) for z; ParetoQ (arXiv 2502.02631) uses the same rules at
2 and 3 bits. Their factor on the gradient of s is left out, since Adam does not depend on it.

The parameters hold s and z divided by `RATE`. An optimizer like Adam moves an element by about its learning rate, and
scales learn best at a tenth of the rate of the weights (at the same rate they lose what plain rounding wins). So one
learning rate serves all parameters, in any optimizer. Division by a power of two keeps every bit. The gradients of the
parameters are smaller by this factor too, and hardly enter the norm that gradients are clipped by. Weight decay shrinks
weights and scales alike, which leaves the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.affine import dequantize_affine, unclamped_codes
from lowbit.code_range import clamped, within_range
from lowbit.scheme import Float8, Spec, crop

RATE = 0.125
"""Scale per unit of its parameter."""


def learns_zero(spec: Spec) -> bool:
    """Whether the mapping chooses zero points, so that a parameter holds them."""
    return spec.mapping in ("asymmetric", "float_zero_point")


def parameters_for(
    weight: Tensor, spec: Spec, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The values that training starts from, for scales and zero points of `weight`, each [blocks along each
    dimension]."""
    padded = spec.pad(weight.detach())
    if weight.is_meta:
        scale = torch.empty(spec.blocks(weight.shape), dtype=scale_dtype, device="meta")
        return scale, torch.empty_like(scale) if learns_zero(spec) else None
    scale, zero_point = spec.choose_qparams(padded, scale_dtype)
    if not learns_zero(spec):
        return scale / RATE, None
    assert zero_point is not None
    if not zero_point.is_floating_point():
        zero_point = -zero_point.float() * scale.float()
    return scale / RATE, (zero_point / RATE).to(scale_dtype)


def qparams(
    spec: Spec, scale_parameter: Tensor, zero_parameter: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(scale, zero_point) as `lowbit.affine` takes them, from the parameters. The one place that computes them: for
    training and for conversion, to the same bits.

    A scale whose magnitude fell below the smallest normal number of its dtype has that magnitude.
    """
    scale = scale_parameter.detach() * RATE
    least = torch.finfo(scale.dtype).tiny
    scale = torch.where(scale.abs() < least, torch.full_like(scale, least).copysign(scale), scale)
    fmt = spec.format
    if isinstance(fmt, Float8) or not spec.has_zero_point:
        return scale, None
    if zero_parameter is None:  # codes of an unsigned symmetric format
        middle = (int(fmt.quant_min) + int(fmt.quant_max) + 1) // 2
        return scale, torch.full_like(scale, middle, dtype=fmt.dtype)
    value = zero_parameter.detach() * RATE
    if spec.mapping == "float_zero_point":
        return scale, value.to(scale.dtype)
    steps = (-value.double() / scale.double()).float().round()
    steps = torch.where(steps == steps, steps, 0.0)
    return scale, clamped(steps, torch.int32, fmt.quant_min, fmt.quant_max).to(fmt.dtype)


def learned_fake_quantize(
    weight: Tensor, scale_parameter: Tensor, zero_parameter: Tensor | None, spec: Spec
) -> Tensor:
    """ŵ in `weight`'s shape and dtype, differentiable in the weight and in the parameters.

    Equal to the last bit to `spec.dequantize` of `spec.quantize_by(weight, *qparams(…))`.
    """
    return _LearnedFakeQuantize.apply(weight, scale_parameter, zero_parameter, spec)


class _LearnedFakeQuantize(torch.autograd.Function):
    """Backward computes the codes again, so that forward keeps nothing but its arguments."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, zero: Tensor | None, spec: Spec) -> Tensor:
        ctx.save_for_backward(weight, scale, zero)
        ctx.spec = spec
        found = spec.quantize_by(weight, *qparams(spec, scale, zero))
        return spec.dequantize(*found, weight.shape, weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        weight, scale_parameter, zero_parameter = ctx.saved_tensors
        spec, fmt = ctx.spec, ctx.spec.format
        scale, zero_point = qparams(spec, scale_parameter, zero_parameter)
        padded = spec.pad(weight)
        block, limits = spec.block_size(padded.shape), (fmt.quant_min, fmt.quant_max)
        codes = unclamped_codes(padded, block, scale, zero_point, fmt.dtype, *limits)
        inside = within_range(codes, fmt.dtype, *limits)
        codes = clamped(codes, fmt.dtype, *limits)
        values = dequantize_affine(codes, block, scale, zero_point, *limits)
        grad = spec.pad(grads[0].float())
        zeros = None if zero_parameter is None else zero_parameter.float() * RATE
        by_scale = _moved(values, padded.float(), inside, zeros, block)
        grad_scale = _block_sums(grad * by_scale, block) / scale.float() * RATE
        grad_zero = None
        if zero_parameter is not None:
            sums = _block_sums(torch.where(inside, 0.0, grad), block) * RATE
            grad_zero = sums.to(zero_parameter.dtype)
        grad_weight = torch.where(crop(inside, weight.shape), grads[0], 0.0)
        return grad_weight, grad_scale.to(scale_parameter.dtype), grad_zero, None


def _moved(
    values: Tensor, weight: Tensor, inside: Tensor, zeros: Tensor | None, block: Sequence[int]
) -> Tensor:
    """∂ŵ/∂s · s for each element."""
    if zeros is None:
        outside = values
    else:
        counts = [n // b for n, b in zip(values.shape, block, strict=True)]
        spread = [size for n in counts for size in (n, 1)]
        outside = (_in_blocks(values, block) - zeros.reshape(spread)).reshape(values.shape)
    return torch.where(inside, values - weight, outside)


def _in_blocks(x: Tensor, block: Sequence[int]) -> Tensor:
    """x as [n0, b0, n1, b1, …], with n blocks of size b along each dimension."""
    return x.reshape([s for n, b in zip(x.shape, block, strict=True) for s in (n // b, b)])


def _block_sums(x: Tensor, block: Sequence[int]) -> Tensor:
    return _in_blocks(x, block).sum(list(range(1, 2 * x.ndim, 2)))
