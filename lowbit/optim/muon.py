"""Muon (Keller Jordan et al., https://kellerjordan.github.io/posts/muon/), its momentum in any format (8-bit Muon:
arXiv 2509.23106): momentum SGD for matrices, whose update is replaced by the nearest orthogonal matrix.

With gradient G (negated to maximize) and momentum M of a matrix P [rows, cols]::

    M = momentum * M + (1 - momentum) * G
    U = (1 - momentum) * G + momentum * M  with nesterov, else M
    O = orthogonalize(U)
    P = P - lr * weight_decay * P - lr * ratio * O

    ratio = sqrt(max(1, rows / cols))      adjust_lr_fn None or "original"
    ratio = 0.2 * sqrt(max(rows, cols))    adjust_lr_fn "match_rms_adamw" (arXiv 2502.16982)

`lowbit.optim.orthogonalize` does it in bfloat16 on CUDA and in float32 elsewhere; everything else is float32, from
the decoded momentum. Parameters that are no hidden matrices go to AdamW (`lowbit.optim.adamw`), in their own groups.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lowbit.optim import eager
from lowbit.optim import state as states
from lowbit.optim.adamw import AdamBase
from lowbit.optim.base import (
    CommonOptions,
    ParamsT,
    check_flag,
    check_nonnegative,
    check_number,
)
from lowbit.optim.job import Job
from lowbit.optim.orthogonalize import (
    COEFFICIENTS,
    gathered,
    matrix_shape,
    orthogonalize,
    own_part,
    working_dtype,
)
from lowbit.tensor.codebook_tensor import CodebookTensor

if TYPE_CHECKING:
    from lowbit_kernels.fused_step import Rule

# Elements orthogonalized at once: many small matrices fill a GPU, one large one does.
BATCH = 2**24


def reference(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    """One step on plain tensors of one shape [rows, ...] and dtype, changing none of them.

    Returns:
        The new (param, momentum_buffer).
    """
    if maximize:
        grad = -grad
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * grad
    update = (1 - momentum) * grad + momentum * momentum_buffer if nesterov else momentum_buffer
    x = update.reshape(len(update), -1)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp_min(eps)
    a, b, c = ns_coefficients
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.T if is_tall else x
    ratio = learning_rate_ratio(param.shape, adjust_lr_fn)
    return param - lr * weight_decay * param - lr * ratio * x.reshape(param.shape), momentum_buffer


def learning_rate_ratio(shape: torch.Size, adjust_lr_fn: str | None) -> float:
    """The factor of the orthogonal update of a parameter of this (global) shape; see `lowbit.optim.muon`."""
    rows, cols = matrix_shape(shape)
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


class Muon(AdamBase):
    """Muon for matrices, with its momentum in few bits, and `lowbit.optim.AdamW` for the other parameters.

    A group goes to Muon or to AdamW as its option `use_muon` says. A group that doesn't say is split in two: its
    parameters of 2 and more dimensions go to Muon, those of fewer to AdamW. That cannot tell an embedding or an
    output layer from a hidden matrix: give those in a group of their own with `use_muon=False`. More than 2
    dimensions are flattened to [first, rest], as for a convolution; experts stacked in one parameter are not one
    matrix, and are better given to AdamW.

        head = {"params": [model.embed.weight, model.head.weight], "use_muon": False}
        optimizer = Muon([{"params": model.blocks.parameters()}, head], lr=0.02, adamw_lr=3e-4)

    Every group has its own `lr`, `weight_decay` and `eps` (and `betas` with AdamW); learning rate schedulers scale
    each. Groups are ordered as given, the Muon part of a group that is split before the AdamW part.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with "params", "use_muon" and any option
            below). float32, bfloat16, float16 or float64; plain, DTensor, or low-bit tensors.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: Muon's, as in
            torch.optim.Muon; see `lowbit.optim.muon`.
        adamw_lr, adamw_weight_decay, adamw_betas, adamw_eps: AdamW's, where its groups don't give their own `lr`,
            `weight_decay`, `betas`, `eps`. In a group that is split, these names set the AdamW part's.
        maximize: ascend.
        common: `lowbit.optim.CommonOptions`. `state` is the format of the momentum and of AdamW's moments, by default
            this class's own, "8bit" for Muon itself. Bytes of momentum an element: "4bit" 0.53, "8bit" and "float8"
            1.02, "bf16" 2, "fp32" 4. `fused` concerns the AdamW groups.

    What the codes of a momentum can't resolve is noise in every direction, which orthogonalizing lifts to the size of
    the signal where that is small: 8 bits cost little, 4 bits slow training down.

    A checkpoint of torch.optim.Muon with the same groups loads; `dequantize_state_dict` leads back.

    Raises:
        ValueError, TypeError: an option or a parameter that it doesn't take, named with its value.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor = 3e-4,
        adamw_weight_decay: float = 0.01,
        adamw_betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        decay = adamw_weight_decay
        self._adamw = {
            "lr": adamw_lr,
            "weight_decay": decay,
            "betas": adamw_betas,
            "eps": adamw_eps,
        }
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": adamw_betas,
            "amsgrad": False,
            "maximize": maximize,
            "use_muon": None,
        }
        super().__init__(params, options, common)

    # ---- groups ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, in one group or, without "use_muon", in one for Muon and one for AdamW."""
        if not isinstance(param_group, dict) or isinstance(param_group.get("params"), set):
            return super().add_param_group(param_group)  # which refuses it
        options = dict(param_group)
        params = options.pop("params")
        params = [params] if isinstance(params, Tensor) else list(params)
        for_adamw = {k: options.pop(f"adamw_{k}", v) for k, v in self._adamw.items()}
        for name in ("lr", "weight_decay", "eps"):
            check_nonnegative(f"adamw_{name}", for_adamw[name])
        use_muon = options.pop("use_muon", None)
        check_flag("use_muon", use_muon, or_none=True)
        if use_muon is None:
            parts: dict[bool, list[Any]] = {True: [], False: []}
            for param in params:
                tensor = param[1] if isinstance(param, tuple) else param
                parts[isinstance(tensor, Tensor) and tensor.ndim >= 2].append(param)
            parts = {k: v for k, v in parts.items() if v} or {True: []}
            for_adamw = {**options, **for_adamw}
        else:
            parts = {use_muon: params}
            for_adamw = {**for_adamw, **options}
        before = len(self.param_groups)
        try:
            for is_muon, part in parts.items():
                own = {**options, "fused": None} if is_muon else for_adamw
                super().add_param_group({**own, "params": part, "use_muon": is_muon})
        except BaseException:
            del self.param_groups[before:]
            raise

    def __getstate__(self) -> dict[str, Any]:
        # without them a copy could take no more groups
        return {**super().__getstate__(), "_adamw": self._adamw}

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_nonnegative("momentum", group["momentum"])
        if not group["momentum"] < 1:
            raise ValueError(f"momentum must be in [0, 1), got {group['momentum']!r}")
        check_flag("nesterov", group["nesterov"])
        check_flag("use_muon", group["use_muon"], or_none=True)
        numbers = group["ns_coefficients"]
        if not isinstance(numbers, (tuple, list)) or len(numbers) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {numbers!r}")
        for i, number in enumerate(numbers):
            check_number(f"ns_coefficients[{i}]", number)
            if not math.isfinite(number):
                raise ValueError(f"ns_coefficients[{i}] must be a finite number, got {number!r}")
        group["ns_coefficients"] = tuple(float(number) for number in numbers)
        steps = group["ns_steps"]
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
            raise ValueError(f"ns_steps must be a whole number from 1 to 99, got {steps!r}")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}"
            )
        for param in group.get("params", ()) if group["use_muon"] else ():
            tensor = param[1] if isinstance(param, tuple) else param
            if isinstance(tensor, Tensor) and tensor.ndim < 2:
                raise ValueError(
                    f"use_muon=True takes matrices, got a parameter of shape {tuple(tensor.shape)}; leave use_muon "
                    "out to have such parameters updated by AdamW, or give them in a group with use_muon=False"
                )

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"momentum_buffer": True} if group["use_muon"] else super().state_names(group)

    def rule(self, group: dict[str, Any]) -> Rule | None:  # type: ignore[override]
        return None if group["use_muon"] else super().rule(group)

    # ---- the step -------------------------------------------------------------------------------------------

    def _step_eagerly(self, jobs: list[Job], coefficient: Tensor | None) -> None:
        super()._step_eagerly([job for job in jobs if not job.group["use_muon"]], coefficient)
        for job in jobs:
            if job.group["use_muon"]:
                torch._foreach_add_([self.state[param]["step"] for param in job.params], 1)
                for batch in _batches(job):
                    self._step_matrices(batch, coefficient)

    def _step_matrices(self, job: Job, coefficient: Tensor | None) -> None:
        """Update parameters of one (global) shape."""
        group = job.group
        shape = job.params[0].shape
        whole = [
            gathered(
                param, self._direction(param, grad, group, coefficient).to(working_dtype(param))
            )
            for param, grad in zip(job.params, job.grads, strict=True)
        ]
        joined = torch.stack(whole) if len(whole) > 1 else whole[0][None]
        del whole  # one large matrix takes memory
        results = orthogonalize(
            joined.reshape(len(job.params), *matrix_shape(shape)),
            group["ns_coefficients"],
            steps=group["ns_steps"],
            eps=group["eps"],
        )
        job.grads = [
            own_part(param, result.reshape(shape)).to(grad.device)
            for param, grad, result in zip(job.params, job.grads, results, strict=True)
        ]
        eager.Step(_Apply(self, shape), job, None).run()  # type: ignore[arg-type]

    def _direction(
        self, param: Tensor, grad: Tensor, group: dict[str, Any], coefficient: Tensor | None
    ) -> Tensor:
        """Update the momentum; this rank's part of the matrix to orthogonalize, float32."""
        grad = grad.float()
        if coefficient is not None:
            grad = grad * coefficient.to(grad.device)
        if group["maximize"]:
            grad = -grad
        stored = states.local(self.state[param]["momentum_buffer"])
        momentum = stored.dequantize() if isinstance(stored, CodebookTensor) else stored.float()
        momentum.lerp_(grad, 1 - group["momentum"])
        if momentum is not stored:
            stored.copy_(momentum)
        return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def _loaded_state(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any], name: str
    ) -> dict[str, Any]:
        if saved and group["use_muon"] and "step" not in saved:  # torch.optim.Muon counts none
            saved = {"step": 0.0, **saved}
        return super()._loaded_state(group, param, saved, name)


