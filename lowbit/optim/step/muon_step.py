"""Muon's step of matrices: `lowbit.optim.step.matrix_step` with the orthogonalization between its halves.

U, the matrix to orthogonalize, is bfloat16 where a CUDA device orthogonalizes it, and float32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.optim.step import muon_formula
from lowbit.optim.step.job import GradScale, Job
from lowbit.optim.step.matrix_step import Batch, MatrixStepPlan, holds_whole
from lowbit.optim.step.orthogonalize import orthogonalize
from lowbit.optim.step.row_exchange import gathered, own_part, sharded_dim
from lowbit.tensor.core.dtensor import local, placed
from lowbit_kernels.elementwise.fused_step import Rule

_DIRECTION = Rule(**muon_formula.DIRECTION)


def run(optimizer: Any, jobs: list[Job], scale: GradScale) -> None:
    """Step the matrices of these jobs."""
    plan = MatrixStepPlan.of(optimizer, jobs, OrthogonalizedBatch)
    plan.run(optimizer, jobs, scale.coefficient)


class OrthogonalizedBatch(Batch):
    """Muon's batch."""

    options = ("adjust_lr_fn",)
    exchanges_rows = True
    direction = staticmethod(muon_formula.direction)

    @classmethod
    def dtype_of(cls, param: Any, is_local: bool) -> torch.dtype:
        device = held_locally(param).device.type if is_local else param.device_mesh.device_type
        return torch.bfloat16 if device == "cuda" else torch.float32

    def half(self, group: dict[str, Any]) -> tuple[Rule, dict[str, float]]:
        return _DIRECTION, {}

    def ratio(self, shape: torch.Size, group: dict[str, Any]) -> float:
        return muon_formula.learning_rate_ratio(shape, group)

    def between(self, optimizer: Any, job: Job, buffer: Tensor) -> Sequence[Tensor]:
        """This rank's parts of the orthogonal matrices."""
        params, group = job.params, job.group
        count, rows, cols = muon_formula.stack_shape(params[0].shape, group["stacked"])
        moments = self._row_moments(optimizer, job)

        def turned(matrices: Tensor, moments: Tensor | None) -> Tensor:
            names = {
                "coefficients": "ns_coefficients",
                "steps": "ns_steps",
                "scaling": "ns_scaling",
            }
            options = {name: group[option] for name, option in names.items()}
            matrices = orthogonalize(matrices, eps=group["eps"], **options)
            if moments is None:
                return matrices
            return muon_formula.even_rows(matrices, moments.view(-1, rows), group["row_beta2"])

        if self.exchange is not None:
            own_rows = self.exchange.rows[self.exchange.rank]
            whole = self.exchange.to_owners(buffer.view(len(params), own_rows, cols))
            if moments is None:
                return self.exchange.back(turned(whole, None)).view(buffer.shape).unbind()
            by_row = replace(self.exchange, cols=1)
            sent = by_row.to_owners(moments.unsqueeze(-1))
            whole = turned(whole, sent)
            self._keep(optimizer, job, by_row.back(sent).squeeze(-1))
            return self.exchange.back(whole).view(buffer.shape).unbind()
        if self.is_local:
            held = buffer.shape[1] if group["stacked"] else count
            matrices = turned(buffer.view(len(params) * held, rows, cols), moments)
            self._keep(optimizer, job, moments)
            return matrices.view(buffer.shape).unbind()
        whole = gathered(params, buffer)
        results = turned(whole.view(len(params) * count, rows, cols), moments).view(whole.shape)
        self._keep(optimizer, job, moments)
        return [own_part(p, r).to(buffer.device) for p, r in zip(params, results, strict=True)]

    def _row_moments(self, optimizer: Any, job: Job) -> Tensor | None:
        """NorMuon's moments of these parameters on this rank, [parameters, ..., rows], on the device of the work."""
        if job.group["row_beta2"] is None:
            return None
        moments = torch.stack([local(optimizer.state[p]["row_moment"]) for p in job.params])
        first: Any = job.params[0]
        if self.is_local or moments.device.type == first.device_mesh.device_type:
            return moments
        return moments.to(first.device_mesh.device_type)

    def _keep(self, optimizer: Any, job: Job, moments: Tensor | None) -> None:
        if moments is not None:
            own = [local(optimizer.state[p]["row_moment"]) for p in job.params]
            torch._foreach_copy_(own, list(moments.unbind()))


def new_row_moment(param: Tensor, stacked: bool) -> Tensor:
    """The state "row_moment": float32 zeros [rows], or [matrices, rows] of a stack. Sharded by rows or matrices as the
    parameter is; every rank has the moments of matrices that are gathered."""
    shape = param.shape[: 2 if stacked else 1]
    device = local(param).device
    is_exchanged = not stacked and is_dtensor(param) and sharded_dim(param) is not None
    if not is_dtensor(param) or not (holds_whole(param, stacked) or is_exchanged):
        return torch.zeros(shape, dtype=torch.float32, device=device)
    own = torch.zeros(local(param).shape[: len(shape)], dtype=torch.float32, device=device)
    return placed(param, own, param.placements, shape)
