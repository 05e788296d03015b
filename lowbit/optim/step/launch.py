"""One launch of a compiled step: its kernel, and the table of pointers that the kernel reads, on a GPU or a CPU.

A launch knows addresses, shapes and indices of the parameters that it updates. It keeps nothing alive except the
gradients of a step.
"""

from __future__ import annotations

import functools
import operator
import struct
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lowbit.numerics.codebook import Codebook
from lowbit.optim.state import state as states
from lowbit.optim.step.job import GradScale
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.codebook_tensor import FORMATS, CodebookTensor
from lowbit_kernels.elementwise import fused_step
from lowbit_kernels.elementwise.fused_step import (
    COLUMN,
    StepArguments,
    StepKernel,
    StepVariant,
    Table,
)
from lowbit_kernels.elementwise.fused_step_cpu import StepKernelCpu
from lowbit_kernels.runtime import tensor_memory
from lowbit_kernels.runtime.tensor_memory import Memory

_GRAD, _DTYPE, _LAYOUT, _SHAPE = map(operator.attrgetter, ("grad", "dtype", "layout", "shape"))
_WIDTH = len(fused_step.TENSOR)


class StepItem(NamedTuple):
    """A parameter of a launch under construction, or some rows of one."""

    param: Tensor
    own: Tensor  # the tensor that the step writes to, see `states.memory`
    group: int  # index in param_groups
    param_index: int  # among the parameters of the optimizer
    grad: Tensor
    start: int = 0  # these rows of `rows`
    end: int = 1
    rows: int = 1

    @property
    def numel(self) -> int:
        return self.own.numel() // self.rows * (self.end - self.start)

    @property
    def skipped(self) -> int:
        """Elements of the parameter before these."""
        return self.own.numel() // self.rows * self.start


