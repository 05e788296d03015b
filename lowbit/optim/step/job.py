"""The work of a step: jobs, which are parameters with gradients, and the factor that scales all gradients.

Both implementations of a step (`lowbit.optim.step.fused` and `lowbit.optim.step.eager`) build on this module and not on
each other. The optimizer runs the compiled one first; PyTorch operations update the remaining parameters.

Clipping, unscaling and skipping leave `.grad` alone. The norm is computed in float64, in which squares of float32
numbers cannot overflow: the norm is finite exactly if every gradient is. For a DTensor the norm is summed over the mesh
dimensions that shard the DTensor. A plain parameter counts once, because it is the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.numerics.sharded import is_dtensor

# Elements updated at once: on a CPU they fit into the cache, on a GPU they fill the device.
PIECE_CPU, PIECE_OTHER = 2**17, 2**24


class StepOfJobs(Protocol):
    """One implementation of the step."""

    def run(self, optimizer: Any, jobs: list[Job], scale: GradScale) -> list[Job]:
        """Update the parameters that this implementation takes, and return the remaining jobs.

        Args:
            optimizer: the `LowbitOptimizer`. All states exist.
            jobs: the remaining work.
            scale: the factor of all gradients, and whether to skip the step.
        """


# ---- jobs ---------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """Parameters of one group, device and dtype. The lists have one entry a parameter."""

    group: dict[str, Any]
    params: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """Indices among all parameters of the optimizer: part of the keys of random bits."""
    grads: list[Tensor] = field(default_factory=list)
    """This rank's part, sharded as the parameter is."""

    @property
    def may_fuse(self) -> bool:
        """True if a step looks for a kernel. On other devices it does so only with fused=True, and raises an error."""
        wanted = self.group["fused"]
        return self.grads[0].device.type in ("cuda", "cpu") if wanted is None else wanted

    def add(self, param: Tensor, index: int, grad: Tensor) -> None:
        self.params.append(param)
        self.indices.append(index)
        self.grads.append(grad)

    def subset(self, some: list[int]) -> Job:
        """The job of these entries of the lists."""
        columns = (self.params, self.indices, self.grads)
        return Job(self.group, *([column[i] for i in some] for column in columns))  # type: ignore[arg-type]


def collect(groups: list[dict[str, Any]]) -> list[Job]:
    """The jobs of a step.

    Raises:
        RuntimeError: a gradient is sparse, or of another shape than its parameter.
    """
    found: list[tuple[dict[str, Any], Tensor, int]] = []
    index = 0
    for group in groups:
        for param in group["params"]:
            if param.grad is not None:
                _check_grad(param)
                found.append((group, param, index))
            index += 1
    jobs: dict[Any, Job] = {}
    # After all checks, because ranks may exchange data for a gradient.
    for group, param, index in found:
        kind = (id(group), param.device, param.dtype)
        if kind not in jobs:
            jobs[kind] = Job(group)
        jobs[kind].add(param, index, local_grad(param))
    return list(jobs.values())


def local_grad(param: Any) -> Tensor:
    """This rank's part of a parameter's gradient, sharded as the parameter is. Ranks may exchange data for it."""
    grad = param.grad
    if not is_dtensor(param):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad.to_local()


def _check_grad(param: Tensor) -> None:
    grad = param.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is sparse ({grad.layout}), which is not "
            "supported; use nn.Embedding(sparse=False), or torch.optim.SparseAdam for that parameter"
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has a gradient of shape {tuple(grad.shape)}; "
            "call zero_grad() after its data is replaced by that of another shape"
        )


def piece_of(device: torch.device) -> int:
    """Elements that are updated at once on a device."""
    return PIECE_CPU if device.type == "cpu" else PIECE_OTHER


def rows_of(weight: Tensor, rows: int) -> Tensor:
    """A low-bit weight viewed with that many rows, as its states have."""
    return weight if weight.shape[0] == rows else weight.view(rows, -1, weight.shape[-1])


# ---- all gradients together ---------------------------------------------------------------------------------


class GradScale(NamedTuple):
    """Applies to every gradient of a step: tensors on the device of the first parameter, or None."""

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
    """The scale of gradients. Clipping multiplies by min(1, max_norm / (norm + 1e-6)), as
    `torch.nn.utils.clip_grad_norm_`.

    Args:
        jobs: all parameters of the step.
        max_norm: the largest norm of all gradients together; None: any.
        skip_nonfinite: True skips the step where that norm is infinite or NaN.
        loss_scale: what the loss was multiplied by, or None.
        found_inf: another value than 0 skips the step, or None.
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
    # In the optimizer's order, which all ranks share. Jobs may differ between ranks.
    each = (e for job in jobs for e in zip(job.indices, job.params, job.grads, strict=True))
    for _, param, grad in sorted(each, key=itemgetter(0)):
        alike[sharding(param), grad.device].append(grad)
    squares = []
    for (mesh_dims, _), grads in alike.items():
        norms = torch._foreach_norm(grads, 2.0, dtype=torch.float64)
        squares.append((mesh_dims, torch.stack(norms).square().sum()))
    return norm_over_ranks(squares, device)


def norm_over_ranks(squares: Iterable[tuple[Any, Tensor]], device: torch.device) -> Tensor:
    """The root of the sum of all `squares`, float64 without dimensions, each given with its `sharding`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for mesh_dims, square in squares:
        if mesh_dims is not None:
            mesh, dims = mesh_dims
            square = square.to(mesh.device_type)  # the device on which ranks communicate
            for dim in dims:
                dist.all_reduce(square, group=mesh.get_group(dim))
        total += square.to(device)
    return total.sqrt()


def sharding(param: Tensor) -> Any:
    """The mesh of a DTensor and the mesh dimensions over which its parts differ; None for any other tensor."""
    if not is_dtensor(param):
        return None
    # Under tensor parallelism FSDP2 shards by a placement whose is_shard() is False.
    placements = enumerate(param.placements)
    dims = [i for i, placement in placements if not placement.is_replicate()]
    return param.device_mesh, tuple(dims)
