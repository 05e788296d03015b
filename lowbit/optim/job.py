"""What a step has to do: parameters with a gradient, those of one group, device and dtype together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass
class Job:
    """Parameters of one group, device and dtype; the lists have one entry a parameter."""

    group: dict[str, Any]
    params: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """Positions among all parameters of the optimizer: the keys of random draws."""
    grads: list[Tensor] = field(default_factory=list)
    """This rank's part, placed as the parameter is."""

    @property
    def may_fuse(self) -> bool:
        """Whether to look for a kernel. Where there can be none, only if the user asks for one: to be told why not."""
        wanted = self.group["fused"]
        return self.grads[0].device.type in ("cuda", "cpu") if wanted is None else wanted

    def add(self, param: Tensor, index: int, grad: Tensor) -> None:
        self.params.append(param)
        self.indices.append(index)
        self.grads.append(grad)


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
                if param.grad.layout is not torch.strided:
                    raise _sparse(param, param.grad)
                if param.grad.shape != param.shape:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(param.shape)} has a gradient of shape {tuple(param.grad.shape)}; "
                        "call zero_grad() after its data is replaced by that of another shape"
                    )
                found.append((group, param, index))
            index += 1
    jobs: dict[Any, Job] = {}
    # after all checks, since a gradient may have to be moved between ranks
    for group, param, index in found:
        kind = (id(group), param.device, param.dtype)
        if kind not in jobs:
            jobs[kind] = Job(group)
        jobs[kind].add(param, index, local_grad(param))
    return list(jobs.values())


def local_grad(param: Any) -> Tensor:
    """This rank's part of a parameter's gradient, placed as the parameter is; ranks may exchange data for it."""
    grad = param.grad
    if not isinstance(param, DTensor):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad.to_local()


def _sparse(param: Tensor, grad: Tensor) -> RuntimeError:
    return RuntimeError(
        f"the gradient of a parameter of shape {tuple(param.shape)} is sparse ({grad.layout}), which is not "
        "supported; use nn.Embedding(sparse=False), or torch.optim.SparseAdam for that parameter"
    )