@dataclass
class StepLaunch:
    """One kernel and its table: [items, words of fused_step.TENSOR], followed by the groups."""

    variant: StepVariant
    indices: list[int]  # of its parameters in the optimizer
    wrapped: bool  # some parameter is a DTensor, or has its weight inside
    weights: Any  # what `_seen` says of the weights
    tiles: int
    locate: Tensor
    scalars: Tensor
    words: np.ndarray
    table: Tensor  # the same on the device; on a CPU, the same memory
    others: np.ndarray  # bitwise or of all addresses of a parameter except its gradient's
    params: list[Any]  # and their gradients, of this step
    grads: list[Tensor]
    gradients: Memory | None = None  # whose addresses are in the table
    uploaded: np.ndarray | None = None
    """The words on the device, in pinned memory. A capture must not free them: torch would record the event of this
    memory in the graph, where no later allocation of pinned memory can query it."""
    kernels: dict[tuple[bool, bool], StepKernel | StepKernelCpu] = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: Any, variant: StepVariant, items: list[StepItem]) -> Self:
        """The launch that updates these items, whose states exist."""
        made = cls._over(optimizer, variant, items, items)
        made.take(made.grads)
        return made

    @classmethod
    def _over(
        cls, optimizer: Any, variant: StepVariant, items: list[StepItem], pieces: list[StepItem]
    ) -> Self:
        """The launch of these parameters, with `pieces` of them as rows of its table. Gradients are yet to be taken."""
        device = items[0].own.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and this step is not like the last one; take one step with the same "
                "parameters, gradients and options before the capture"
            )
        groups = len(optimizer.param_groups)
        words = np.zeros(len(pieces) * _WIDTH + groups * fused_step.GROUP_WORDS, np.int64)
        rows = words[: len(pieces) * _WIDTH].reshape(-1, _WIDTH)
        pairs = zip(rows, pieces, strict=True)
        others = np.array([_fill(row, optimizer, piece, variant) for row, piece in pairs])
        counts = cls._tiles_of(rows)
        first = np.cumsum(counts) - counts
        rows[:, COLUMN["first_tile"]] = first
        total = int(counts.sum())
        scratch, table = (len(pieces), fused_step.SCALARS_WORDS), torch.from_numpy(words)
        params, owned, _, indices, grads, *_ = map(list, zip(*items, strict=True))
        return cls(
            variant=variant,
            indices=indices,
            wrapped=not all(map(operator.is_, owned, params)),
            weights=cls._seen(owned),
            tiles=total,
            locate=copied(fused_step.locate(first, total), device),
            scalars=torch.empty(scratch, dtype=torch.int64, device=device),
            words=words,
            table=table if device.type == "cpu" else torch.empty_like(table, device=device),
            others=others,
            params=params,
            grads=grads,
        )

    @staticmethod
    def _seen(weights: list[Any]) -> Any:
        """Everything about the weights on which the table depends, to compare; None: they have no memory."""
        return tensor_memory.read(weights)

    @staticmethod
    def _tiles_of(rows: np.ndarray) -> np.ndarray:
        """The tiles of these rows of the table."""
        return fused_step.tiles(rows[:, COLUMN["numel"]], rows[:, COLUMN["cols"]])

    # ---- each step ------------------------------------------------------------------------------------------

    def holds(self, params: list[Any]) -> bool:
        """True if weights and gradients are as before; only the gradients' addresses may differ. The launch then takes
        the gradients. A wrapped launch does not yet: ranks may first have to exchange data for its gradients.

        Args:
            params: the parameters of this launch.
        """
        weights = list(map(states.memory, params)) if self.wrapped else params
        seen = self._seen(weights)
        if seen is None or seen != self.weights:
            return False
        grads = list(map(_GRAD, params))
        inner = map(local, grads) if self.wrapped else grads
        if not all(map(has_own_memory, set(map(type, inner)))):  # nor has None
            return False
        self.params = params
        if not self.wrapped:
            found = tensor_memory.read(grads)
            if found is None or self.gradients is None or found.layouts != self.gradients.layouts:
                return False
            return self.take(grads, found)
        self.grads = grads
        return (
            all(map(operator.eq, map(_SHAPE, grads), map(_SHAPE, params)))
            and set(map(_DTYPE, grads)) == {self.variant.grad}
            and set(map(_LAYOUT, grads)) == {torch.strided}
        )

    def take_moved(self, moved: dict[int, Tensor]) -> bool:
        """`take` the gradients of a wrapped launch, those of DTensors from `moved`, by index of the parameter."""
        each = zip(self.indices, self.grads, strict=True)
        return not self.wrapped or self.take([moved.get(index, grad) for index, grad in each])

    def take(self, grads: list[Tensor], found: Memory | None = None) -> bool:
        """Make gradients ready to be read.

        Args:
            grads: the gradients, this rank's parts, in the order of the parameters.
            found: their memory, if it has been read.

        Returns:
            True if all gradients have memory. A gradient may have been resized to none.
        """
        found = found or tensor_memory.read(grads)
        if found is None or not found.are_contiguous or any(map(Tensor.is_neg, grads)):
            grads = [grad.resolve_neg().contiguous() for grad in grads]
            found = tensor_memory.read(grads)
        self.grads, before, self.gradients = grads, self.gradients, None
        if found is None:
            return False
        if before is None or found.addresses != before.addresses:
            addresses = self._by_row(found.numbers())
            self.rows[:, COLUMN["grad"]] = addresses
            self.rows[:, COLUMN["aligned"]] = ((addresses | self.others) & 15) == 0
            missing = addresses == 0
            if np.count_nonzero(missing) and self.rows[missing, COLUMN["numel"]].any():
                return False
        self.gradients = found
        return True

    def _by_row(self, gradients: np.ndarray) -> np.ndarray:
        """The addresses of the gradients, by row of the table instead of by parameter; 0 for one without memory."""
        return gradients

    def run(self, optimizer: Any, scale: GradScale) -> None:
        device = self.table.device
        control = _control(scale, device)
        self._write_groups(optimizer)
        table = self._upload(optimizer)
        with _current(device):
            self._launch(table, self._kernel(scale.coefficient is not None), control)
        written = self.params
        if self.wrapped:
            written = [*written, *map(states.memory, written)]
        # Autograd may hold them for a backward pass, and low-bit tensors cache values by version.
        torch.autograd.graph.increment_version(written)
        self.params, self.grads = [], []  # let them be freed

    def _launch(
        self, table: Tensor, kernel: StepKernel | StepKernelCpu, control: Tensor | None
    ) -> None:
        address, count = table.data_ptr(), len(self.others)
        groups, memory = address + self.rows.nbytes, (self.scalars, self.locate)
        kernel(StepArguments(address, groups, *memory, count, self.tiles, control, self.shared))

    def _kernel(self, is_scaled: bool, second: bool = False) -> StepKernel | StepKernelCpu:
        """The kernel for scaled or unscaled gradients; `second`: that of the second part of a step in two. Kept here,
        because hashing a variant takes long."""
        key = is_scaled, second
        if key not in self.kernels:
            variant = _like(self.variant, scaled=True) if is_scaled else self.variant
            if second:
                variant = _like(variant, error="given")
            self.kernels[key] = compiled(variant, self.table.device)
        return self.kernels[key]

    # ---- the table ------------------------------------------------------------------------------------------

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The rows of tensors in `words`."""
        return self.words[: len(self.others) * _WIDTH].reshape(-1, _WIDTH)

    @functools.cached_property
    def shared(self) -> int:
        """`StepArguments.shared` of a launch."""
        return 0

    def _scratch(self) -> tuple[Any, ...]:
        """The memory of this launch that the kernel reads or writes, besides the table."""
        return self.locate, self.scalars

    def _write_groups(self, optimizer: Any) -> None:
        at = self.rows.nbytes
        for group in optimizer.param_groups:
            lr, hyper = group["lr"], optimizer.hyper(group)
            least = optimizer.least_rate(group)
            if _is_read_on_device(lr, self.table.device):
                rate = 0.0, lr.data_ptr(), lr.dtype == torch.float64
            else:
                rate = float(lr), 0, False
            numbers = *rate, group["seed"] % 2**64, least, *hyper
            struct.pack_into(f"=dQQQ{1 + len(hyper)}d", self.words.data, at, *numbers)
            at += 8 * fused_step.GROUP_WORDS

    def _upload(self, optimizer: Any) -> Tensor:
        """The table as it is now, where the kernel reads it."""
        if self.table.device.type == "cpu":
            return self.table
        if self.table.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A graph reads its own copy at every replay, so later steps must not write to it.
            source = _pinned(self.words, self.table.device)
            table = torch.empty_like(self.table)
            # The graph may be replayed at any later time. The optimizer keeps weights, states and learning rates.
            kept = (self._scratch(), self.kernels, source, table)
            optimizer.__dict__.setdefault("_captured", []).append(kept)
            return table.copy_(source, non_blocking=True)
        if self.uploaded is None or not np.array_equal(self.uploaded, self.words):
            source = _pinned(self.words, self.table.device)
            self.uploaded = source.numpy()
            self.table.copy_(source, non_blocking=True)
        return self.table


def _fill(row: np.ndarray, optimizer: Any, item: StepItem, variant: StepVariant) -> int:
    """Write a row of the table, except the gradient's address and the first tile.

    Returns the bitwise or of all addresses, with bit 0 set if some row of 4-bit codes begins within a word. If the last
    four bits are 0, the kernel can read eight elements at once.
    """
    group, state = optimizer.param_groups[item.group], optimizer.state[item.param]
    numel = cols = item.numel
    read: dict[str, Tensor] = {}
    if variant.code_bits:
        codes: Any = item.own.codes_by_row()  # type: ignore[attr-defined]
        read |= {"param": codes.codes, "param_scale": codes.scale, "place": codes.place}
        row[COLUMN["width"]], row[COLUMN["scale_width"]] = item.own.shape[-1], codes.scale_width
        cols = item.own.shape[-1]
    elif not isinstance(item.own, LowbitTensor):  # RoundedLaunch.run sets the address of those
        read["param"] = item.own
    for slot, name in enumerate(optimizer.state_names(group)):
        part = local(state[name])
        if isinstance(part, CodebookTensor):
            read[f"state_{slot}"], read[f"scale_{slot}"] = part.codes, part.scale
            cols = part.cols_of(item.own.shape)
        else:
            read[f"state_{slot}"] = part
    if variant.rounding in ("corrected", "exact"):
        read["correction"] = local(state["weight_correction"])
    bits = 0
    for name, tensor in read.items():  # the addresses of the item's first row
        row[COLUMN[name]] = address = tensor.data_ptr() + tensor.nbytes // item.rows * item.start
        bits |= address
    if cols % fused_step.TILE == 0:  # rows follow each other without a gap: one long row
        cols = numel
    row[COLUMN["step"]] = state["step"].data_ptr()
    row[COLUMN["cols"]], row[COLUMN["numel"]] = cols, numel
    row[COLUMN["tiles_a_row"]] = 0 if cols == numel else -(-cols // fused_step.TILE)
    row[COLUMN["group"]], row[COLUMN["key"]] = item.group, 4 * item.param_index
    if variant.is_random and numel:  # a shard of columns may be empty
        base, runs = states.global_index(item.param)
        ((run, stride),) = runs or ((1, 1),)
        row[COLUMN["first_index"]] = base + item.skipped // run * stride  # whole runs
        if runs:
            row[COLUMN["run"]], row[COLUMN["stride"]] = run, stride
    packs = "4bit" in variant.formats and cols % 8 != 0 and cols != numel
    return bits | (1 if packs else 0)


def _pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """The values in memory from which a GPU can copy while the host goes on. torch frees it only after the copy."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    pinned = torch.empty_like(tensor, pin_memory=True)
    pinned.numpy()[:] = values
    return pinned


