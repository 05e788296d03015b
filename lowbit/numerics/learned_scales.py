"""Fake quantization whose scales and zero points are trained along with the weight.

    ŵ = dequantize(quantize(w))                     by `lowbit.numerics.affine`, with the trained scale s and zero z

    ∂ŵ/∂w = 1 where the code lies within the range, else 0
    ∂ŵ/∂s = (ŵ − w)/s within the range, else the code at its end, counted from that of z
    ∂ŵ/∂z = 0 within the range, else 1

s is the scale of a block. z is the value that its zero point stands for: −zero_point · s for mappings with an integer
zero point, which is rounded; the zero point itself for "float_zero_point"; 0 for mappings that have none to choose.
Sources: LSQ (arXiv 1902.08153) for s, LSQ+ (arXiv 2004.09576) for z; ParetoQ (arXiv 2502.02631) uses the same rules at
2 and 3 bits. The factor of these papers on the gradient of s is left out: Adam does not depend on it.

The parameters hold z divided by `RATE` and s divided by `rate_of` the spec. An optimizer like Adam moves an element by
about its learning rate, and scales learn best at a tenth of the rate of the weights (at the same rate they lose what
plain rounding wins). With more than 4 bits s is small beside the weights, and at a tenth the ends of the range, s times
the largest code, would move by several times the rate: there s moves by the rate divided by that code. Division by a
power of two keeps every bit. The gradients of the parameters are smaller by this factor too, and hardly enter the norm
that gradients are clipped by.

Scales of a weight follow it in training (`following`). With s' and z' those that the spec chooses for the present
weight, the parameters are then a factor and an offset of them, which start at 1 and 0:

    s = s' · factor        z = z' + s' · offset · RATE / rate_of(spec)

Gradients of factor and offset are those above times s'; none passes through s' and z'. Scales that stay where they are
while the weight moves lose to the present ones at 4 bits (benchmarks/LOG.md, "Learned scales as a factor of the largest
value").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.affine import grid_of, half_step, scale_of_largest, smallest_scale
from lowbit.numerics.blocks import block_sums, crop, in_blocks, one_a_block
from lowbit.numerics.code_range import clamped, within_range
from lowbit.numerics.float32 import computed_again, round_to_dtype
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec

RATE = 0.125
"""Scale or zero point per unit of its parameter, at most."""
RESIDUAL_STEPS = 254
"""Steps of the residual of a code, from −1/2 to 1/2, that one byte holds."""
PART = 2**24
"""Elements of experts that are rounded at a time."""


def rate_of(spec: Spec) -> float:
    """Scale per unit of its parameter, a power of two: 1/8 for up to 4 bits, 1/128 for 8, 1/512 for float8 (e4m3).

    1/8 for the scales of inputs (`static`), which are larger than those of weights."""
    if spec.static:
        return RATE
    largest = (spec.format.quant_max - spec.format.quant_min) / 2
    return min(RATE, 2.0 ** -round(math.log2(largest)))


def learns_zero(spec: Spec) -> bool:
    """True if the mapping chooses zero points, so that a parameter holds them."""
    return spec.mapping in ("asymmetric", "float_zero_point")


def parameters_for(
    weight: Tensor, spec: Spec, dtype: torch.dtype, searched: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """The parameters of `dtype` of the scales and zero points that training starts from, each [blocks along each
    dimension]. Where the spec has a `scale_dtype`, `qparams` rounds to it.

    `searched`: those with the least squared error. False: those of the present weight; for symmetric integers of up to
    3 bits those of `scale_of_largest`, of either sign. None: the first with 1 and 2 bits, else the second.
    """
    if weight.is_meta:
        scale = torch.empty(spec.blocks(weight.shape), dtype=dtype, device="meta")
        return scale, torch.empty_like(scale) if learns_zero(spec) else None
    own, plain = spec.scale_dtype or dtype, weight.detach()
    if spec.has_few_codes if searched is None else searched:
        scale, zero_point = spec.search_qparams(plain, own)
    elif _starts_at_largest(spec):
        padded, fmt = spec.pad(plain), spec.format
        grid = grid_of(spec.mapping, fmt.dtype, fmt.quant_min, fmt.quant_max, None)
        scale, zero_point = scale_of_largest(padded, grid, spec.block_size(padded.shape), own), None
    else:
        scale, zero_point = spec.choose_qparams(spec.pad(plain), own)
    return as_parameters(spec, scale.to(dtype), zero_point)


def _starts_at_largest(spec: Spec) -> bool:
    """True for symmetric integers of up to 3 bits: with more, a step of max|x| / 2^(b − 1) wins nothing."""
    few = isinstance(spec.format, Int) and spec.format.bits <= 3
    return few and spec.mapping.startswith("symmetric") and not spec.static


def as_parameters(
    spec: Spec, scale: Tensor, zero_point: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The parameters from which `qparams` computes this scale and zero point."""
    if not learns_zero(spec):
        return scale / rate_of(spec), None
    assert zero_point is not None
    if not zero_point.is_floating_point():
        zero_point = -zero_point.float() * scale.float()
    return scale / rate_of(spec), (zero_point / RATE).to(scale.dtype)


