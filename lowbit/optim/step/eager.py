"""The step in PyTorch operations: decode, call the optimizer's formula in float32, encode, write the weight once.

Every tensor of a parameter (gradient, weight, correction, codes, scales) is viewed as `[rows, width]`, with as many
rows as its states have (`lowbit.tensor.frozen.codebook_tensor`). Where no state has codes, a row is one element. A
large parameter is updated some rows at a time, so that decoded values stay in the cache. On a CPU, where one operation
costs as much as a thousand elements, the rows of many small parameters are gathered into one piece and the results
scattered back. All work is elementwise or within a row, so cutting and gathering change no bit.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.rounding import (
    bits_at,
    bits_of_octets,
    join_bf16,
    keys,
    round_bf16,
    split_bf16,
)
from lowbit.optim.options import rounds_bf16_stochastically
from lowbit.optim.state import state as states
from lowbit.optim.step.job import GradScale, Job, piece_of, rows_of
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.codebook_tensor import CodebookTensor


class EagerStep:
    """`lowbit.optim.step.job.StepOfJobs` in PyTorch operations. It leaves no job."""

    def run(self, optimizer: Any, jobs: list[Job], scale: GradScale) -> list[Job]:
        for job in jobs:
            count_step(optimizer, job)
            names = optimizer.stochastic(job.group)
            formula = bound(optimizer.reference, job.group)
            compensate = None
            if optimizer.compensation(job.group) is not None:
                least = optimizer.least_rate(job.group)
                compensate = bound(optimizer.compensate, {**job.group, "least_lr": least})
            Update(optimizer.state, job, names, formula, scale.coefficient, compensate).run()
        return []


def count_step(optimizer: Any, job: Job) -> None:
    """Count one more step for the parameters of a job."""
    torch._foreach_add_([optimizer.state[param]["step"] for param in job.params], 1)


def bound(reference: Callable[..., Any], group: dict[str, Any]) -> Callable[..., Any]:
    """`reference` with the group's options, those that it names as parameters: takes (param, grad, step=..., **states).

    A learning rate in a tensor becomes float64 without dimensions.
    """
    names = _parameters(reference)
    options = {name: group[name] for name in names if name in group}
    if isinstance(options.get("lr"), Tensor):
        options["lr"] = options["lr"].detach().reshape(()).double()
    if "step" in names:
        return functools.partial(reference, **options)

    def without_step(*tensors: Tensor, step: Tensor, **named: Any) -> Any:
        return reference(*tensors, **named, **options)

    return without_step


@functools.cache
def _parameters(function: Callable[..., None]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


@dataclass(slots=True)
class RowsOfParameter:
    """Rows of one parameter."""

    index: int  # in the job
    tensors: list[Tensor]
    """Gradient, weight, correction if there is one, then those of the states: [rows, width] each."""
    rows: int
    start: int = 0  # its first row within this rank's part

    def cut(self, start: int, end: int) -> RowsOfParameter:
        return RowsOfParameter(self.index, [t[start:end] for t in self.tensors], end - start, start)


@dataclass(slots=True)
class Kind:
    """The properties that the parts of one piece share."""

    cols: int
    widest: int
    """Elements of a row over all shards. Pieces are cut by it where ranks round rows together."""
    correction: torch.dtype | None
    """The dtype of the state "weight_correction"; None without one."""
    compensated: bool
    states: tuple[tuple[str, CodebookTensor | None, int], ...]
    """Names, each with a tensor that knows how its codes are decoded (None for plain values), and the number of the
    state's own rows in one row of the piece: a state in smaller blocks has shorter rows."""


