"""The compiled step of weights that round themselves (`LowbitTensor.update_`), as int8 weights do.

The kernel reads and writes float32 values. A few parameters at a time, or some rows of a large one, write their values
to a buffer; the kernel updates them there, and the weights take them back, rounded. The buffer is bounded
(`job.piece_of`: 64 MiB on a GPU) and freed at the end of the step. The host waits for no answer of the device.

Where rounding errors go into the momentum, the step has two parts. A first kernel writes the updated values to a second
buffer and stores nothing else. The weights take them, and what rounding lost stays in the buffer. A second kernel
computes the same step again, adds the errors to the momentum and stores the states.

All rows are in one table, as those of `StepLaunch`. The values of one part of the table, a pass, are in the buffer
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lowbit.optim.state import state as states
from lowbit.optim.step.job import GradScale, piece_of, rows_of
from lowbit.optim.step.launch import StepItem, StepLaunch, copied
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.codebook_tensor import CodebookTensor
from lowbit.tensor.trained import remainder
from lowbit_kernels.elementwise import fused_step
from lowbit_kernels.elementwise.fused_step import COLUMN, StepArguments, StepVariant

ALIGNED = 16  # elements; the values of a row of the table begin at a multiple


class Rows(NamedTuple):
    """The rows of a parameter that a row of the table updates."""

    owner: int  # index of the parameter in the launch
    start: int  # first of these rows
    end: int
    rows: int  # of the whole parameter; 1: it is updated as a whole
    skipped: int  # elements of the parameter before these
    offset: int  # of the values in the buffer


class Pass(NamedTuple):
    """The rows `first` to `end - 1` of the table, which one launch updates."""

    first: int
    end: int
    tiles: int
    locate: Tensor


@dataclass
class RoundedLaunch(StepLaunch):
    """One table, whose kernel is launched once a pass."""

    pieces: list[Rows] = field(default_factory=list)
    """By row of the table."""
    passes: list[Pass] = field(default_factory=list)
    size: int = 0  # of the buffer, in elements
    counted: list[tuple[int, int, int]] = field(default_factory=list)
    """Parameters with several rows in the table: (index in the launch, first row, last row)."""
    steps: Tensor | None = None
    """Counters, float64 [rows of the table]. The kernel counts a step for each row. So all rows of a parameter except
    the last one count here; the last row counts in the parameter's state."""
    values: Tensor | None = None
    """The buffer, during a step."""
    tried: Tensor | None = None
    """Another one, where errors go into the momentum: the updated values, and then their rounding errors."""
    skip: Tensor | None = None
    """`GradScale.skip` of this step."""

    @classmethod
    def of(cls, optimizer: Any, variant: StepVariant, items: list[StepItem]) -> Self:
        cut = [list(_cut(optimizer, variant, item)) for item in items]
        made = cls._over(optimizer, variant, items, [piece for pieces in cut for piece in pieces])
        made._plan(cut)
        made.take(made.grads)
        return made

    def _plan(self, cut: list[list[StepItem]]) -> None:
        """Give each row of the table its part of the buffer, and begin a new pass where the buffer is full."""
        limit = piece_of(self.table.device)
        bounds, offset = [0], 0
        for index, pieces in enumerate(cut):
            if len(pieces) > 1:
                first = len(self.pieces)
                self.counted.append((index, first, first + len(pieces) - 1))
            for piece in pieces:
                room = -(-piece.numel // ALIGNED) * ALIGNED
                if offset and offset + room > limit:
                    bounds.append(len(self.pieces))
                    offset = 0
                self.pieces.append(
                    Rows(index, piece.start, piece.end, piece.rows, piece.skipped, offset)
                )
                offset += room
                self.size = max(self.size, offset)
        bounds.append(len(self.pieces))
        for first, end in pairwise(bounds):
            self.passes.append(self._pass(first, end))
        if self.counted:
            self.steps = self.scalars.new_zeros(len(self.pieces), dtype=states.STEP)
            for _, first, last in self.counted:
                own = self.steps.data_ptr() + self.steps.itemsize * np.arange(first, last)
                self.rows[first:last, COLUMN["step"]] = own

    def _pass(self, first: int, end: int) -> Pass:
        rows = self.rows[first:end]
        counts = fused_step.tiles(rows[:, COLUMN["numel"]], rows[:, COLUMN["cols"]])
        rows[:, COLUMN["first_tile"]] = begin = np.cumsum(counts) - counts
        tiles = int(counts.sum())
        return Pass(first, end, tiles, copied(fused_step.locate(begin, tiles), self.table.device))

    @staticmethod
    def _seen(weights: list[Tensor]) -> Any:
        # Not where they are: each step looks that up.
        return [(w.device, w.dtype, w.shape, w.is_contiguous()) for w in weights]

    def _by_row(self, gradients: np.ndarray) -> np.ndarray:
        owners = [piece.owner for piece in self.pieces]
        skipped = np.array([piece.skipped for piece in self.pieces])
        whole = gradients[owners]
        return np.where(whole == 0, 0, whole + self.variant.grad.itemsize * skipped)

    def _scratch(self) -> tuple[Any, ...]:
        # Not the buffers: a graph's own pool has them, and later launches of the graph take the same memory.
        return *super()._scratch(), self.passes, self.steps

    # ---- each step ------------------------------------------------------------------------------------------

    def run(self, optimizer: Any, scale: GradScale) -> None:
        device = self.table.device
        self.values = torch.empty(self.size, dtype=torch.float32, device=device)
        offsets = self.values.itemsize * np.array([piece.offset for piece in self.pieces])
        self.rows[:, COLUMN["param"]] = self.values.data_ptr() + offsets
        if self.variant.error == "tried":
            self.tried = torch.empty_like(self.values)
            self.rows[:, COLUMN["correction"]] = self.tried.data_ptr() + offsets
        self.skip = None if scale.skip is None else scale.skip.to(device)
        for index, first, last in self.counted:
            assert self.steps is not None
            self.steps[first:last].copy_(optimizer.state[self.params[index]]["step"])
        weights: list[Any] = list(map(states.memory, self.params))
        averaged = [(codes, remainder.of(codes)) for codes in map(_codes, weights)]
        skip = self.skip
        super().run(optimizer, scale)
        self.values = self.tried = self.skip = None
        for codes, rest in averaged:  # an update of some rows has not ended the remainder of all
            remainder.forget(codes)
            if rest is not None and skip is not None:
                remainder.restore(codes, torch.where(skip, rest, 0))

    def _launch(self, table: Tensor, kernel: Any, control: Tensor | None) -> None:
        groups = table.data_ptr() + self.rows.nbytes
        width = 8 * len(fused_step.TENSOR)
        for first, end, tiles, locate in self.passes:
            taken = [self._taken(piece) for piece in self.pieces[first:end]]
            for weight, values in taken:
                weight.write_master(values)
            address, scalars = table.data_ptr() + first * width, self.scalars[first:end]
            one = StepArguments(address, groups, scalars, locate, end - first, tiles, control)
            kernel(one)
            if self.tried is None:
                for weight, values in taken:
                    _update(weight, values, self.skip)
                continue
            for piece in self.pieces[first:end]:
                weight, tried = self._taken(piece, self.tried)
                _update(weight, tried, self.skip)
                if weight.numel():
                    tried.sub_(weight.master())
            self._kernel(kernel.variant.scaled, second=True)(one)

    def _taken(self, piece: Rows, buffer: Tensor | None = None) -> tuple[LowbitTensor, Tensor]:
        """The rows of the weight, and the part of the buffer, `values` by default, for their values."""
        buffer = self.values if buffer is None else buffer
        assert buffer is not None
        whole: Any = states.memory(self.params[piece.owner])
        if piece.rows > 1:
            rest = remainder.of(_codes(whole))
            whole = rows_of(whole, piece.rows)[piece.start : piece.end]
            if rest is not None:
                remainder.restore(_codes(whole), rows_of(rest, piece.rows)[piece.start : piece.end])
        end = piece.offset + whole.numel()
        return whole, buffer[piece.offset : end].view(whole.shape)


def _codes(weight: LowbitTensor) -> Tensor:
    """The inner tensor to which the remainder of an average belongs."""
    return next(iter(weight.inner_tensors().values()))


def _update(weight: LowbitTensor, values: Tensor, skip: Tensor | None) -> None:
    """Write the values to the weight, unless the device decides to skip the step."""
    if weight.numel() == 0:
        return
    if skip is None:
        weight.update_(values)
        return
    inner = list(weight.inner_tensors().values())
    before = [t.clone() for t in inner]
    weight.update_(values)
    for old, new in zip(before, inner, strict=True):
        torch.where(skip, old, new, out=new)


def _cut(optimizer: Any, variant: StepVariant, item: StepItem) -> Iterator[StepItem]:
    """A parameter as a whole, or in groups of rows if it is large. All ranks cut alike, because they may have to round
    a row together."""
    weight, state = item.own, optimizer.state[item.param]
    names = optimizer.state_names(optimizer.param_groups[item.group])
    stored = [local(state[name]) for name in names]
    cols = [t.cols_of(weight.shape) for t in stored if isinstance(t, CodebookTensor)]
    width = max(cols, default=weight.shape[-1])
    if variant.is_random:
        for run, _ in states.global_index(item.param)[1]:
            width = max(width, run)  # rows must begin with a run; one width divides the other
    if weight.numel() == 0:
        yield item
        return
    rows = weight.numel() // width
    most = max(1, piece_of(weight.device) // (width // weight.shape[-1] * item.param.shape[-1]))
    if rows <= most:
        yield item
        return
    for start in range(0, rows, most):
        yield item._replace(start=start, end=min(start + most, rows), rows=rows)