def copied(values: np.ndarray, device: torch.device) -> Tensor:
    return _pinned(values, device).to(device, non_blocking=True)


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Make a device the current one, unless it is: switching costs more than the test."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _is_read_on_device(lr: object, device: torch.device) -> bool:
    if not isinstance(lr, Tensor) or lr.device != device:
        return False
    return lr.dtype in (torch.float32, torch.float64)


def _control(scale: GradScale, device: torch.device) -> Tensor | None:
    """The scale as the kernel reads it: float32 [factor, whether to skip]; None for neither."""
    if scale.coefficient is None and scale.skip is None:
        return None
    factor, skip = scale.coefficient, scale.skip
    some = factor if factor is not None else skip
    assert some is not None
    parts = [
        torch.ones_like(some, dtype=torch.float32) if factor is None else factor,
        torch.zeros_like(some, dtype=torch.float32) if skip is None else skip.float(),
    ]
    return torch.stack(parts).to(device)


# ---- kernels ------------------------------------------------------------------------------------------------


@functools.cache
def compiled(variant: StepVariant, device: torch.device) -> StepKernel | StepKernelCpu:
    """The kernel of a variant on a device, made once. Raises RuntimeError if it can't be compiled."""
    return StepKernelCpu(variant) if device.type == "cpu" else StepKernel(variant, device)