class Update:
    """One step of the parameters of a job, whose states exist and whose steps are counted.

    Args:
        state: the optimizer's.
        job: the parameters.
        stochastic: the names of their states, and whether those in bfloat16 are rounded stochastically.
        formula: called as `formula(weight, grad, step=step, **states)`. It updates the weight (float32 or float64) and
            the states (float32) in place, [rows, cols] each. `step` is float64 without dimensions.
        coefficient: a factor of the gradients, or None.
        compensate: called as `compensate(error, step=step, **states)` where `states.is_compensated`, with the weight
            before it was rounded less the weight after. It updates the states in place.
    """

    def __init__(
        self,
        state: Mapping[Tensor, Any],
        job: Job,
        stochastic: dict[str, bool],
        formula: Callable[..., None],
        coefficient: Tensor | None,
        compensate: Callable[..., None] | None = None,
    ) -> None:
        self.compensate = compensate
        self.state, self.job, self.group = state, job, job.group
        self.stochastic, self.formula = stochastic, formula
        self.device = job.grads[0].device
        self.coefficient = None if coefficient is None else coefficient.to(self.device)
        self.on_cpu = self.device.type == "cpu"
        self.steps = torch.stack([state[p]["step"] for p in job.params])
        # One piece has one step. Only on a CPU can the host read the steps without waiting.
        self.step_numbers = self.steps.tolist() if self.on_cpu else [0.0] * len(job.params)
        self.keys: dict[int, list[Tensor]] = {}  # of random bits, by slot
        self.kinds: dict[Any, tuple[Any, Kind]] = {}
        self.unfinished: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        by_kind: dict[Any, tuple[Kind, list[RowsOfParameter]]] = {}
        for index in range(len(self.job.params)):
            found = self._part(index)
            if found is not None:
                key, kind, part = found
                by_kind.setdefault(key, (kind, []))[1].append(part)
        for kind, parts in by_kind.values():
            rows = max(1, piece_of(self.device) // kind.widest)
            for piece in _pieces(parts, rows, gather=self.on_cpu):
                self._update(kind, piece)
        for target, values in self.unfinished:
            target.copy_(values.view(target.shape))

    def _part(self, index: int) -> tuple[Any, Kind, RowsOfParameter] | None:
        """The key by which parameters are gathered, and the tensors as rows; None for an empty parameter."""
        param = self.job.params[index]
        rounds = states.rounds_itself(param)
        weight = states.memory(param)
        if weight.numel() == 0:
            return None
        state = self.state[param]
        stored: list[Any] = [local(state[name]) for name in self.stochastic]
        formats = tuple(t.format if isinstance(t, CodebookTensor) else t.dtype for t in stored)
        key, kind = self._kind(param, weight, formats, stored, rounds)
        rows = weight.numel() // kind.cols
        tensors = [self.job.grads[index], weight]
        if kind.correction is not None:
            tensors.append(states.correction_units(state["weight_correction"]))
        for t in stored:
            tensors.extend((t.codes, t.scale) if isinstance(t, CodebookTensor) else (t,))
        if rounds:
            tensors[1] = rows_of(weight, rows)
        viewed = [
            t
            if (t.ndim == 2 or isinstance(t, LowbitTensor)) and t.shape[0] == rows
            else t.reshape(rows, -1)
            for t in tensors
        ]
        if rounds:  # alone, in the order of the parameters, because ranks may round it together
            key = (index, *key)
        elif viewed[1] is not weight and not weight.is_contiguous():
            self.unfinished.append((weight, viewed[1]))
        return (self.step_numbers[index], *key), kind, RowsOfParameter(index, viewed, rows)

    def _kind(
        self,
        param: Tensor,
        weight: Tensor,
        formats: tuple[Any, ...],
        stored: list[Any],
        rounds: bool,
    ) -> tuple[Any, Kind]:
        """The key by which parameters are gathered, and the kind; computed once a shape."""
        at = (weight.shape, param.shape, weight.dtype, formats, rounds)
        if at not in self.kinds:
            coded = [t if isinstance(t, CodebookTensor) else None for t in stored]
            widths = [t.cols_of(weight.shape) if t is not None else 0 for t in coded]
            cols = max(widths, default=0) or (weight.shape[-1] if rounds else 1)
            each = zip(self.stochastic, coded, (cols // (w or cols) for w in widths), strict=True)
            correction = None
            if states.has_correction(self.group, param):
                correction = states.CORRECTIONS[self.group["weight_correction"]]
            widest = cols // weight.shape[-1] * param.shape[-1] if rounds else cols
            # A model may hold bf16 weights beside float32 ones behind low-bit products.
            key = cols, weight.dtype, formats
            returns = self.compensate is not None
            compensated = returns and states.is_compensated(self.group, param)
            self.kinds[at] = key, Kind(cols, widest, correction, compensated, tuple(each))
        return self.kinds[at]

    def _update(self, kind: Kind, piece: list[RowsOfParameter]) -> None:
        old = [_gather(list(same)) for same in zip(*(p.tensors for p in piece), strict=True)]
        grad, weight = old[0].float(), old[1]
        if self.coefficient is not None:
            grad = grad * self.coefficient
        if kind.correction is not None:
            work = join_bf16(weight, old[2])
        else:
            work = weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
        values, at = {}, 2 + (kind.correction is not None)
        for name, coded, within in kind.states:
            if coded is None:
                values[name] = old[at].float()
            else:
                codes, scale = (_shorter(t, within) for t in old[at : at + 2])
                values[name] = coded.decode_rows(codes, scale).view(-1, kind.cols)
            at += 1 if coded is None else 2
        step = self.steps[piece[0].index]
        self.formula(work, grad, step=step, **values)
        new = self._weight(kind, piece, work, weight.dtype)
        if kind.compensated and self.compensate is not None:
            _scatter(new[0], [p.tensors[1] for p in piece])
            rounded = _gather([p.tensors[1] for p in piece]).float()
            error = (work - rounded).nan_to_num_(0.0, 0.0, 0.0)
            self.compensate(error, step=step, **values)
        for slot, (name, coded, within) in enumerate(kind.states, 1):
            if coded is None:
                new.append(self._plain(kind, piece, slot, values[name], old[1 + len(new)].dtype))
            else:
                random = None
                if coded.rounds_stochastically:
                    random = _shorter(self._random_bits(kind, piece, slot), within)
                new += coded.encode_rows(_shorter(values[name], within), random)
        for i, result in enumerate(new, 1):
            if i > 1 or not kind.compensated:
                _scatter(result, [p.tensors[i] for p in piece])

    def _weight(
        self, kind: Kind, piece: list[RowsOfParameter], work: Tensor, dtype: torch.dtype
    ) -> list[Tensor]:
        if kind.correction is not None:
            return list(split_bf16(work, kind.correction))
        if dtype == torch.bfloat16 and rounds_bf16_stochastically(self.group):
            return [round_bf16(work, self._random_bits(kind, piece, 0))]
        return [work if work.dtype == dtype else work.to(dtype)]

    def _plain(
        self,
        kind: Kind,
        piece: list[RowsOfParameter],
        slot: int,
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """A state without codes, in its dtype."""
        if dtype == torch.bfloat16 and self.stochastic[kind.states[slot - 1][0]]:
            return round_bf16(values, self._random_bits(kind, piece, slot))
        return values if values.dtype == dtype else values.to(dtype)

    def _by_row(self, each: Tensor, piece: list[RowsOfParameter]) -> Tensor:
        """A number of each parameter, by row: [rows, 1]; without dimensions for a single parameter."""
        if len(piece) == 1:
            return each[piece[0].index]
        indices, rows = (
            torch.tensor(n) for n in zip(*((p.index, p.rows) for p in piece), strict=True)
        )
        return torch.repeat_interleave(each[indices], rows).unsqueeze(1)

    def _random_bits(self, kind: Kind, piece: list[RowsOfParameter], slot: int) -> Tensor:
        """Random bits [rows, cols], with the key that `lowbit.optim.base` defines."""
        if slot not in self.keys:
            # Filled one by one, because copying a list to a GPU waits for the GPU.
            numbers = [torch.full((), 4 * i + slot, device=self.device) for i in self.job.indices]
            found = keys(self.group["seed"], self.steps.to(torch.int64), torch.stack(numbers))
            self.keys[slot] = [k.to(torch.int32) for k in found]
        k0, k1 = (self._by_row(k, piece) for k in self.keys[slot])
        params = [self.job.params[p.index] for p in piece]
        dtype = torch.int32 if max(p.numel() for p in params) < 2**31 else torch.int64
        places = [states.global_index(param) for param in params]
        starts = (n for base, runs in places for n in (base, *itertools.chain(*runs)))
        by_octets = all(n % 8 == 0 for n in (kind.cols, *starts))
        step = 8 if by_octets else 1
        offsets = []
        for p, (base, runs) in zip(piece, places, strict=True):
            first, last = p.start * kind.cols, (p.start + p.rows) * kind.cols
            i = torch.arange(first, last, step, dtype=dtype, device=self.device)
            before: Any = base
            for run, stride in runs:
                before, i = before + i // run * stride, i % run
            offsets.append(i + before)
        index = _gather(offsets).view(-1, kind.cols // step)
        return bits_of_octets(index >> 3, k0, k1) if by_octets else bits_at(index, k0, k1)


def _pieces(
    parts: list[RowsOfParameter], rows: int, *, gather: bool
) -> Iterator[list[RowsOfParameter]]:
    """Pieces of at most `rows` rows: large parts are cut, small ones gathered if `gather` says so."""
    together: list[RowsOfParameter] = []
    held = 0
    for part in parts:
        if part.rows > rows:
            for start in range(0, part.rows, rows):
                yield [part.cut(start, min(start + rows, part.rows))]
            continue
        if together and (not gather or held + part.rows > rows):
            yield together
            together, held = [], 0
        together.append(part)
        held += part.rows
    if together:
        yield together


def _shorter(t: Tensor, within: int) -> Tensor:
    """Each row as `within` rows."""
    return t if within == 1 else t.view(t.shape[0] * within, t.shape[1] // within)


def _gather(same: list[Tensor]) -> Tensor:
    if isinstance(same[0], LowbitTensor):
        return same[0].master().flatten(1)
    return same[0] if len(same) == 1 else torch.cat(same)


def _scatter(values: Tensor, targets: list[Tensor]) -> None:
    if isinstance(targets[0], LowbitTensor):
        targets[0].update_(values.view(targets[0].shape))
    elif len(targets) > 1:
        width = targets[0].shape[1]
        sizes = [t.shape[0] for t in targets]
        torch.split_with_sizes_copy(values.view(-1, width), sizes, out=targets)
    elif values is not targets[0]:
        targets[0].copy_(values.view(targets[0].shape))
