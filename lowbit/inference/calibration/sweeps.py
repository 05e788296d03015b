"""Sweeps over the blocks of a rounded weight: each takes the scale and the codes that suit all others best.

For a target W [N, K], a rounded Q and the Hessian H of the inputs the error of the outputs is tr((Q − W) H (Q − W)ᵀ).
With all columns outside a block b fixed, it is quadratic in Q_b, with its minimum at

    T = W_b − R H_bb⁻¹,    R = (Q − W) H_b − (Q_b − W_b) H_bb

For each row several scales of the block are tried: those around the present one that the format stores, of either sign
where the mapping has no zero point, and zero points beside the present one. For each of them T is rounded column by
column as `GPTQ` rounds a weight, whose errors give the error of the outputs exactly. A row keeps what it has unless
another scale, or other codes, lower the error. So the error falls with each block: coordinate descent, as of the codes
in QuantEase (arXiv 2309.01885), here with the scales.

Scales that several rows share, of more than `COLUMNS` inputs, and of super-blocks stay as they are; their codes are
chosen again, in blocks of up to `FIXED` inputs of one group.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.inference.calibration.columns import COLUMNS, ColumnGrid, Factor
from lowbit.numerics.affine import half_step, round_to_dtype, smallest_scale
from lowbit.numerics.number_format import Int
from lowbit.numerics.search import MARGIN
from lowbit.numerics.spec import Spec

RATIOS = (0.8, 0.85, 0.9, 0.94, 0.97, 1.03, 1.06, 1.1, 1.15, 1.2)
"""Multiples of a scale that are tried, where it may take any value."""
SHIFTS = (-0.5, -0.25, 0.25, 0.5)
"""What is added to a zero point that is a value, in steps of the scale."""
FIXED = 32
"""Inputs of a block whose scale stays."""
ELEMENTS = 2**22
"""Elements of all candidates that are rounded at once."""


class Swept(NamedTuple):
    """What sweeps change in place: values [N, K], and the scale and the zero point [N, blocks along K] of each row."""

    values: Tensor
    scale: Tensor
    zero: Tensor | None


def sweep(
    spec: Spec,
    aim: Tensor,
    hessian: Tensor,
    found: Swept,
    sweeps: int,
    mask: Tensor | None = None,
    joint: Tensor | None = None,
) -> None:
    """Lower tr((Q − W) H (Q − W)ᵀ) of a matrix in place.

    Args:
        aim: W, float32 [N, K].
        hessian: H, float32 [K, K], positive definite.
        found: Q and its scales.
        sweeps: how often each block is chosen again.
        mask: bool [N, K], False where Q is 0; None: nowhere.
        joint: what the scales of the matrix share (`Spec.joint_part`).
    """
    shape = tuple(aim.shape)
    *rows, group = spec.block_size(shape)
    is_free = set(rows) <= {1} and group <= COLUMNS and spec.super_blocks is None
    width = group if is_free else min(group, FIXED)
    error = found.values - aim
    slope = error @ hessian
    groups = (range(at, min(at + group, shape[1]), width) for at in range(0, shape[1], group))
    blocks = [slice(*ends) for ends in pairwise([*chain.from_iterable(groups), shape[1]])]
    factors = [Factor(hessian[own, own], 0.0, True) for own in blocks]
    for _ in range(sweeps):
        for own, factor in zip(blocks, factors, strict=True):
            block = own.start // group
            within = hessian[own, own]
            rest = slope[:, own] - error[:, own] @ within
            kept = None if mask is None else mask[:, own]
            zero = None if found.zero is None else found.zero[:, block]
            present = found.scale[:, block], zero
            best = aim[:, own] - factor.solved(rest)
            tried = _candidates(spec, *present, joint) if is_free else [present]
            moved = _chosen(spec, best, factor, within, found.values[:, own], tried, kept)
            slope += (moved.values - found.values[:, own]) @ hessian[own]
            found.values[:, own] = moved.values
            error[:, own] = moved.values - aim[:, own]
            if is_free:
                found.scale[:, block] = moved.scale
                if found.zero is not None and moved.zero is not None:
                    found.zero[:, block] = moved.zero


def _chosen(
    spec: Spec,
    best: Tensor,
    factor: Factor,
    hessian: Tensor,
    values: Tensor,
    tried: list[tuple[Tensor, Tensor | None]],
    mask: Tensor | None,
) -> Swept:
    """The values [N, C] of a block, and the scale and zero point [N] of each row, with the least error. `best`: T."""
    apart = values - best
    least = ((apart @ hessian) * apart).sum(1)
    order, upper = factor.order, factor.upper
    values, scale, zero = values[:, order].T, *tried[0]
    groups = torch.zeros_like(order)
    columns = best.T[order]
    kept = None if mask is None else mask.T[order]
    most = max(ELEMENTS // max(columns.numel(), 1), 1)
    for first in range(0, len(tried), most):
        own = tried[first : first + most]
        scales = torch.stack([s for s, _ in own])
        zeros = None if zero is None else torch.stack([z for _, z in own if z is not None])
        flat = None if zeros is None else zeros.view(-1, 1)
        grid = ColumnGrid(spec, scales.view(-1, 1), flat)
        rounded, errors = torch.ops.lowbit.round_columns(
            *(columns.repeat(1, len(own)), upper, groups),
            *(grid.scale, grid.least, grid.most, grid.offset, grid.levels),
            None if kept is None else kept.repeat(1, len(own)),
        )
        error, at = errors.square_().sum(0).view(len(own), -1).min(0, keepdim=True)
        better = error[0] < least * MARGIN
        least = torch.where(better, error[0], least)
        rounded = rounded.view(len(order), len(own), -1)
        picked = rounded.gather(1, at.expand(len(order), 1, -1))[:, 0]
        values = torch.where(better, picked, values)
        scale = torch.where(better, scales.gather(0, at)[0], scale)
        if zeros is not None and zero is not None:
            zero = torch.where(better, zeros.gather(0, at)[0], zero)
    result = torch.empty_like(best)
    result[:, order] = values.T
    return Swept(result, scale, zero)


def _candidates(
    spec: Spec, scale: Tensor, zero: Tensor | None, joint: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """The present scale and zero point [N] of a block of each row, and others that the format stores."""
    if spec.scales is not None:
        kept = spec.kept_parts(joint)
        parts = spec.scales.encode_given(scale[:, None], kept)
        others = [spec.scales.decode(p)[:, 0] for p in spec.scales.neighbours(parts)]
        return [(s.to(scale.dtype), None) for s in (scale, *others)]
    dtype = spec.scale_dtype or scale.dtype
    smallest = smallest_scale(dtype)
    others = [round_to_dtype(scale.float() * ratio, dtype).to(scale.dtype) for ratio in RATIOS]
    fit = [s.isfinite() & (s.abs() >= smallest) for s in others]
    scales = [scale, *(torch.where(ok, s, scale) for ok, s in zip(fit, others, strict=True))]
    if spec.mapping == "half_integer":
        assert zero is not None
        return [(s, half_step(s, zero.dtype)) for s in scales]
    if isinstance(spec.format, Int) and spec.mapping.startswith("symmetric"):
        scales += [-s for s in scales]
    found = [(s, zero) for s in scales]
    if zero is None or spec.mapping.startswith("symmetric"):
        return found
    if not spec.zero_point_is_value:
        low, high = spec.format.quant_min, spec.format.quant_max
        shifted = [(zero.float() + by).clamp(low, high).to(zero.dtype) for by in (-1, 1)]
        return found + [(scale, z) for z in shifted]
    shifted = [round_to_dtype(zero.float() + scale.float() * by, zero.dtype) for by in SHIFTS]
    found += [(scale, torch.where(z.isfinite(), z, zero)) for z in shifted]
    if spec.rounds_minimum:
        found = found[:1] + [spec.with_minimum(*pair) for pair in found[1:]]
    return found
