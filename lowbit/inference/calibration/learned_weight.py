"""A weight whose rounding is learned, the values that it shows the model, and what is learned of it.

For a weight W with scale s and zero point z (`lowbit.inference.calibration.learned_rounding`)

    Q = dequantize(quantize(L; s, z)),      L = W + V · d at first W, d the distance to the next value of the grid

L, s and z follow the sign of their gradients. Rounding passes gradients straight through, and those of s and z are in
`lowbit.numerics.learned_scales`. A weight that an earlier step moved further than half a step from W (GPTQ) starts at
the border of its cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lowbit.convert import Target, is_turned, shape_of_blocks
from lowbit.inference.calibration.columns import levels_of
from lowbit.inference.calibration.step import Layer, QParams, Start, by_rows
from lowbit.linear.fused_rounding import descended, learned_gradients, rounded_by
from lowbit.numerics.learned_scales import RATE, as_parameters, qparams, rate_of
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Float8
from lowbit.numerics.spec import Spec
from lowbit.tensor.frozen.rotated_tensor import rotated_blocks

INSIDE = 0.499
"""How far from its value a weight may start, in steps: within its cell."""

Vectors = Sequence[tuple[Tensor, Tensor]]
"""Parameters, and their values in the model in high precision."""


class Weight:
    """A weight that steps on layers have rounded.

    Args:
        target: the weight.
        layer: what the steps on it left.
        start: the low-bit weight that gets these values, if there is one.

    Attributes:
        original: the parameter's values before.
        qparams: scale and zero point.
        mask, pruned: those of a pruned layer (`Layer`), its values before they were rounded; None for others.
        values: float32 [N, K] or [E, N, K], the rounded values, of rotated inputs where the layer has them.
    """

    def __init__(self, target: Target, layer: Layer, start: Start | None = None) -> None:
        self.target, self.name, self.start = target, layer.name, start
        self.spec, self.joint, self.scale_dtype = layer.spec, layer.joint, layer.scale_dtype
        self.qparams = layer.minmax() if layer.qparams is None else layer.qparams
        self.values = layer.rounded(self.qparams) if layer.values is None else layer.values
        self.rotation = layer.rotation
        self.is_compressed = layer.is_compressed
        self.mask, self.pruned = layer.mask, layer.weight if layer.mask is not None else None
        self.original = target.weight.data

    def show(self, values: Tensor) -> None:
        """Give the parameter, which stays plain, these values [N, K]."""
        plain = self.original
        values = rotated_blocks(values, self.rotation)
        own = values.mT if is_turned(self.target) else values.reshape(plain.shape)
        self.target.weight.data = own.to(plain.dtype).contiguous()

    def show_wanted(self) -> None:
        """Give the parameter the values to round."""
        self.target.weight.data = self.original
        if self.pruned is not None:
            self.show(self.pruned)

    def wanted(self) -> Tensor:
        """The values to round: float32 [N, K] or [E, N, K]."""
        if self.pruned is not None:
            return self.pruned
        return self.matrix(self.original if self.start is None else self.start.values).float()

    def matrix(self, t: Tensor) -> Tensor:
        """A tensor of the parameter's shape as the weight is quantized: [N, K] or [E, N, K]."""
        shape = shape_of_blocks(self.target)
        found = t.mT.contiguous() if is_turned(self.target) else t.reshape(shape)
        return rotated_blocks(found, self.rotation)


@contextmanager
def originals(weights: Sequence[Weight], vectors: Vectors = ()) -> Iterator[None]:
    """The context in which these parameters have their values of the model in high precision."""
    pairs = [*((w.target.weight, w.original) for w in weights), *vectors]
    held = [p.data for p, _ in pairs]
    for p, original in pairs:
        p.data = original
    try:
        yield
    finally:
        for (p, _), data in zip(pairs, held, strict=True):
            p.data = data