def _like(v: StepVariant, **changes: Any) -> StepVariant:
    """`v` with another field: `scaled` for gradients that are multiplied by a factor, or the error "given" for the
    second part of a step whose first part is `v`, with the error "tried"."""
    own = {"scaled": v.scaled, "error": v.error, "code_bits": v.code_bits, **changes}
    return variant(v.rule, v.param, v.grad, v.formats, v.signed, v.stochastic, v.rounding, **own)


@functools.cache
def has_own_memory(kind: type) -> bool:
    """True if tensors of a class hold their values at `data_ptr`. Classes that dispatch operations themselves, such as
    wrappers around other tensors and fake tensors, do not."""
    if not issubclass(kind, Tensor):
        return False
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


@functools.cache
def variant(
    rule: Any,
    param: torch.dtype,
    grad: torch.dtype,
    formats: tuple[str, ...],
    signed: tuple[bool, ...],
    stochastic: tuple[bool, ...],
    rounding: str,
    scaled: bool = False,
    error: str = "dropped",
    code_bits: int = 0,
) -> StepVariant:
    """A variant, one object for one combination, because kernels are cached by it.

    Args:
        rule: the algorithm.
        param, grad: dtypes.
        formats: of each state: "8bit", "4bit", "float8", "bf16" or "fp32".
        signed, stochastic: for each state, True if it has negative values, and if it is rounded stochastically.
        rounding, scaled, error, code_bits: as `StepVariant` has them.
    """
    tables = tuple(map(_table, formats, signed))
    return StepVariant(
        rule, param, grad, formats, signed, stochastic, rounding, scaled, tables, error, code_bits
    )


@functools.cache
def _table(format: str, signed: bool) -> Table | None:
    if format not in ("8bit", "4bit"):
        return None
    book = Codebook(FORMATS[format].bits, signed)
    if book.bits == 4:
        return Table(book.table().numpy())
    return Table(book.table().numpy(), *book.cells())
