"""The step of an optimizer's matrices, by batches of one shape.

A batch takes three parts. The first half of the formula decodes, updates and encodes the moments, and writes U to a
buffer of the batch. The algorithm changes U: Muon (`muon_step`) orthogonalizes it, SOAP (`soap_step`) rotates it back.
The second half updates the weights. Kernels do each half of all matrices in one launch (`lowbit.optim.step.launch`),
which reads pointers from a table; PyTorch operations do it for the parameters that no kernel takes. A batch holds at
most `BATCH` elements on a rank, which bounds the memory.

**Sharded matrices.** Where dimension 0 is sharded, Muon's ranks exchange rows (`lowbit.optim.step.row_exchange`), so
that each rank orthogonalizes its share of a batch. Parameters with other placements, such as the columns of tensor
parallelism, and those whose memory is on the host are gathered, and every rank works on all of them. Stacks of matrices
that are sharded in dimension 0 stay where they are, because each rank holds whole matrices.

All ranks go through the batches in the same order, which depends on global shapes only; whether a kernel takes a
parameter may differ between ranks. The result for a matrix does not depend on the other matrices of its batch, so it is
that of one process.

A `MatrixStepPlan` keeps batches, tables and launches between steps. Each step checks all that they depend on.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.optim.state import state as states
from lowbit.optim.step import muon_formula
from lowbit.optim.step.eager import Update, bound, count_step
from lowbit.optim.step.fused import (
    KernelChoice,
    check_kernel_optional,
    not_compiled,
    rounding_of,
    scattered,
)
from lowbit.optim.step.job import GradScale, Job
from lowbit.optim.step.launch import StepItem, StepLaunch, has_own_memory, variant
from lowbit.optim.step.row_exchange import RowExchange, divided, sharded_dim
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.codebook_tensor import CodebookTensor
from lowbit_kernels.elementwise.fused_step import COLUMN, Rule, StepVariant

BATCH = 2**27
"""Elements that a rank orthogonalizes at once, such as eight matrices of 2048 x 8192. They fill a GPU, and take
1.75 GiB for the time of the step."""
_DESCENT = Rule(**muon_formula.DESCENT)


class MatrixStepPlan:
    """The batches of a step, with their launches."""

    def __init__(self, optimizer: Any, jobs: list[Job], kind: type[Batch]) -> None:
        self.facts = _facts(optimizer, jobs, kind)
        self.batches = list(_batches(jobs, kind))
        for batch in self.batches:
            batch.find_kernels(optimizer, jobs[batch.job])

    @staticmethod
    def of(optimizer: Any, jobs: list[Job], kind: type[Batch]) -> MatrixStepPlan:
        """The plan of these jobs: that of an earlier step of the same parameters if it still holds."""
        plans = optimizer.__dict__.setdefault("_plans", {})
        key = tuple(index for job in jobs for index in job.indices)
        plan = plans.pop(key, None)
        if plan is None or plan.facts != _facts(optimizer, jobs, kind):
            plan = MatrixStepPlan(optimizer, jobs, kind)
        if len(plans) >= _MOST_PLANS:
            plans.pop(next(iter(plans)))
        plans[key] = plan
        return plan

    def run(self, optimizer: Any, jobs: list[Job], coefficient: Tensor | None) -> None:
        """Step the parameters of the jobs, whose gradients are multiplied by `coefficient`."""
        for job in jobs:
            empty = [i for i, param in enumerate(job.params) if not param.numel()]
            if empty:
                count_step(optimizer, job.subset(empty))
        for batch in self.batches:
            batch.run(optimizer, jobs[batch.job], coefficient)


_MOST_PLANS = 256
"""Plans that are kept: one, or with `step_in_backward` one for each bucket."""


def _facts(optimizer: Any, jobs: list[Job], kind: type[Batch]) -> list[Any]:
    """All that a plan depends on."""
    found: list[Any] = []
    for job in jobs:
        found.append(id(job.group))
        found += [job.group[name] for name in (*_OPTIONS, *kind.options)]
        names = optimizer.state_names(job.group)
        for param, index, grad in zip(job.params, job.indices, job.grads, strict=True):
            state = optimizer.state[param]
            has_memory = has_own_memory(type(grad)) and grad.data_ptr() != 0
            found += (index, has_memory, grad.dtype, state["step"].data_ptr())
            found += _place(param)
            for name in names:
                found += _place(state[name])
            if "weight_correction" in state:
                found += _place(state["weight_correction"])
    return found


_OPTIONS = ("fused", "bf16_stochastic_round", "weight_correction", "stacked")


def _place(value: Any) -> tuple[Any, ...]:
    """Where and how this rank's part of a parameter or state is stored."""
    own = held_locally(value)
    if isinstance(own, CodebookTensor):
        codes = own.codes  # the shape of the state itself takes a microsecond
        return codes.data_ptr(), own.scale.data_ptr(), own.format, codes.shape
    if isinstance(own, LowbitTensor):
        inner = own.updated_in_place()
        if inner is None:
            return id(own), own.shape
        own = inner
    return own.data_ptr(), own.dtype, own.shape, own.is_contiguous()


