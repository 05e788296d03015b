"""SOAP's step of matrices: the first half of `lowbit.optim.step.matrix_step` runs in the eigenbases of the gradients.

The formula stands in `lowbit.optim.soap`. `read` averages G G^T and G^T G and rotates the gradients; the first half is
Adam's update of the rotated moments; `between` rotates the update back; the second half subtracts it from the weights;
`finish` refreshes the bases when it is time. The preconditioners and bases of a parameter are states of their own
shape, [side, side], or [matrices, side, side] in a stack. All products are float32.

**Sharded matrices.** Every rank gathers the gradients and updates and does the work on whole matrices, and holds whole
preconditioners and bases; the moments are sharded as the parameter is. The result is that of one process.

The host counts the steps of parameters, because it decides when to refresh. It reads the counter of a state once, and
that of a state which takes its place again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.optim import adam
from lowbit.optim.state import state as states
from lowbit.optim.step.job import GradScale, Job
from lowbit.optim.step.matrix_step import Batch, MatrixStepPlan
from lowbit.optim.step.muon_formula import stack_shape
from lowbit.optim.step.row_exchange import gathered, own_part
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.codebook_tensor import FORMATS, CodebookTensor
from lowbit_kernels.elementwise.fused_step import Rule

SIDES = ("left", "right")
"""The preconditioners of the rows and of the columns. The state of the basis has "_basis" behind the name."""


def sides_of(shape: torch.Size, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the preconditioners of a parameter of this (global) shape, by name."""
    count, *lengths = stack_shape(shape, group["stacked"])
    lead = (count,) if group["stacked"] else ()
    most = group["max_precondition_dim"]
    return {
        side: (*lead, length, length)
        for side, length in zip(SIDES, lengths, strict=True)
        if 1 < length <= most
    }


def new_factors(group: dict[str, Any], param: Tensor) -> dict[str, Callable[[], Tensor]]:
    """`LowbitOptimizer.other_states` of a matrix: preconditioners of zeros, and identities as bases, which a side that
    gets them between two steps has had."""
    device = local(param).device
    made: dict[str, Callable[[], Tensor]] = {}
    for side, shape in sides_of(param.shape, group).items():
        formats = FACTOR_FORMATS.get(group["state"], (group["state"],) * 2)
        for name, asked in zip((side, f"{side}_basis"), formats, strict=True):
            format = states.stored_format(torch.Size(shape), asked)
            made[name] = partial(_begun, shape, format, device, name != side)
    return made


FACTOR_FORMATS = {"4bit": ("8bit", "8bit")}
"""Formats of preconditioners and bases, where they are not that of the moments. In 4 bits either costs 2 to 3%."""


def _begun(shape: tuple[int, ...], format: str, device: torch.device, is_basis: bool) -> Tensor:
    if format in FORMATS:
        made: Tensor = CodebookTensor.zeros(shape, format, signed=True, device=device)
    else:
        dtype = torch.bfloat16 if format == "bf16" else torch.float32
        made = torch.zeros(shape, dtype=dtype, device=device)
    return made.copy_(torch.eye(shape[-1], device=device).expand(shape)) if is_basis else made


# ---- the step -----------------------------------------------------------------------------------------------


def run(optimizer: Any, jobs: list[Job], scale: GradScale) -> None:
    """Step the matrices of these jobs. The first gradient of a parameter that is not zero makes its bases, and moves no
    weight."""
    if jobs and jobs[0].grads[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, and SOAP refreshes the bases of matrices every precondition_frequency "
            "steps, which a graph cannot decide; capture forward and backward, and call step() outside of the graph"
        )
    counts, later = optimizer._counts, []
    for job in jobs:
        fresh: list[int] = []
        rest: list[int] = []
        for i, param in enumerate(job.params):
            stored = optimizer.state[param]["step"]
            counter, count = counts.get(param, (None, 0))
            if counter is not stored:  # the first step, or one of new states
                count = int(stored)
            counts[param] = stored, count + 1
            (rest if count else fresh).append(i)
        if fresh:
            own = job.subset(fresh)
            for param, grad in zip(own.params, own.grads, strict=True):
                whole = _whole_gradient(param, grad, job.group, scale.coefficient)
                state = optimizer.state[param]
                if not bool(whole.any()):  # as torch gives to make states for a state dict
                    counts[param] = state["step"], 0
                    continue
                state["step"].add_(1)
                _begin(state, whole, job.group["betas"][1])
        if rest:
            later.append(job.subset(rest))
    if later:
        plan = MatrixStepPlan.of(optimizer, later, RotatedBatch)
        plan.run(optimizer, later, scale.coefficient)


