"""What a step does to all gradients together: unscale, clip to a norm, or skip the step. `.grad` is left alone.

The norm is taken in float64, where the squares of float32 numbers cannot overflow: it is finite exactly if every
gradient is. Over a DTensor it is summed over the mesh dimensions that shard it, so it is the norm of the whole;
plain parameters count once, being the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lowbit.optim.job import Job


class GradScale(NamedTuple):
    """What applies to every gradient of a step. Tensors on the device of the first parameter; None: nothing to do."""

    coefficient: Tensor | None
    """float32 without dimensions: gradients are multiplied by it."""
    skip: Tensor | None
    """bool without dimensions: the step must change nothing."""


def grad_scale(
    jobs: list[Job],
    max_norm: float | None,
    skip_nonfinite: bool,
    loss_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> GradScale:
    """For gradients of a loss that was multiplied by `loss_scale`; `found_inf` other than 0 skips the step.

    Clipping multiplies by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_`.
    """
    if not jobs:
        return GradScale(None, None)
    device = jobs[0].grads[0].device
    skip = None if found_inf is None else found_inf.detach().reshape(()).to(device) != 0
    coefficient = None
    if loss_scale is not None:
        coefficient = loss_scale.detach().reshape(()).to(device).double().reciprocal()
    if max_norm is not None or skip_nonfinite:
        norm = _norm(jobs, device)
        if skip_nonfinite:
            skip = ~norm.isfinite() if skip is None else skip | ~norm.isfinite()
        if max_norm is not None:
            if coefficient is not None:
                norm = norm * coefficient
            clip = (max_norm / (norm + 1e-6)).clamp_max(1.0)
            coefficient = clip if coefficient is None else clip * coefficient
    return GradScale(None if coefficient is None else coefficient.float(), skip)


def _norm(jobs: list[Job], device: torch.device) -> Tensor:
    """The norm of all gradients, on all ranks: float64 without dimensions, on `device`."""
    alike: defaultdict[Any, list[Tensor]] = defaultdict(list)
    # in the optimizer's order, which is that of all ranks; which jobs there are is each rank's own affair
    each = (e for job in jobs for e in zip(job.indices, job.params, job.grads, strict=True))
    for _, param, grad in sorted(each, key=itemgetter(0)):
        alike[_sharding(param), grad.device].append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (sharding, _), grads in alike.items():
        norms = torch._foreach_norm(grads, 2.0, dtype=torch.float64)
        squares = torch.stack(norms).square().sum()
        if sharding is not None:
            mesh, dims = sharding
            # where the ranks exchange; parts may be offloaded
            squares = squares.to(mesh.device_type)
            for dim in dims:
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares.to(device)
    return total.sqrt()


def _sharding(param: Tensor) -> Any:
    """The mesh of a DTensor and its dimensions over which the parts differ; None for any other tensor."""
    if not isinstance(param, DTensor):
        return None
    dims = [i for i, placed in enumerate(param.placements) if not isinstance(placed, Replicate)]
    return param.device_mesh, tuple(dims)
