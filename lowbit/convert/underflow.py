"""Groups of a weight that become 0 because no smaller scale can be stored.

A float16 scale is at least 2^-24, and a group of values below half of it becomes 0. K-quants have scales d · s with d
in float16, NVFP4 has e4m3 over a global scale. Powers of two, bfloat16 and float32 start at 2^-126. Scales in "double"
(NF4 with double quantization) are steps around their mean, so one near 0 is stored too large, or below 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.numerics.affine import absmax_of_blocks, smallest_scale
from lowbit.numerics.scale_format import E4M3, Double
from lowbit.numerics.spec import Spec
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.rotated_tensor import RotatedTensor


@torch.no_grad()
def underflow(weight: Tensor, made: Tensor) -> str | None:
    """A sentence for a report, on the groups of `weight` that became 0 in `made`; None if there are none. The weight
    itself is read only where a scale is the smallest that can be stored.

    Args:
        weight: [..., N, K], the plain weight that was rounded.
        made: the new one, of the same shape. One that is not frozen has no such groups.
    """
    if not isinstance(made, AffineTensor) or made.is_meta or not made.numel():
        return None
    if made.transposed:
        made, weight = made._transposed(), weight.mT
    spec, shape = made.spec, made.shape_of_codes(made.shape)
    lost, dtype = _at_smallest(made)
    if lost.shape != torch.Size(spec.blocks(shape)) or not bool(lost.any()):
        return None
    rows: Tensor | slice = slice(None)
    if spec.block_size(shape)[0] == 1:
        rows = lost.flatten(1).any(1)
    weight, lost = weight.reshape(shape)[rows], lost[rows]
    if isinstance(made, RotatedTensor):
        weight, made = made.rotated(weight), made.rotated_matrix
    lost = lost & _is_used(weight, spec)
    if bool(lost.any()):
        lost &= ~_is_used(made.dequantize().reshape(shape)[rows], spec)
    if not (count := int(lost.sum())):
        return None
    scale = made.scale_values().abs()
    reason = f"start at {scale[rows][lost].min():.1e}: take a wider scale_dtype"
    if isinstance(spec.scales, Double):
        apart = Double.widest_steps(made.inner_tensors())[rows][lost].max()
        reason = f"are up to {apart:.1e} apart: take double_quantization=False"
    return f"{count} of {scale.numel()} groups became 0, since scales in {dtype} {reason} or another format"


def _at_smallest(weight: AffineTensor) -> tuple[Tensor, str]:
    """The blocks whose scale may be the smallest that can be stored, and the name of what stores it."""
    spec, scale = weight.spec, weight.scale
    if isinstance(spec.scales, E4M3):
        return scale.float() <= E4M3.smallest, spec.scale_format
    if isinstance(spec.scales, Double):
        steps = Double.widest_steps(weight.inner_tensors())
        return weight.scale_values().abs() <= steps, spec.scale_format
    if spec.scales is not None:
        return weight.scale_values() <= smallest_scale(torch.float32), spec.scale_format
    if spec.super_blocks is not None:
        most = max(-spec.super_blocks.low, spec.super_blocks.high)
        return scale.abs() <= smallest_scale(torch.float16) * most, "float16"
    dtype = spec.scale_dtype or scale.dtype
    return scale.abs() <= smallest_scale(dtype), str(dtype).removeprefix("torch.")


def _is_used(values: Tensor, spec: Spec) -> Tensor:
    """The blocks [blocks along each dimension] that are not all 0."""
    return absmax_of_blocks(spec.pad((values != 0).float()), spec.block_size(values.shape)) > 0