def relative(
    present: tuple[Tensor, Tensor | None], wanted: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """The factor and the offset from which `following` computes the parameters `wanted`: 1 and 0 for the present ones.
    Others come back to about the last bit."""
    (unit, middle), (scale, zero) = present, wanted
    factor = (scale.float() / unit.float()).to(scale.dtype)
    if zero is None or middle is None:
        return factor, None
    return factor, ((zero.float() - middle.float()) / unit.float()).to(zero.dtype)


def following(
    factor: Tensor, offset: Tensor | None, present: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """The parameters of scales that follow the weight, in the dtype of `factor`, differentiable in both arguments.

    They are those of the present scale times `factor`, and of the present zero point plus `offset` times the former.

    Args:
        factor: [blocks along each dimension].
        offset: the same, where the mapping chooses zero points.
        present: the parameters of the present weight (`as_parameters`).
    """
    if not torch.is_grad_enabled():
        return _followed(factor, offset, *present)
    found: tuple[Tensor, Tensor | None] = _Following.apply(factor, offset, *present)
    return found


def _followed(
    factor: Tensor, offset: Tensor | None, unit: Tensor, middle: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    scale = round_to_dtype(factor.float() * unit.float(), factor.dtype)
    if offset is None or middle is None:
        return scale, None
    # in float64 the product is exact, so that a fused one gives the same sum
    zero = (offset.double() * unit.double() + middle.double()).float()
    return scale, round_to_dtype(zero, offset.dtype)


def of_factors(grads: Sequence[Tensor | None], unit: Tensor) -> list[Tensor | None]:
    """The gradients of factors and offsets, from those `grads` of the parameters that `following` gives.

    `unit`: the parameter of the present scale."""
    return [None if g is None else (g.float() * unit.float()).to(g.dtype) for g in grads]


class _Following(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, offset: Tensor | None, unit: Tensor, middle: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(unit)
        return _followed(factor, offset, unit, middle)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        factor, offset = of_factors(grads, *ctx.saved_tensors)
        return factor, offset, None, None


def qparams(
    spec: Spec, scale_parameter: Tensor, zero_parameter: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(scale, zero_point) as `lowbit.numerics.affine` takes them, from the parameters. Training and conversion both
    call this function, so they agree to the bit.

    Scales are rounded to the `scale_dtype` of the spec. Scales of a smaller magnitude get `smallest_scale`.
    """
    scale = scale_parameter.detach() * rate_of(spec)
    scale = round_to_dtype(scale, spec.scale_dtype or scale.dtype)
    least = smallest_scale(scale.dtype)
    scale = scale.abs().clamp(min=least).copysign(scale)
    fmt = spec.format
    if not isinstance(fmt, Int) or not spec.has_zero_point:
        return scale, None
    if spec.mapping == "half_integer":
        return _of_exact_half(scale)
    if spec.rounds_minimum:
        assert zero_parameter is not None
        return spec.with_minimum(scale, zero_parameter.detach().float() * RATE)
    if zero_parameter is None:  # codes of an unsigned symmetric format
        return scale, torch.full_like(scale, _code_of_z(spec), dtype=fmt.dtype)
    value = zero_parameter.detach() * RATE
    if spec.mapping == "float_zero_point":
        return scale, round_to_dtype(value, scale.dtype)
    steps = (-value.double() / scale.double()).float().round()
    steps = torch.where(steps == steps, steps, 0.0)
    return scale, clamped(steps, torch.int32, fmt.quant_min, fmt.quant_max).to(fmt.dtype)


def _of_exact_half(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The scale, and its half as the zero point. A scale so small that its half is not exact becomes the double of the
    rounded half: formats that store integers need both."""
    half = half_step(scale, scale.dtype)
    least = smallest_scale(scale.dtype)
    half = torch.where(half == 0, torch.full_like(half, least).copysign(scale), half)
    return half * 2, half


def learned_fake_quantize(
    weight: Tensor,
    scale_parameter: Tensor,
    zero_parameter: Tensor | None,
    spec: Spec,
) -> Tensor:
    """ŵ in `weight`'s shape and dtype, differentiable in the weight and in the parameters.

    Equal to the last bit to `spec.dequantize` of `spec.quantize(weight, qparams=qparams(…))`. NaN in an input, whose
    spec is `static`, stays NaN.

    Args:
        weight: [N, K] or [E, N, K], or an input of any shape.
        scale_parameter, zero_parameter: as `parameters_for` gives them.
        spec: how the weight is quantized.
    """
    return _LearnedFakeQuantize.apply(weight, scale_parameter, zero_parameter, spec, True)


def with_gradients_of(
    weight: Tensor,
    scale_parameter: Tensor,
    zero_parameter: Tensor | None,
    spec: Spec,
) -> Tensor:
    """The values of `weight` with the gradients of `learned_fake_quantize`, for a product that has the codes.
    Args: those of `learned_fake_quantize`."""
    return _LearnedFakeQuantize.apply(weight, scale_parameter, zero_parameter, spec, False)


def parts_of(weight: Tensor, spec: Spec) -> list[slice]:
    """Slices of the experts of a weight [E, …], to round one after another: temporaries take some 14 times the bytes of
    a bfloat16 slice. torch.compile, which has no temporaries, gets one slice."""
    whole = [slice(None)]
    if weight.ndim < 3 or torch.compiler.is_compiling() or spec.block_size(weight.shape)[0] > 1:
        return whole
    step = max(PART // max(weight.shape[1:].numel(), 1), 1)
    return [slice(i, i + step) for i in range(0, weight.shape[0], step)] or whole


class _LearnedFakeQuantize(torch.autograd.Function):
    """Backward computes the codes again, so that forward keeps nothing but its arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        spec: Spec,
        rounds: bool,
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, zero)
        ctx.spec, ctx.rounds = spec, rounds
        if not rounds:
            return weight.view_as(weight)
        scale, zero_point = qparams(spec, scale, zero)

        def rounded(part: slice) -> Tensor:
            own = scale[part], None if zero_point is None else zero_point[part]
            x = weight[part]
            values = crop(spec.codes_and_values(x, *own)[1], x.shape).to(x.dtype)
            return torch.where(x.isnan(), x, values) if spec.static else values

        parts = parts_of(weight, spec)
        if len(parts) == 1:
            return rounded(parts[0]).detach()  # not a view, as in `StraightThrough`
        values = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for part in parts:
            values[part] = rounded(part)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        weight, scale_parameter, zero_parameter = ctx.saved_tensors
        spec, grad = ctx.spec, grads[0]
        again = scale_parameter if ctx.rounds else computed_again(scale_parameter)
        scale, zero_point = qparams(spec, again, zero_parameter)

        def found(part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
            own, zero = (None if t is None else t[part] for t in (zero_point, zero_parameter))
            codes, residual = codes_and_residual(weight[part], spec, scale[part], own)
            return gradients(grad[part], codes, residual, spec, scale_parameter[part], zero)

        parts = parts_of(weight, spec)
        if len(parts) == 1:
            return *found(parts[0]), None, None
        grad_weight = torch.empty_like(grad, memory_format=torch.contiguous_format)
        of_scales, of_zeros = [], []
        for part in parts:
            grad_weight[part], of_scale, of_zero = found(part)
            of_scales.append(of_scale)
            of_zeros += [] if of_zero is None else [of_zero]
        of_zero = torch.cat(of_zeros) if of_zeros else None
        return grad_weight, torch.cat(of_scales), of_zero, None, None


def codes_and_residual(
    weight: Tensor, spec: Spec, scale: Tensor, zero_point: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes before the clamp and the residual (ŵ − w)/s of each element of the padded weight, both float32. The
    residual counts within the range only."""
    codes, values = spec.codes_and_values(weight, scale, zero_point)
    block = spec.block_size(codes.shape)
    distance = in_blocks(values - spec.pad(weight).float(), block)
    return codes, distance.div(one_a_block(scale.float(), scale.shape)).view(codes.shape)


def gradients(
    grad: Tensor,
    codes: Tensor,
    residual: Tensor,
    spec: Spec,
    scale_parameter: Tensor,
    zero_parameter: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the weight and of the two parameters.

    Args:
        grad: the gradient of ŵ.
        codes, residual: from `codes_and_residual`.
        spec, scale_parameter, zero_parameter: those of `learned_fake_quantize`.
    """
    fmt, block = spec.format, spec.block_size(codes.shape)
    low, high = fmt.quant_min, fmt.quant_max
    inside = within_range(codes, fmt.dtype, low, high)
    ends = codes.clamp(low, high) - _code_of_z(spec)
    wide = spec.pad(grad.float())
    sums = block_sums(wide * torch.where(inside, residual, ends), block)
    grad_scale = (sums * rate_of(spec)).to(scale_parameter.dtype)
    grad_zero = None
    if zero_parameter is not None:
        sums = block_sums(torch.where(inside, 0.0, wide), block)
        grad_zero = (sums * RATE).to(zero_parameter.dtype)
    return torch.where(crop(inside, grad.shape), grad, 0.0), grad_scale, grad_zero


def _code_of_z(spec: Spec) -> float:
    """The code whose value is z. It may lie between two codes."""
    fmt = spec.format
    if not isinstance(fmt, Int) or spec.mapping == "asymmetric":
        return 0
    middle = (int(fmt.quant_min) + int(fmt.quant_max) + 1) // 2
    return middle - 0.5 if spec.mapping == "half_integer" else middle