class RotatedBatch(Batch):
    """SOAP's batch. Ranks exchange no rows: a rank has the bases of every matrix."""

    options = ("max_precondition_dim",)
    needs_step = True

    @staticmethod
    def direction(
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        step: Tensor,
        betas: tuple[float, float],
        eps: float,
        state: str,
    ) -> Tensor:
        """Adam's update of rotated moments. The first step made none.

        Args:
            grad: the rotated gradient.
            exp_avg, exp_avg_sq: the moments of its shape, changed in place.
            step: the number of steps, this one included.
            betas, eps: as `SOAP` takes them.
            state: the format of the moments.
        """
        update = torch.zeros_like(grad)
        options: Any = {"lr": 1.0, "betas": betas, "eps": eps, "weight_decay": 0.0}
        options["state"] = "fp32" if state == "fp32" else "4bit"  # which clamps the quotient
        adam.reference(update, grad, exp_avg, exp_avg_sq, step=step - 1, **options)
        return update.neg_()

    @classmethod
    def dtype_of(cls, param: Tensor, is_local: bool) -> torch.dtype:
        return torch.float32

    def half(self, group: dict[str, Any]) -> tuple[Rule, dict[str, float]]:
        beta1, beta2 = group["betas"]
        largest = math.inf if group["state"] == "fp32" else adam.largest_ratio(beta1, beta2)
        return _DIRECTION, {"beta1": beta1, "beta2": beta2, "largest": largest}

    def ratio(self, shape: torch.Size, group: dict[str, Any]) -> float:
        return 1.0

    def read_like(self, grad: Tensor) -> Tensor:
        return torch.empty(grad.shape, dtype=torch.float32, device=grad.device)

    def read(
        self, optimizer: Any, job: Job, coefficient: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        rotated = []
        for param, grad in zip(job.params, job.grads, strict=True):
            state = optimizer.state[param]
            whole = _whole_gradient(param, grad, job.group, coefficient)
            _average(state, whole, job.group["betas"][1])
            turned = _rotated(whole, _bases(state)).reshape(param.shape)
            rotated.append(own_part(param, turned).to(grad.device).contiguous())
        return rotated, None

    def between(self, optimizer: Any, job: Job, buffer: Tensor) -> Sequence[Tensor]:
        updates = []
        for param, own in zip(job.params, buffer, strict=True):
            bases = {side: basis.mT for side, basis in _bases(optimizer.state[param]).items()}
            whole = _rotated(_matrices(param, own, job.group), bases).reshape(param.shape)
            updates.append(own_part(param, whole).to(own.device).contiguous())
        return updates

    def finish(self, optimizer: Any, job: Job) -> None:
        for param in job.params:
            if (optimizer._counts[param][1] - 1) % job.group["precondition_frequency"] == 0:
                _refresh(optimizer.state[param], param, job.group)


_PREPARE = """
    double root = sqrt(1.0 - pow(beta2, t - 1.0));
    c[0] = root / (1.0 - pow(beta1, t - 1.0));
    c[1] = eps * root;
    c[2] = 1.0 - beta1;
    c[3] = beta2;
    c[4] = 1.0 - beta2;
    c[5] = largest;
"""
_UPDATE = """
    s[0] += c[2] * (g - s[0]);
    s[1] = c[3] * s[1] + c[4] * g * g;
    w = limit_magnitude(quotient(s[0], sqrtf(s[1]) + c[1]), c[5]) * c[0];
"""
_DIRECTION = Rule(("beta1", "beta2", "eps", "largest"), _PREPARE, _UPDATE)


# ---- one parameter ------------------------------------------------------------------------------------------


def _matrices(param: Tensor, own: Tensor, group: dict[str, Any]) -> Tensor:
    """The whole tensor of this rank's part as float32 matrices, [rows, cols] or [matrices, rows, cols]."""
    whole = gathered([param], own.float()[None])[0].to(own.device)
    count, rows, cols = stack_shape(param.shape, group["stacked"])
    return whole.reshape((count, rows, cols) if group["stacked"] else (rows, cols))


def _whole_gradient(
    param: Tensor, grad: Tensor, group: dict[str, Any], coefficient: Tensor | None
) -> Tensor:
    whole = _matrices(param, grad, group)
    if coefficient is not None:
        whole = whole * coefficient.to(whole.device)
    return -whole if group["maximize"] else whole


def _decoded(value: Tensor) -> Tensor:
    part = local(value)
    return part.dequantize() if isinstance(part, CodebookTensor) else part.float()


def _bases(state: dict[str, Any]) -> dict[str, Tensor]:
    """The bases of a parameter in float32, by side."""
    return {side: _decoded(state[f"{side}_basis"]) for side in SIDES if side in state}


def _rotated(matrices: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Q_L^T M Q_R, without a side that has no basis."""
    if "left" in bases:
        matrices = bases["left"].mT @ matrices
    return matrices @ bases["right"] if "right" in bases else matrices


def _average(state: dict[str, Any], grad: Tensor, beta: float) -> None:
    """Mix G G^T and G^T G into the preconditioners."""
    for side in SIDES:
        if side in state:
            product = grad @ grad.mT if side == "left" else grad.mT @ grad
            state[side].copy_(_decoded(state[side]).lerp_(product, 1 - beta))


def _eigenvectors(product: Tensor) -> Tensor:
    """Eigenvectors of symmetric matrices [..., n, n], the smallest eigenvalue first, in their dtype."""
    try:
        return torch.linalg.eigh(product).eigenvectors
    except torch.linalg.LinAlgError:
        # LAPACK's float32 solver does not converge for some products of low rank, such as those of an embedding whose
        # batch has few of the tokens
        return torch.linalg.eigh(product.double()).eigenvectors.to(product.dtype)


def _begin(state: dict[str, Any], grad: Tensor, beta: float) -> None:
    """Preconditioners and bases of the first gradient: eigenvectors, the largest eigenvalue first."""
    for side in SIDES:
        if side in state:
            product = grad @ grad.mT if side == "left" else grad.mT @ grad
            if bool(product.isfinite().all()):
                basis = _eigenvectors(product).flip(-1)
            else:
                # as with other optimizers, the weights show it
                basis = torch.full_like(product, torch.nan)
            state[f"{side}_basis"].copy_(basis)
    _average(state, grad, beta)


def _refresh(state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
    """One step of the power method for the bases, by QR. The first moment turns with them, the second is sorted."""
    turns = {}
    first, second = (_matrices(param, _decoded(state[n]), group) for n in ("exp_avg", "exp_avg_sq"))
    for side, basis in _bases(state).items():
        image = _decoded(state[side]) @ basis
        order = (basis * image).sum(-2).argsort(dim=-1, descending=True, stable=True)
        columns = order.unsqueeze(-2)
        renewed = torch.linalg.qr(image.take_along_dim(columns, -1)).Q
        turns[side] = basis.mT @ renewed
        along = order.unsqueeze(-1) if side == "left" else columns
        second = second.take_along_dim(along, -2 if side == "left" else -1)
        state[f"{side}_basis"].copy_(renewed)
    if turns:
        first = _rotated(first, turns)
        for name, values in (("exp_avg", first), ("exp_avg_sq", second)):
            local(state[name]).copy_(own_part(param, values.reshape(param.shape)))
