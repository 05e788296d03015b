"""The compiled step of an optimizer: the table of pointers that a launch of a kernel reads, on a GPU or a CPU.

All parameters with the same algorithm, dtypes, state format and rounding are updated by one launch. What doesn't
change between steps is worked out once (`FusedSteps`). Each step looks whether it still holds (the same parameters
have gradients, nothing has moved), collects the addresses of the gradients, and copies the table to the device if
anything in it has changed: a pinned, asynchronous copy of some kilobytes. Nothing is read back. On a CPU
the table is read where it is.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit.optim import state as states
from lowbit.optim.clip import GradScale
from lowbit.optim.job import Job, local_grad
from lowbit.optim.kernel import compiled, options_of, scaled, variant_of
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.codebook_tensor import CodebookTensor
from lowbit_kernels import fused_step
from lowbit_kernels.fused_step import COLUMN, FusedStep, Variant
from lowbit_kernels.fused_step_cpu import FusedStepCpu

_GRAD, _DTYPE, _LAYOUT = map(operator.attrgetter, ("grad", "dtype", "layout"))
_IS_DENSE = Tensor.is_contiguous


class _Item(NamedTuple):
    """A parameter of a launch."""

    param: Tensor
    own: Tensor  # what the step writes to: the parameter itself, or see `states.memory`
    group: int  # index in param_groups
    place: int  # in the optimizer
    state: dict[str, Any]
    address: int


@dataclass
class _Launch:
    """One kernel and its table, [items, fused_step.TENSOR words] followed by the groups."""

    variant: Variant
    items: list[_Item]
    tiles: int
    locate: Tensor
    scalars: Tensor
    words: np.ndarray
    table: Tensor  # the same on the device; on a CPU, the same memory
    others: np.ndarray  # bits of every address of an item but the gradient's, or-ed
    inside: list[
        Tensor
    ]  # weights within low-bit tensors, which tell by its version what they know of one
    params: list[Tensor]
    places: list[int]
    addresses: list[int]
    wrapped: bool  # some parameter is a DTensor, or has its weight inside
    grads: list[Tensor] = field(default_factory=list)  # of the step at hand
    uploaded: np.ndarray | None = None
    kernels: dict[bool, FusedStep | FusedStepCpu] = field(default_factory=dict)

    def kernel(self, is_scaled: bool) -> FusedStep | FusedStepCpu:
        """The one for gradients that are scaled, or as they are. Kept here, since to hash a variant takes long."""
        if is_scaled not in self.kernels:
            variant = scaled(self.variant) if is_scaled else self.variant
            self.kernels[is_scaled] = compiled(variant, self.table.device)
        return self.kernels[is_scaled]

    def tensor_words(self) -> np.ndarray:
        width = len(fused_step.TENSOR)
        return self.words[: len(self.items) * width].reshape(-1, width)

    def group_words(self) -> np.ndarray:
        width = fused_step.GROUP_WORDS
        return self.words[len(self.items) * len(fused_step.TENSOR) :].reshape(-1, width)


class FusedSteps:
    """What the kernel does of an optimizer's step, and what it leaves to PyTorch operations.

    Args:
        optimizer: a `LowbitOptimizer`.
        jobs: what there is to do now; the states exist.
    """

    def __init__(self, optimizer: Any, jobs: list[Job]) -> None:
        self.optimizer = optimizer
        self.launches: list[_Launch] = []
        self._rest: list[Job] = []
        batches: dict[Any, list[_Item]] = defaultdict(list)
        grads: dict[int, Tensor] = {}
        numbers = {id(group): i for i, group in enumerate(optimizer.param_groups)}
        for job in jobs:
            for param in job.params:
                optimizer._ensure_state(job.group, param)
            rest = job
            if job.may_fuse:
                rest = Job(job.group)
                for param, index, grad in zip(job.params, job.indices, job.grads, strict=True):
                    variant = variant_of(optimizer, job.group, param, grad)
                    if variant is None:
                        rest.add(param, index, grad)
                    else:
                        item = self._item(numbers[id(job.group)], param, index)
                        batches[variant, item.own.device].append(item)
                        grads[index] = grad
            if rest.params:
                self._rest.append(rest)
        if not batches:
            return
        for (variant, _), items in batches.items():
            launch = self._launch(variant, items)
            launch.grads = [_dense(grads[item.place]) for item in items]
            self.launches.append(launch)
        self._states = list(optimizer.state.values())
        self._owners = [item.state for launch in self.launches for item in launch.items]
        self._tensors = list(chain.from_iterable(map(dict.values, self._owners)))
        self._params = [list(map(id, group["params"])) for group in optimizer.param_groups]
        self._options = [options_of(optimizer, group) for group in optimizer.param_groups]
        with_gradient = {id(param) for job in jobs for param in job.params}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._idle = [p for p in params if id(p) not in with_gradient]
        each = (pair for job in jobs for pair in zip(job.indices, job.params, strict=True))
        self._sharded = sorted((pair for pair in each if states.is_dtensor(pair[1])), key=_place)

    # ---- the table ------------------------------------------------------------------------------------------

    def _item(self, group: int, param: Tensor, index: int) -> _Item:
        own, state = states.memory(param), self.optimizer.state[param]
        return _Item(param, own, group, index, state, own.data_ptr())

    def _launch(self, variant: Variant, items: list[_Item]) -> _Launch:
        device = items[0].own.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and this step is not like the last one; take one step with the same "
                "parameters, gradients and options before the capture"
            )
        width, groups = len(fused_step.TENSOR), len(self.optimizer.param_groups)
        words = np.zeros(len(items) * width + groups * fused_step.GROUP_WORDS, np.int64)
        rows = words[: len(items) * width].reshape(-1, width)
        draws = variant.rounding == "stochastic" or "bf16" in variant.formats
        pairs = zip(rows, items, strict=True)
        others = np.array([self._fill(row, item, draws) for row, item in pairs])
        numel = np.array([item.own.numel() for item in items])
        counts = fused_step.tiles(numel, rows[:, COLUMN["cols"]])
        first = np.cumsum(counts) - counts
        rows[:, COLUMN["first_tile"]] = first
        total = int(counts.sum())
        scratch = (len(items), fused_step.SCALARS_WORDS)
        return _Launch(
            variant=variant,
            items=items,
            tiles=total,
            locate=_copied(fused_step.locate(first, total), device),
            scalars=torch.empty(scratch, dtype=torch.int64, device=device),
            words=words,
            table=torch.from_numpy(words) if device.type == "cpu" else _empty(words, device),
            others=others,
            inside=[i.own for i in items if isinstance(states.local(i.param), LowbitTensor)],
            params=[item.param for item in items],
            places=[item.place for item in items],
            addresses=[item.address for item in items],
            wrapped=any(item.own is not item.param for item in items),
        )

    def _fill(self, row: np.ndarray, item: _Item, draws: bool) -> int:
        """Everything of a table's row but the gradient's address and the first tile. Returns bits, the last four of
        which are 0 where eight elements can be read at once."""
        group = self.optimizer.param_groups[item.group]
        numel = cols = item.own.numel()
        addresses = {"param": item.address}
        for slot, name in enumerate(self.optimizer.state_names(group)):
            part = states.local(item.state[name])
            if isinstance(part, CodebookTensor):
                addresses[f"state_{slot}"] = part.codes.data_ptr()
                addresses[f"scale_{slot}"] = part.scale.data_ptr()
                cols = part.cols_of(item.own.shape)
            else:
                addresses[f"state_{slot}"] = part.data_ptr()
        if states.has_correction(group, item.param):
            addresses["correction"] = states.local(item.state["weight_correction"]).data_ptr()
        bits = 0
        for name, address in addresses.items():
            row[COLUMN[name]] = address
            bits |= address
        if cols % fused_step.TILE == 0:  # rows follow each other without a gap: one long row
            cols = numel
        row[COLUMN["step"]] = item.state["step"].data_ptr()
        row[COLUMN["cols"]], row[COLUMN["numel"]] = cols, numel
        row[COLUMN["tiles_a_row"]] = 0 if cols == numel else -(-cols // fused_step.TILE)
        row[COLUMN["group"]], row[COLUMN["key"]] = item.group, 4 * item.place
        if draws:
            base, run, stride = states.global_index(item.param)
            row[COLUMN["first_index"]] = base
            if run != stride:
                row[COLUMN["run"]], row[COLUMN["stride"]] = run, stride
        return bits | (0 if cols % 8 == 0 or cols == numel else 1)

    # ---- each step ------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether this still describes the optimizer, whose gradients are taken up then; if not, make another one."""
        groups = self.optimizer.param_groups
        if not self.launches:
            return False
        if [list(map(id, group["params"])) for group in groups] != self._params:
            return False
        if any(param.grad is not None for param in self._idle):
            return False
        if [options_of(self.optimizer, group) for group in groups] != self._options:
            return False
        if not self._nothing_moved():
            return False
        for job in self._rest:
            if any(p.grad is None or p.grad.layout is not torch.strided for p in job.params):
                return False
        self._take_gradients()
        return True

    def _nothing_moved(self) -> bool:
        """Whether states, weights and gradients are as they were. This is most of what the host does in a step:
        loops in Python would take three times as long."""
        if not _are(self.optimizer.state.values(), self._states):
            return False
        if not _are(chain.from_iterable(map(dict.values, self._owners)), self._tensors):
            return False
        for launch in self.launches:
            own = list(map(states.memory, launch.params)) if launch.wrapped else launch.params
            if list(map(Tensor.data_ptr, own)) != launch.addresses:
                return False
            grads = list(map(_GRAD, launch.params))
            if type(None) in set(map(type, grads)):
                return False
            if set(map(_DTYPE, grads)) != {launch.variant.grad}:
                return False
            if set(map(_LAYOUT, grads)) != {torch.strided}:
                return False
        return True

    def _take_gradients(self) -> None:
        # Ranks may exchange data for those of DTensors. They do it in the order of the parameters, since what the
        # kernel takes may differ between ranks.
        moved = {place: local_grad(param) for place, param in self._sharded}
        for launch in self.launches:
            grads = list(map(_GRAD, launch.params))
            if launch.wrapped:
                each = zip(launch.places, grads, strict=True)
                grads = [moved.get(place, grad) for place, grad in each]
            launch.grads = grads if all(map(_IS_DENSE, grads)) else list(map(_dense, grads))
        for job in self._rest:
            job.grads = [
                moved[place] if place in moved else local_grad(param)
                for place, param in zip(job.indices, job.params, strict=True)
            ]

    def jobs(self) -> list[Job]:
        """All that there is to do, with the gradients at hand."""
        found = list(self._rest)
        for launch in self.launches:
            found.append(Job({}, launch.params, launch.places, launch.grads))
        return found

    def run(self, scale: GradScale) -> list[Job]:
        """Update what the kernel takes. Returns the jobs that are left."""
        for launch in self.launches:
            device = launch.table.device
            control = _control(scale, device)
            self._refresh(launch)
            table = self._upload(launch)
            groups = table.data_ptr() + launch.tensor_words().nbytes
            with _current(device):
                launch.kernel(scale.coefficient is not None)(
                    table.data_ptr(),
                    groups,
                    launch.scalars,
                    launch.locate,
                    count=len(launch.items),
                    tiles=launch.tiles,
                    control=control,
                )
            if launch.inside:
                torch.autograd.graph.increment_version(launch.inside)
            launch.grads = []  # let them be freed
        return self._rest

    def _refresh(self, launch: _Launch) -> None:
        """Write what may have changed into the words of a launch."""
        rows, groups = launch.tensor_words(), launch.group_words()
        addresses = np.array(list(map(Tensor.data_ptr, launch.grads)), np.int64)
        rows[:, COLUMN["grad"]] = addresses
        rows[:, COLUMN["aligned"]] = ((addresses | launch.others) & 15) == 0
        for words, group in zip(groups, self.optimizer.param_groups, strict=True):
            lr = group["lr"]
            words[1] = 0
            if _is_read_on_device(lr, launch.table.device):
                words[1], words[2] = lr.data_ptr(), lr.dtype == torch.float64
            else:
                words[:1].view(np.float64)[0] = float(lr)
            words[3] = np.uint64(group["seed"] % 2**64).astype(np.int64)
            hyper = self.optimizer.hyper(group)
            words[4 : 4 + len(hyper)].view(np.float64)[:] = hyper

    def _upload(self, launch: _Launch) -> Tensor:
        """The table on the device, as it is now."""
        if launch.table.device.type == "cpu":
            return launch.table
        if launch.table.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # a graph reads its own copy whenever it is replayed: later steps must not write to it
            source = _pinned(launch.words, launch.table.device)
            table = torch.empty_like(launch.table)
            # kept for as long as the graph may be replayed, whatever plan comes next
            self.optimizer.__dict__.setdefault("_captured", []).append((launch, source, table))
            return table.copy_(source, non_blocking=True)
        if launch.uploaded is None or not np.array_equal(launch.uploaded, launch.words):
            launch.uploaded = launch.words.copy()
            source = _pinned(launch.uploaded, launch.table.device)
            launch.table.copy_(source, non_blocking=True)
        return launch.table


def _pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """In memory from which a GPU can copy while the host goes on; torch frees it only after that."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _empty(like: np.ndarray, device: torch.device) -> Tensor:
    return torch.empty(len(like), dtype=torch.int64, device=device)


def _copied(values: np.ndarray, device: torch.device) -> Tensor:
    return _pinned(values, device).to(device, non_blocking=True)


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device the current one, which costs more than asking whether it is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _are(found: Iterable[object], kept: list[Any]) -> bool:
    """Whether these are the very objects."""
    now = list(found)
    return len(now) == len(kept) and all(map(operator.is_, now, kept))


def _place(pair: tuple[int, Tensor]) -> int:
    return pair[0]


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.is_contiguous() else grad.contiguous()


def _is_read_on_device(lr: object, device: torch.device) -> bool:
    if not isinstance(lr, Tensor) or lr.device != device:
        return False
    return lr.dtype in (torch.float32, torch.float64)


def _control(scale: GradScale, device: torch.device) -> Tensor | None:
    """What the kernel reads of it: float32 [factor, whether to skip]."""
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