# ---- batches ------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Parameters of one job and of one (global) shape, sharded alike.

    A subclass says what lies between the two halves of a step (`between`), and gives the first half.
    """

    options: ClassVar[tuple[str, ...]] = ()
    """Options besides those of every optimizer on which a plan depends."""
    exchanges_rows: ClassVar[bool] = False
    """True if ranks divide the matrices of a batch. Otherwise every rank works on all of them."""
    needs_step: ClassVar[bool] = False
    """True if the first half depends on the number of the step."""
    direction: ClassVar[Callable[..., Tensor]]
    """The first half in PyTorch operations, called with the gradient and, by name, `step`, states and options."""

    job: int  # its number
    positions: list[int]
    """In the job."""
    exchange: RowExchange | None
    is_local: bool
    """True if each rank holds whole matrices."""
    dtype: torch.dtype
    """The dtype of U."""
    directions: list[HalfLaunch] = field(default_factory=list)
    descents: list[HalfLaunch] = field(default_factory=list)
    eager: list[int] = field(default_factory=list)
    """Positions in the batch that no kernel takes."""

    @classmethod
    def dtype_of(cls, param: Tensor, is_local: bool) -> torch.dtype:
        """The dtype of U for a parameter; `is_local` as below."""
        raise NotImplementedError

    def half(self, group: dict[str, Any]) -> tuple[Rule, dict[str, float]]:
        """The first half as a rule, and values of its `hyper` that are not options of the group."""
        raise NotImplementedError

    def ratio(self, shape: torch.Size, group: dict[str, Any]) -> float:
        """The factor of the update of a parameter of this (global) shape, besides the learning rate."""
        raise NotImplementedError

    def read(
        self, optimizer: Any, job: Job, coefficient: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """What the first half reads as gradients, this rank's parts, and their factor."""
        return job.grads, coefficient

    def between(self, optimizer: Any, job: Job, buffer: Tensor) -> Sequence[Tensor]:
        """This rank's parts of the updates. `buffer`: what the first half wrote, [parameters, ...]."""
        raise NotImplementedError

    def finish(self, optimizer: Any, job: Job) -> None:
        """Called after the weights of these parameters were updated."""

    def find_kernels(self, optimizer: Any, job: Job) -> None:
        """Make the launches of the parameters that kernels take."""
        own, group = job.subset(self.positions), job.group
        rule, values = self.half(group)
        first = Half(optimizer, group, rule, optimizer.state_names(group), values)
        ratio = self.ratio(own.params[0].shape, group)
        second = Half(optimizer, group, _DESCENT, {}, {"ratio": ratio})
        choice = KernelChoice(first, group)
        by_variants: defaultdict[Any, list[int]] = defaultdict(list)
        for i, (param, grad) in enumerate(zip(own.params, own.grads, strict=True)):
            found = _variants(choice, own, param, self.read_like(grad), self.dtype)
            if found is None:
                self.eager.append(i)
            else:
                by_variants[found].append(i)
        for variants, some in by_variants.items():
            items = [
                StepItem(
                    own.params[i], states.memory(own.params[i]), 0, own.indices[i], own.grads[i]
                )
                for i in some
            ]
            launches = [
                HalfLaunch.over(half, kernel, items, some)
                for half, kernel in zip((first, second), variants, strict=True)
            ]
            launches[0].count_elsewhere(self.needs_step)
            self.directions.append(launches[0])
            self.descents.append(launches[1])

    def run(self, optimizer: Any, job: Job, coefficient: Tensor | None) -> None:
        own, group = job.subset(self.positions), job.group
        first = own.grads[0]
        shape = (len(own.params), *first.shape)
        buffer = torch.empty(shape, dtype=self.dtype, device=first.device)
        grads, coefficient = self.read(optimizer, own, coefficient)
        for launch in self.directions:
            launch.count_from(optimizer.state, own)
            launch.step(own, grads, coefficient, buffer)
        if self.eager:
            matrices = [buffer[i] for i in self.eager]
            rest = own.subset(self.eager)
            rest.grads = [grads[i] for i in self.eager]
            _write_directions(optimizer, rest, coefficient, matrices, type(self).direction)
        del grads
        results = self.between(optimizer, own, buffer)
        del buffer
        for launch in self.descents:
            launch.step(own, results)
        if self.eager:
            rest = own.subset(self.eager)
            count_step(optimizer, rest)
            rest.grads = [results[i] for i in self.eager]
            ratio = self.ratio(own.params[0].shape, group)
            formula = functools.partial(bound(muon_formula.descend, group), ratio=ratio)
            # The moments are stored, so no state is left. Weights are rounded as in every other optimizer.
            Update(optimizer.state, rest, {}, formula, None).run()
        self.finish(optimizer, own)

    def read_like(self, grad: Tensor) -> Tensor:
        """A tensor of the shape, dtype and device of what `read` gives for this gradient."""
        return grad


