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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear import fused_rounding
from lowbit.linear.dequantized import grouped_gradient
from lowbit.linear.frozen.checks import flattened, in_rows, refuse_second_derivative, unflattened
from lowbit.linear.fused_rounding import fake_quantize, learned_fake_quantize
from lowbit.linear.operands import Kept, RoundedLinear
from lowbit.numerics.learned_scales import following, of_factors, qparams
from lowbit.numerics.spec import Spec
from lowbit.tracing import tracer

Found = tuple[fused_rounding.Qparams, Tensor | None]
"""Learned scales and zero points, and what one unit of their parameters is (None: they are absolute)."""


def _found_in(kept: Sequence[Any]) -> Found | None:
    """What `Rounding.kept_of` kept."""
    return ((kept[0], kept[1]), kept[2]) if kept else None


@dataclass(frozen=True)
class Rounding:
    """How a product rounds its operands; the operands of a plain weight, that `RoundedLinear` takes.

    `output` takes besides x, the weight and the bias: the parameters of learned scales and zero points, or None; and
    the part of the scales that siblings share, or for learned scales other values with the extremes of the weight's
    blocks, or None.

    Attributes:
        weight: the spec of the weight.
        scale_dtype: of its scales, where they are computed from it.
        activation: the spec of the input; None where it is not rounded.
        absolute: learned scales do not follow the weight.
    """

    weight: Spec
    scale_dtype: torch.dtype
    activation: Spec | None = None
    absolute: bool = False

    def output(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: Sequence[bool],
        scale: Tensor | None,
        zero: Tensor | None,
        joint: Tensor | None,
    ) -> tuple[Tensor, Kept]:
        own = x
        if self.activation is not None:
            own, _ = fused_rounding.rounded(x, self.activation, masked=False)
        values, found = self.values(weight, (scale, zero, joint), x.dtype)
        if tracer.active is not None:
            tracer.rounded(values, weight)
        kept = (x, self.alias(weight), scale, zero, joint)
        return F.linear(own, values, bias), (*kept, *self.kept_of(found, scale))

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        x, weight, *scales = kept[:5]
        scale, found = scales[0], _found_in(kept[5:])
        learn = needs[0], needs[1], needs[4], needs[5]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._differentiable_gradients(grad, kept[:5], learn)
        own, from_x = x, None
        if self.activation is not None:
            own, from_x = fused_rounding.rounded(x, self.activation)
        grad_x = grad_weight = grad_scale = grad_zero = None
        from_weight: Any = found
        if needs[0] or scale is None:
            values, from_weight = self.values(weight, scales, grad.dtype, grad, found)
        if needs[0]:
            grad_x = grad @ values
            grad_x = grad_x if from_x is None else from_x.passed(grad_x)
        if any(learn[1:]):
            grad_weight = (grad.t() @ own).to(weight.dtype)
            if scale is None:
                grad_weight = from_weight.passed(grad_weight)
            else:
                grad_weight, grad_scale, grad_zero = self.learned(
                    grad_weight, weight, scales, from_weight
                )
        return grad_x, grad_weight, grad_scale, grad_zero

    def _differentiable_gradients(
        self, grad: Tensor, kept: Sequence[Any], learn: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The gradients with a graph, for second derivatives. `learn`: those of x, the weight, its scale and its zero
        point that are wanted."""
        x, weight, *scales = kept
        y = self.recorded(x, weight, None, scales)
        wanted = [t for t, need in zip(kept[:4], learn, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True) if wanted else ())
        return [next(found) if need else None for need in learn]

    def recorded(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scales: Sequence[Tensor | None]
    ) -> Tensor:
        """The product as operations that autograd records one by one."""
        if self.activation is not None:
            x = fake_quantize(x, self.activation)
        values = self.differentiable(weight, scales).to(x.dtype)
        tracer.rounded(values, weight)
        return F.linear(x, values, bias)

    # ---- the weight ------------------------------------------------------------------------------------------

    def alias(self, weight: Any) -> Any:
        """The part of the weight that a graph keeps."""
        return weight

    def values(
        self,
        weight: Any,
        scales: Sequence[Tensor | None],
        dtype: torch.dtype,
        after: Tensor | None = None,
        found: Found | None = None,
    ) -> tuple[Tensor, Any]:
        """The weight as the product sees it, and what its gradient takes: where it passes, or for learned scales what
        `found` gives.

        Args:
            weight: [N, K].
            scales: scale, zero and joint.
            dtype: of the result.
            after: the gradient of the product, in backward.
            found: learned scales that forward found.
        """
        scale, _, joint = scales
        if scale is None:
            own, masked = self.scale_dtype, after is not None
            return fused_rounding.rounded(weight, self.weight, own, dtype, after, masked, joint)
        found = found or self.found(weight, scales)
        return fused_rounding.rounded_by(weight, self.weight, found[0], dtype, after), found

    def kept_of(self, found: Any, scale: Tensor | None) -> Kept:
        """What backward keeps of `found`, the second result of `values`. Graphs of torch.compile choose for
        themselves, and absolute scales are cheap to compute again."""
        if scale is None or self.absolute or torch.compiler.is_compiling():
            return ()
        by, unit = found
        return *by, unit

    def found(self, weight: Tensor, scales: Sequence[Tensor | None]) -> Found:
        """The scale and the zero point of learned scales, and what one unit of their parameters is, or None."""
        scale, zero, joint = scales
        assert scale is not None
        if self.absolute:
            return qparams(self.weight, scale, zero), None
        present = self._present(weight, scale, joint)
        return qparams(self.weight, *following(scale, zero, present)), present[0]

    def _present(
        self, weight: Tensor, scale: Tensor, joint: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        own = weight if joint is None else joint
        return fused_rounding.present_parameters(own, self.weight, scale.dtype)

    def learned(
        self,
        grad: Tensor,
        weight: Any,
        scales: Sequence[Tensor | None],
        found: Any,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of the weight, its scale and its zero point from that of its rounded values.

        Args:
            grad: of the rounded values. `in_place`: that of the weight may take its memory.
            weight, scales: those of `values`.
            found: what that gave besides the values, or None.
        """
        scale, zero, _ = scales
        assert scale is not None
        by, unit = found or self.found(weight, scales)
        both = (scale, zero), by
        grad, *own = fused_rounding.learned_gradients(grad, weight, self.weight, *both, in_place)
        return grad, *(own if unit is None else of_factors(own, unit))  # type: ignore[return-value]

    def differentiable(self, weight: Any, scales: Sequence[Tensor | None]) -> Tensor:
        """The rounded values, as operations that autograd records."""
        scale, zero, joint = scales
        if scale is None:
            return fake_quantize(weight, self.weight, self.scale_dtype, joint)
        if not self.absolute:
            scale, zero = following(scale, zero, self._present(weight, scale, joint))
        return learned_fake_quantize(weight, scale, zero, self.weight)

    def runs_in_graphs(self, weight: Any) -> bool:
        """True if graphs of torch.compile can round the weight again in their backward pass."""
        return fused_rounding.runs(self.weight, weight, in_backward=True)


@dataclass(frozen=True)
class RoundingOfExperts(Rounding):
    """The operands of torch's grouped product of x [M, K] and rounded experts [E, K, N].

    Forward and backward each round the experts for themselves. Backward is done with the rounded ones before it makes
    the gradient of the weight, which rounding changes in place: a stack is the largest tensor of a model.

    Attributes:
        turned: the weight is given as [E, N, K], as it lies in memory and is rounded; the product takes its transpose.
    """

    turned: bool = False

    def output(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: None,
        needs: Sequence[bool],
        offsets: Tensor,
        scale: Tensor | None,
        zero: Tensor | None,
    ) -> tuple[Tensor, Kept]:
        values, _ = self.values(weight, (scale, zero, None), x.dtype)
        if tracer.active is not None:
            tracer.rounded(values, weight)
        y = torch._grouped_mm(x, values.mT if self.turned else values, offs=offsets)
        return y, (weight, x, offsets, scale, zero)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        weight, x, offsets, *scales = kept
        scales = [*scales, None]
        refuse_second_derivative("a grouped product of rounded experts")
        grad = in_rows(grad)
        learns = needs[1] or needs[5] or needs[6]
        of_x = of_weight = of_scale = of_zero = None
        found: Any = None
        if needs[0] or (learns and scales[0] is None):
            values, found = self.values(weight, scales, grad.dtype, grad)
            if needs[0]:
                of_x = torch._grouped_mm(grad, values if self.turned else values.mT, offs=offsets)
            del values
        if learns:
            of_weight = grouped_gradient(x, grad, offsets, self.turned)
            of_weight = of_weight.mT if self.turned else of_weight
            if scales[0] is None:
                of_weight = found.passed(of_weight)
            else:
                of_weight, of_scale, of_zero = self.learned(of_weight, weight, scales, found, True)
        return of_x, of_weight, None, of_scale, of_zero


class RoundingOfGathered(Rounding):
    """`Rounding` of the form of codes that FSDP2 gathers, which decodes itself."""

    def alias(self, weight: Any) -> Any:
        """A low-bit weight that a graph holds could not be moved or cast, which swaps the tensors of a subclass."""
        return weight.detach()

    def values(
        self,
        weight: Any,
        scales: Sequence[Tensor | None],
        dtype: torch.dtype,
        after: Tensor | None = None,
        found: Found | None = None,
    ) -> tuple[Tensor, Any]:
        return weight.decoded_values().to(dtype), weight

    def kept_of(self, found: Any, scale: Tensor | None) -> Kept:
        return ()

    def learned(
        self,
        grad: Tensor,
        weight: Any,
        scales: Sequence[Tensor | None],
        found: Any,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return weight.gradients_by(grad, *scales[:2])

    def differentiable(self, weight: Any, scales: Sequence[Tensor | None]) -> Tensor:
        return weight.fake_quantized() if scales[0] is None else weight.quantized_by(*scales)

    def runs_in_graphs(self, weight: Any) -> bool:
        return False


def rounding_of(weight: Any, dtype: torch.dtype) -> Rounding:
    """How products round their operands, where the plain values of `weight`, a FakeQuantizedTensor, are
    of `dtype`.

    It is not a method, since Dynamo takes each method of a tensor for an operation that returns tensors.
    """
    spec = weight.scheme.weight
    scale_dtype = spec.scale_dtype_for(dtype)
    kind = RoundingOfGathered if weight.is_gathered else Rounding
    by = weight.quantizer
    return kind(spec, scale_dtype, weight.input_spec, by.absolute)


def rounded_linear(
    x: Tensor,
    weight: Any,
    bias: Tensor | None,
    rounding: Rounding,
    scales: Sequence[Tensor | None],
) -> Tensor:
    """x [..., K] times the weight [N, K] transposed, both rounded, plus bias [N]: differentiable in all tensors.

    Args:
        x: [..., K].
        weight: [N, K], plain or gathered, as `rounding` takes it.
        bias: [N].
        rounding: how both are rounded.
        scales: what `Rounding` takes besides.
    """
    compiling = torch.compiler.is_compiling()
    keeps = compiling and not rounding.runs_in_graphs(weight)
    if keeps or not torch.is_grad_enabled():
        return rounding.recorded(x, weight, bias, scales)
    if compiling and rounding.activation is not None:
        x = fake_quantize(x, rounding.activation)
        rounding = replace(rounding, activation=None)
    return unflattened(RoundedLinear.apply(flattened(x), weight, bias, rounding, *scales), x)
