"""The step in PyTorch operations, over pieces of rows: decode, update in float32, encode, write the weight once.

Every tensor of a parameter (gradient, weight, correction, codes, scales) is seen as `[rows, width]`, with as many
rows as its states have (`lowbit.tensor.codebook_tensor`); where no state is in codes, a row is one element. A large
parameter is taken some rows at a time, so that what is decoded stays in the processor's cache. On a CPU, where an
operation costs as much as a thousand elements, the rows of many small parameters are gathered into one piece, and
what was computed is scattered back. All of it is elementwise or within a row: how rows are cut or gathered changes
no bit. A weight that has no high-precision values, but rounds (`LowbitTensor.update_`), is decoded piece by piece too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.optim import state as states
from lowbit.optim.job import Job
from lowbit.rounding import bits_at, join_bf16, keys, round_bf16, split_bf16
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.codebook_tensor import CodebookTensor

if TYPE_CHECKING:
    from lowbit.optim.base import LowbitOptimizer

# Elements updated at once: in the processor's cache on a CPU, enough to fill a GPU.
PIECE_CPU, PIECE_OTHER = 2**17, 2**24


def piece_of(device: torch.device) -> int:
    """Elements that are updated at once on a device."""
    return PIECE_CPU if device.type == "cpu" else PIECE_OTHER


@dataclass(slots=True)
class Part:
    """Rows of one parameter."""

    place: int  # in the job
    tensors: list[Tensor]
    """Gradient, weight, correction if there is one, then the states': [rows, width] each."""
    rows: int
    start: int = 0  # index of its first row on this rank

    def cut(self, start: int, end: int) -> Part:
        return Part(self.place, [t[start:end] for t in self.tensors], end - start, start)


@dataclass(slots=True)
class Kind:
    """What the parts of one piece have in common."""

    cols: int
    widest: int
    """Elements of a row over all shards: pieces are cut by it where ranks round rows together."""
    corrected: bool
    states: tuple[tuple[str, CodebookTensor | None, int], ...]
    """Names, each with a tensor that knows how its codes are read, or None for plain memory; and how many of its
    own rows one row of the piece holds, where a state in smaller blocks has shorter ones."""


