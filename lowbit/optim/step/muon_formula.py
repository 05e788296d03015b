"""Muon's formula before and after the orthogonalization, in PyTorch operations and for the kernels.

Both halves are elementwise. A step of a matrix calls the first one, orthogonalizes its result, and calls the second.
The whole formula stands in `lowbit.optim.muon`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def direction(
    grad: Tensor, momentum_buffer: Tensor, *, momentum: float, nesterov: bool, maximize: bool
) -> Tensor:
    """U of `lowbit.optim.muon`, of the shape of `grad`.

    Args:
        grad: stays as it is.
        momentum_buffer: M of that formula, updated in place.
        momentum, nesterov, maximize: as `Muon` takes them.
    """
    if maximize:
        grad = -grad
    momentum_buffer.lerp_(grad, 1 - momentum)
    return grad.lerp(momentum_buffer, momentum) if nesterov else momentum_buffer


def descend(
    param: Tensor, update: Tensor, *, lr: float | Tensor, weight_decay: float, ratio: float
) -> None:
    """The end of a step: decay the weight, and subtract the update.

    Args:
        param: changed in place.
        update: orthogonal, of its shape.
        lr, weight_decay: as `Muon` takes them.
        ratio: what multiplies `lr` for this shape.
    """
    param.mul_(1 - lr * weight_decay).sub_(update * (lr * ratio))


def even_rows(matrices: Tensor, moments: Tensor, beta2: float) -> Tensor:
    """NorMuon (arXiv 2510.05491): orthogonal matrices with each row divided by the root of its mean square over steps.

    Args:
        matrices: O [count, rows, cols].
        moments: the mean squares, float32 [count, rows]; they are updated in place.
        beta2: their decay.

    Returns:
        `matrices`, each with the norm sqrt(min(rows, cols)), that of an exactly orthogonal one. The bits of one do not
        depend on the others.
    """
    # It imports Triton.
    from lowbit_kernels.elementwise.scale_matrices import row_norms, scale_matrices

    rows, cols = matrices.shape[1:]
    roots = row_norms(matrices, 2) / math.sqrt(max(cols, 1))
    moments.lerp_(roots.square(), 1 - beta2)
    factors = moments.sqrt().clamp_min_(LEAST_ROOT).reciprocal_()
    norms = row_norms((roots * factors).unsqueeze(1), 2) * math.sqrt(cols)
    factors *= math.sqrt(min(rows, cols)) / norms.clamp_min_(LEAST_ROOT)
    return scale_matrices(matrices, factors)


LEAST_ROOT = 1e-8
"""Roots of mean squares and norms below this one count as this one."""


# Arguments of `lowbit_kernels.elementwise.fused_step.Rule`, which is imported where it is used. The "weight" of the
# first rule is U, which is written only.
DIRECTION: dict[str, Any] = {
    "hyper": ("momentum", "nesterov", "maximize"),
    "prepare": "c[0] = maximize ? -1.0 : 1.0; c[1] = 1.0 - momentum; c[2] = nesterov ? c[1] : 0.0;",
    "update": "const float d = c[0] * g; s[0] += c[1] * (d - s[0]); w = s[0] + c[2] * (d - s[0]);",
}
DESCENT: dict[str, Any] = {
    "hyper": ("weight_decay", "ratio"),
    "prepare": "c[0] = 1.0 - lr * weight_decay; c[1] = lr * ratio;",
    "update": "w = w * c[0] - c[1] * g;",
}


def stack_shape(shape: torch.Size, stacked: bool) -> tuple[int, int, int]:
    """Number of matrices, rows and columns of a parameter of this shape."""
    if stacked:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def learning_rate_ratio(shape: torch.Size, group: dict[str, Any]) -> float:
    """The factor of the orthogonal update of a parameter of this (global) shape; `ratio` of `lowbit.optim.muon`."""
    _, rows, cols = stack_shape(shape, group["stacked"])
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / max(cols, 1)))