def steps_of(values: Tensor, spec: Spec, found: QParams) -> Tensor:
    """The distance from each value [..., N, K] of the grid to the nearest other one, float32."""
    shape = tuple(values.shape)
    scale = by_rows(found[0].float().abs(), spec, shape).unsqueeze(-1)
    scale = scale.expand(*scale.shape[:-1], spec.block_size(shape)[-1]).flatten(-2)
    scale = scale.narrow(-1, 0, shape[-1])
    fmt = spec.format
    if isinstance(fmt, LookupTable):
        ordered = torch.tensor(levels_of(fmt), dtype=torch.float32, device=values.device)
        gaps = ordered.diff()
        ends = gaps.new_full((1,), math.inf)
        nearest = torch.minimum(torch.cat([ends, gaps]), torch.cat([gaps, ends]))
        middles = (ordered[1:] + ordered[:-1]) / 2
        return scale * nearest[torch.bucketize(values / scale, middles)]
    if isinstance(fmt, Float8):
        info = torch.finfo(fmt.dtype)
        mantissa, exponent = (values / scale).frexp()
        above = (exponent - 1).exp2().clamp(min=info.tiny) * info.eps
        is_power = (mantissa.abs() == 0.5) & (above > info.tiny * info.eps)
        return scale * torch.where(is_power, above / 2, above)
    return scale


class Variables:
    """What is learned of one weight."""

    def __init__(self, weight: Weight, scale_rate: float) -> None:
        self.weight, self.spec = weight, weight.spec
        scale, zero = weight.qparams
        room = INSIDE * steps_of(weight.values, self.spec, weight.qparams)
        away = weight.wanted() - weight.values
        self.latent = (weight.values + away.clamp(-room, room)).contiguous()
        zero = None if zero is None else zero.contiguous()
        self.scale, self.zero = as_parameters(self.spec, scale.float().contiguous(), zero)
        self.unit = self.scale.abs() * scale_rate
        is_joint = weight.joint is not None and self.spec.scales is None
        is_free = self.spec.is_searchable and self.spec.super_blocks is None
        self.learns_scales = scale_rate > 0 and is_free and not is_joint
        self.kept = self.spec.kept_parts(weight.joint)

    def qparams(self) -> QParams:
        """Scale and zero point as they are stored."""
        if not self.learns_scales:
            return self.weight.qparams
        dtype = self.weight.scale_dtype
        if self.spec.scales is not None:
            scale = self.scale.abs() * rate_of(self.spec)
            return self.spec.scales.nearest(scale, self.kept), None
        zero = None if self.zero is None else self.zero.to(dtype)
        return qparams(self.spec, self.scale.to(dtype), zero)

    def move(self, rate: float) -> None:
        """One step against the sign of the gradients, by `rate` steps of the grid."""
        grad = self.weight.target.weight.grad
        if grad is None:
            return
        grad, own = self.weight.matrix(grad), (self.scale, self.zero)
        dtype, values = self.weight.original.dtype, None
        if self.learns_scales and self.weight.mask is None:
            values = descended(
                *(grad, self.latent, self.spec, own, self.unit, rate),
                *(self.weight.scale_dtype, dtype),
            )
        if values is None:
            self._descend(grad, own, rate)
            values = self.values(dtype)
        self.weight.show(values)

    def _descend(self, grad: Tensor, own: QParams, rate: float) -> None:
        """`descended` by PyTorch's operations, for every format. Products are rounded before they are added."""
        found = self.qparams()
        of_latent, of_scale, of_zero = learned_gradients(
            grad, self.latent, self.spec, own, found=found
        )
        if self.weight.mask is not None:
            of_latent = of_latent * self.weight.mask
        steps = steps_of(self.latent, self.spec, found) * rate
        self.latent.sub_(of_latent.float().sign_().mul_(steps))
        if self.learns_scales:
            self.scale.sub_(of_scale.sign_().mul_(self.unit * rate))
            if self.zero is not None and of_zero is not None:
                ratio = rate_of(self.spec) / RATE
                self.zero.sub_(of_zero.sign_().mul_(self.unit * (rate * ratio)))

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rounded values [N, K]."""
        return rounded_by(self.latent, self.spec, self.qparams(), dtype)

    def keep(self) -> None:
        """Make this the result."""
        self.weight.values, self.weight.qparams = self.values(), self.qparams()