class _Apply:
    """The end of a step, as an optimizer without states for `eager.Step`: decay, and subtract what is in the job's
    gradients. So rounding and correction of weights are those of every optimizer."""

    def __init__(self, optimizer: Muon, shape: torch.Size) -> None:
        self.state = optimizer.state
        self.shape = shape

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        return {}

    def scalars(
        self, group: dict[str, Any], lr: float | Tensor, steps: Tensor
    ) -> tuple[Tensor, ...]:
        ones = torch.ones_like(steps)
        ratio = learning_rate_ratio(self.shape, group["adjust_lr_fn"])
        return lr * ratio * ones, 1 - lr * group["weight_decay"] * ones

    def update(
        self,
        group: dict[str, Any],
        scalars: tuple[Tensor, ...],
        weight: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
    ) -> None:
        factor, keep = scalars
        weight.mul_(keep).sub_(grad * factor)


def _batches(job: Job) -> Iterator[Job]:
    """Parts of one shape, and at most `BATCH` elements unless of one parameter."""
    by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for place, param in enumerate(job.params):
        if param.numel():
            by_shape[param.shape].append(place)
    for shape, places in by_shape.items():
        count = max(1, BATCH // shape.numel())
        for start in range(0, len(places), count):
            some = places[start : start + count]
            yield Job(
                job.group,
                [job.params[i] for i in some],
                [job.indices[i] for i in some],
                [job.grads[i] for i in some],
            )


class Muon4bit(Muon):
    """`Muon(..., state="4bit")`: 0.53 bytes of momentum an element where torch.optim.Muon takes 4; see `Muon` for what
    that costs."""

    default_state = "4bit"


class Muon8bit(Muon):
    """`Muon(..., state="8bit")`: 1.02 bytes of momentum an element where torch.optim.Muon takes 4."""

    default_state = "8bit"


class MuonFp8(Muon):
    """`Muon(..., state="float8")`: 1.02 bytes of momentum an element where torch.optim.Muon takes 4."""

    default_state = "float8"