def _batches(jobs: list[Job], kind: type[Batch]) -> Iterator[Batch]:
    """Batches with at most `BATCH` elements a rank, unless one parameter alone has more."""
    left_over = 0
    for number, job in enumerate(jobs):
        alike: defaultdict[Any, list[int]] = defaultdict(list)
        for position, param in enumerate(job.params):
            if param.numel():
                alike[param.shape, _layout(param)].append(position)
        for (shape, _), positions in alike.items():
            first: Any = job.params[positions[0]]
            stacked = job.group["stacked"]
            dim = None if stacked or not kind.exchanges_rows else sharded_dim(first)
            world = 1 if dim is None else first.device_mesh.size(dim)
            most = world * max(1, BATCH // shape.numel())
            parts = -(-len(positions) // most)  # of equal size
            size = -(-len(positions) // (parts * world)) * world
            for start in range(0, len(positions), size):
                some = positions[start : start + size]
                exchange = None
                if dim is not None:
                    cols = muon_formula.stack_shape(shape, stacked)[2]
                    exchange = divided(first, len(some), cols, left_over)
                    left_over += len(some)
                is_local = holds_whole(first, stacked)
                yield kind(number, some, exchange, is_local, kind.dtype_of(first, is_local))


def _layout(param: Tensor) -> Any:
    return (param.device_mesh, param.placements) if is_dtensor(param) else None


def holds_whole(param: Tensor, stacked: bool) -> bool:
    """True if a rank's part of a parameter consists of whole matrices."""
    if not is_dtensor(param):
        return True
    from torch.distributed.tensor import Shard

    others = [p for p in param.placements if not p.is_replicate()]
    return not others or (stacked and all(type(p) is Shard and p.dim == 0 for p in others))


def _write_directions(
    optimizer: Any,
    job: Job,
    coefficient: Tensor | None,
    matrices: list[Tensor],
    direction: Callable[..., Tensor],
) -> None:
    """`direction` in PyTorch operations, with moments in any format: writes this rank's part of each U."""
    state, stochastic = optimizer.state, optimizer.stochastic(job.group)
    find = bound(direction, job.group)

    def formula(update: Tensor, grad: Tensor, **states: Tensor) -> None:
        update.copy_(find(grad, **states))

    # The matrices take the place of the weights, and are rounded to nearest.
    group = {**job.group, "bf16_stochastic_round": False, "weight_correction": None}
    placed = [states.like_param(p, u) for p, u in zip(job.params, matrices, strict=True)]
    each = {
        u: {"step": state[p]["step"] + 1, **{name: state[p][name] for name in stochastic}}
        for p, u in zip(job.params, placed, strict=True)
    }
    own = Job(group, placed, job.indices, job.grads)
    Update(each, own, stochastic, formula, coefficient).run()


# ---- kernels ------------------------------------------------------------------------------------------------


def _variants(
    choice: KernelChoice, job: Job, param: Tensor, grad: Tensor, dtype: torch.dtype
) -> tuple[StepVariant, StepVariant] | None:
    """The kernels of both halves for a parameter, with U in `dtype`; None where no kernel applies.

    Raises:
        RuntimeError: no kernel applies, and the group has `fused=True`.
    """
    group = job.group
    if not job.may_fuse:
        return None
    own, formats = states.memory(param), choice.formats(param)
    reason = choice.obstacle(param, own, grad, formats)
    if isinstance(own, LowbitTensor):
        reason = "its weight rounds itself"
    if reason is None:
        first = variant(choice.rule, dtype, grad.dtype, formats, *choice.of_states, "nearest")
        rounding = rounding_of(group, own.dtype)
        second = variant(_DESCENT, own.dtype, dtype, (), (), (), rounding)
        reasons = [
            scattered(found, param) or not_compiled(group, own.device, found)
            for found in (first, second)
        ]
        reason = reasons[0] or reasons[1]
        if reason is None:
            return first, second
    check_kernel_optional(group, param, reason)
    return None


class Half:
    """Stands for the optimizer in a `StepLaunch`: the options and states of one half of the formula, for one shape."""

    def __init__(
        self,
        optimizer: Any,
        group: dict[str, Any],
        rule: Rule,
        names: dict[str, bool],
        values: dict[str, float],
    ) -> None:
        self.state, self._group, self._rule, self._names = optimizer.state, group, rule, names
        self._stochastic, self._values = optimizer.stochastic(group), values
        # the memory that captured graphs read, which must live as long as the optimizer
        self._captured = optimizer.__dict__.setdefault("_captured", [])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{**self._group, **self._values}]

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        return self._names

    def stochastic(self, group: dict[str, Any]) -> dict[str, bool]:
        return {name: self._stochastic[name] for name in self._names}

    def kernel_rule(self, group: dict[str, Any], returns_errors: bool = False) -> Rule:
        return self._rule

    def hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        return tuple(float(group[name]) for name in self._rule.hyper)

    def least_rate(self, group: dict[str, Any]) -> float:
        return 0.0


@dataclass
class HalfLaunch(StepLaunch):
    """The launch of one half for some parameters of a batch."""

    half: Any = None
    positions: list[int] = field(default_factory=list)
    """In the batch."""
    counters: Tensor | None = None
    reads_step: bool = False

    @classmethod
    def over(
        cls, half: Half, variant: StepVariant, items: list[StepItem], positions: list[int]
    ) -> Self:
        made = cls._over(half, variant, items, items)
        made.half, made.positions = half, positions
        made.params, made.grads = [], []
        return made

    def count_elsewhere(self, needs_step: bool) -> None:
        """Leave the parameters' own step counters alone. Each launch counts, and a step takes two.
        `count_from` sets the counters of this launch, if random bits or the formula (`needs_step`) depend on them."""
        self.reads_step = needs_step or self.variant.is_random
        self.counters = self.scalars.new_zeros(len(self.positions), dtype=states.STEP)
        own = self.counters.data_ptr() + self.counters.itemsize * np.arange(len(self.positions))
        self.rows[:, COLUMN["step"]] = own

    def count_from(self, state: Mapping[Tensor, Any], job: Job) -> None:
        """Make the counters those of the parameters."""
        assert self.counters is not None
        if self.reads_step:
            torch.stack([state[job.params[i]]["step"] for i in self.positions], out=self.counters)

    def _scratch(self) -> tuple[Any, ...]:
        return *super()._scratch(), self.counters

    def step(
        self,
        job: Job,
        grads: Sequence[Tensor],
        coefficient: Tensor | None = None,
        buffer: Tensor | None = None,
    ) -> None:
        """Run the kernel.

        Args:
            job: the parameters of the batch.
            grads: what the kernel reads as gradients, by position in the batch.
            coefficient: their factor.
            buffer: is written in place of the weights, [parameters of the batch, ...].
        """
        self.params = [job.params[i] for i in self.positions]
        taken = self.take([grads[i] for i in self.positions])
        assert taken, "a kernel or `read` wrote these gradients, so they have memory"
        if buffer is not None:
            size = buffer[0].nbytes
            rows = self.rows
            rows[:, COLUMN["param"]] = places = buffer.data_ptr() + size * np.array(self.positions)
            rows[:, COLUMN["aligned"]] &= places & 15 == 0
        self.run(self.half, GradScale(coefficient, None))