class Step:
    """One step over the parameters of a job, whose states exist and whose steps are counted."""

    def __init__(self, optimizer: LowbitOptimizer, job: Job, coefficient: Tensor | None) -> None:
        self.optimizer, self.job, self.group = optimizer, job, job.group
        self.signs = optimizer.state_names(job.group)
        self.device = job.grads[0].device
        self.coefficient = None if coefficient is None else coefficient.to(self.device)
        self.on_cpu = self.device.type == "cpu"
        self.steps = torch.stack([optimizer.state[p]["step"] for p in job.params])
        lr = job.group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.detach().reshape(()).double()
        scalars = optimizer.scalars(job.group, lr, self.steps.double())
        wide = job.params[0].dtype == torch.float64
        self.scalars = tuple(s if wide else s.float() for s in scalars)
        self.all_alike = self.on_cpu and bool((self.steps == self.steps[0]).all())
        # float64 numbers in a column would widen float32 states, which single ones don't
        self.gathers = self.on_cpu and (self.all_alike or not wide)
        self.keys: dict[int, list[Tensor]] = {}  # of random draws, by slot
        self.kinds: dict[Any, tuple[Any, Kind]] = {}
        self.unfinished: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        by_kind: dict[Any, tuple[Kind, list[Part]]] = {}
        for place in range(len(self.job.params)):
            found = self._part(place)
            if found is not None:
                key, kind, part = found
                by_kind.setdefault(key, (kind, []))[1].append(part)
        for kind, parts in by_kind.values():
            rows = max(1, piece_of(self.device) // kind.widest)
            for piece in _pieces(parts, rows, gather=self.gathers):
                self._update(kind, piece)
        for target, values in self.unfinished:
            target.copy_(values.view(target.shape))

    def _part(self, place: int) -> tuple[Any, Kind, Part] | None:
        """The parameter's tensors as rows, and what they can be gathered by; None where it has no elements."""
        param = self.job.params[place]
        rounds = states.rounds_itself(param)
        weight = states.memory(param)
        if weight.numel() == 0:
            return None
        state = self.optimizer.state[param]
        stored: list[Any] = [states.local(state[name]) for name in self.signs]
        formats = tuple(t.format if isinstance(t, CodebookTensor) else t.dtype for t in stored)
        key, kind = self._kind(param, weight, formats, stored, rounds)
        rows = weight.numel() // kind.cols
        tensors = [self.job.grads[place], weight]
        if kind.corrected:
            tensors.append(states.local(state["weight_correction"]))
        for t in stored:
            tensors.extend((t.codes, t.scale) if isinstance(t, CodebookTensor) else (t,))
        if rounds:
            tensors[1] = rows_of(weight, rows)
        seen = [
            t
            if (t.ndim == 2 or isinstance(t, LowbitTensor)) and t.shape[0] == rows
            else t.reshape(rows, -1)
            for t in tensors
        ]
        if (
            rounds
        ):  # by itself, in the order of the parameters, since ranks may have to do it together
            key = (place, *key)
        elif seen[1] is not weight and not weight.is_contiguous():
            self.unfinished.append((weight, seen[1]))
        return key, kind, Part(place, seen, rows)

    def _kind(
        self,
        param: Tensor,
        weight: Tensor,
        formats: tuple[Any, ...],
        stored: list[Any],
        rounds: bool,
    ) -> tuple[Any, Kind]:
        """What to gather by, and the kind; found once for parameters of one shape."""
        at = (weight.shape, param.shape, weight.dtype, formats, rounds)
        if at not in self.kinds:
            coded = [t if isinstance(t, CodebookTensor) else None for t in stored]
            widths = [t.cols_of(weight.shape) if t is not None else 0 for t in coded]
            cols = max(widths, default=0) or (weight.shape[-1] if rounds else 1)
            each = zip(self.signs, coded, (cols // (w or cols) for w in widths), strict=True)
            corrected = states.has_correction(self.group, param)
            widest = cols // weight.shape[-1] * param.shape[-1] if rounds else cols
            # A model may hold bf16 weights beside float32 ones behind low-bit products.
            key = cols, weight.dtype, formats
            self.kinds[at] = key, Kind(cols, widest, corrected, tuple(each))
        return self.kinds[at]

    def _update(self, kind: Kind, piece: list[Part]) -> None:
        old = [_gather(list(same)) for same in zip(*(p.tensors for p in piece), strict=True)]
        grad, weight = old[0].float(), old[1]
        if self.coefficient is not None:
            grad = grad * self.coefficient
        if kind.corrected:
            work = join_bf16(weight, old[2])
        else:
            work = weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
        values, at = {}, 2 + kind.corrected
        for name, coded, within in kind.states:
            if coded is None:
                values[name] = old[at].float()
            else:
                codes, scale = (_shorter(t, within) for t in old[at : at + 2])
                values[name] = coded.decode_rows(codes, scale).view(-1, kind.cols)
            at += 1 if coded is None else 2
        self.optimizer.update(self.group, self._scalars_of(piece), work, grad, values)
        new = self._weight(kind, piece, work, weight.dtype)
        for slot, (name, coded, within) in enumerate(kind.states, 1):
            if coded is None:
                new.append(self._plain(kind, piece, slot, values[name], old[1 + len(new)].dtype))
            else:
                new += coded.encode_rows(_shorter(values[name], within))
        for i, result in enumerate(new, 1):
            _scatter(result, [p.tensors[i] for p in piece])

    def _weight(
        self, kind: Kind, piece: list[Part], work: Tensor, dtype: torch.dtype
    ) -> list[Tensor]:
        if kind.corrected:
            return list(split_bf16(work))
        if dtype == torch.bfloat16 and self.group["bf16_stochastic_round"]:
            return [round_bf16(work, self._draws(kind, piece, 0))]
        return [work if work.dtype == dtype else work.to(dtype)]

    def _plain(
        self, kind: Kind, piece: list[Part], slot: int, values: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A state not in codes. A second moment in bfloat16 is rounded stochastically: with beta2 = 0.999 it shrinks
        by less than half of a bfloat16 step at a time, so that rounded to nearest it would never shrink."""
        if dtype == torch.bfloat16 and not self.signs[kind.states[slot - 1][0]]:
            return round_bf16(values, self._draws(kind, piece, slot))
        return values if values.dtype == dtype else values.to(dtype)

    def _scalars_of(self, piece: list[Part]) -> tuple[Tensor, ...]:
        """Without dimensions where they are the same for all rows, else [rows, 1]."""
        if len(piece) == 1 or self.all_alike:
            return tuple(s[piece[0].place] for s in self.scalars)
        return tuple(self._by_row(s, piece) for s in self.scalars)

    def _by_row(self, each: Tensor, piece: list[Part]) -> Tensor:
        """What belongs to each parameter, [rows, 1]; of one parameter without dimensions."""
        if len(piece) == 1:
            return each[piece[0].place]
        places, rows = (
            torch.tensor(n) for n in zip(*((p.place, p.rows) for p in piece), strict=True)
        )
        return torch.repeat_interleave(each[places], rows).unsqueeze(1)

    def _draws(self, kind: Kind, piece: list[Part], slot: int) -> Tensor:
        """Random bits [rows, cols], keyed as `lowbit.optim.base` tells."""
        if slot not in self.keys:
            # filled in one by one: copying a list to a GPU would wait for it
            numbers = [torch.full((), 4 * i + slot, device=self.device) for i in self.job.indices]
            found = keys(self.group["seed"], self.steps.to(torch.int64), torch.stack(numbers))
            self.keys[slot] = [k.to(torch.int32) for k in found]
        k0, k1 = (self._by_row(k, piece) for k in self.keys[slot])
        params = [self.job.params[p.place] for p in piece]
        dtype = torch.int32 if max(p.numel() for p in params) < 2**31 else torch.int64
        indices = []
        for p, param in zip(piece, params, strict=True):
            base, run, stride = states.global_index(param)
            first, last = p.start * kind.cols, (p.start + p.rows) * kind.cols
            if run == stride:
                i = torch.arange(base + first, base + last, dtype=dtype, device=self.device)
            else:
                i = torch.arange(first, last, dtype=dtype, device=self.device)
                i = base + i // run * stride + i % run
            indices.append(i)
        return bits_at(_gather(indices).view(-1, kind.cols), k0, k1)


def rows_of(weight: Tensor, rows: int) -> Tensor:
    """A low-bit weight with that many rows, as its states have."""
    return weight if weight.shape[0] == rows else weight.view(rows, -1, weight.shape[-1])


def _pieces(parts: list[Part], rows: int, *, gather: bool) -> Iterator[list[Part]]:
    """Of at most `rows` rows: large parts cut, small ones gathered if asked for."""
    together: list[Part] = []
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
