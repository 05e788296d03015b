"""From a weight to the layer on which steps work, and from what they left to the low-bit weight.

Stacked experts become layers of a few experts each: what the steps make of a stack in float32 takes several times its
bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.convert import Target, is_conv, is_turned, rounding_owners, shape_of_blocks
from lowbit.inference.calibration.inputs import Moments
from lowbit.inference.calibration.learned_weight import Weight
from lowbit.inference.calibration.step import Layer, Start
from lowbit.layers.static_input import input_qparams
from lowbit.tensor.core.checks import check_finite
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor
from lowbit.tensor.frozen.requantize import write
from lowbit.tensor.frozen.rotated_tensor import RotatedTensor
from lowbit.tensor.frozen.sparse24_tensor import Sparse24Tensor

MOST_AT_ONCE = 2**24
"""Bytes of experts that are in float32 at a time; one expert in any case."""


def layer_of(
    target: Target, moments: Moments, joint: Tensor | None, start: Start | None = None
) -> Layer:
    """The weight as a matrix, or several, for the steps."""
    spec, plain = target.scheme.weight, target.weight.detach() if start is None else start.values
    matrix = plain.mT if is_turned(target) else plain.reshape(shape_of_blocks(target))
    if start is not None:
        name, wide, held = target.fqn, matrix.float().contiguous(), start.held
        qparams = held.scale_values(), held.zero_point
        dtype = held.scale.dtype if spec.scales is None else qparams[0].dtype
        return Layer(name, wide, spec, dtype, moments, _kept_joint(held), qparams)
    if joint is None and spec.scales is not None and spec.scales.joint is not None:
        joint = spec.joint_part([matrix], torch.float32)
    dtype = spec.scale_dtype_for(plain.dtype)
    wide = matrix.float().contiguous()
    return Layer(target.fqn, wide, spec, dtype, moments, joint)


def by_minmax(target: Target, layer: Layer, joint: Tensor | None) -> Weight:
    """The weight of a layer on which steps have run, with the scales that it would have without them. `joint`: what
    siblings share then."""
    plain = copy.copy(layer)
    plain.values = plain.qparams = None
    plain.joint = joint
    if layer.joint is not None and (layer.rotation > 1 or joint is None):
        plain.joint = layer.spec.joint_part([layer.weight], torch.float32)
    return Weight(target, plain)


def _kept_joint(held: Any) -> Tensor | None:
    """The part of the scales of a low-bit weight that its siblings share."""
    spec = held.spec
    if not spec.joins:
        return None
    found: Tensor = held.scale if spec.scales is None else getattr(held, spec.scales.joint)
    return found


def made(weight: Weight, target: Target) -> Tensor:
    """The quantized weight."""
    if weight.start is not None:
        held: AffineTensor = weight.start.held
        write(held, weight.values, weight.qparams)
        check_finite(held, weight.values)
        return held
    found: Any = affine(weight, target)
    if weight.rotation > 1:
        return RotatedTensor.of_matrix(found, weight.rotation)
    if weight.is_compressed:
        found = Sparse24Tensor.of_dense(found)
    if is_conv(target):
        return ConvTensor.of_matrix(found, weight.original.shape)
    return in_place_of(found, target)


def in_place_of(found: Any, target: Target) -> Any:
    """A low-bit weight as its groups run, as the model holds it."""
    return found._transposed() if is_turned(target) else found


def affine(weight: Weight, target: Target) -> AffineTensor:
    """The quantized weight, as its groups run."""
    activation = target.scheme.activation
    of_input = None
    if activation is not None and activation.static:
        of_input = input_qparams(rounding_owners(target)[0].module, activation)
    qparams, joint = weight.qparams, weight.joint
    made = AffineTensor.from_float(weight.values, target.scheme, qparams, of_input, joint)
    made = made._with(dtype=weight.original.dtype)
    check_finite(made, weight.values)
    return made


def is_divisible(target: Target) -> bool:
    """True for a stack whose experts have nothing in common, neither scales nor parts of them."""
    spec = target.scheme.weight
    has_shared = spec.joins or (spec.scales is not None and bool(spec.scales.shared))
    return len(shape_of_blocks(target)) == 3 and not spec.shares_rows and not has_shared


def some_experts(target: Target, moments: Moments) -> Iterator[Layer]:
    """The layers of a few experts each, in their order, that stand for a stack."""
    plain, spec = target.weight.detach(), target.scheme.weight
    stack = plain.mT if is_turned(target) else plain
    each = 4 * stack[0].numel() if len(stack) else 1
    count = max(MOST_AT_ONCE // max(each, 1), 1)
    for first in range(0, len(stack), count):
        some = slice(first, first + count)
        yield Layer(
            *(target.fqn, stack[some].float().contiguous(), spec),
            *(spec.scale_dtype_for(plain.dtype), moments.some(first, first + count)),
        )


def joined(parts: Sequence[Any], target: Target) -> Any:
    """The low-bit stack of these low-bit experts, [n, N, K] each."""
    names = parts[0].inner_tensors()
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return parts[0]._with(tensors, shape_of_blocks(target))
