"""The processes that calibrate one model together, each on its own share of the batches.

All run the same steps on the same weights in the same order. Where a process by itself would sum over its batches, the
sums of all are added up; where results might differ by a device's rounding, all take those of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


class Ranks:
    """Those of a process group.

    Args:
        group: a group that this process belongs to. None: this process alone, whatever groups there are.

    Raises TypeError for anything else.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group must be a torch.distributed.ProcessGroup of this process, got {group!r}; accepted: e.g. "
                "torch.distributed.group.WORLD, mesh.get_group(), or None for one process"
            )
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self._has_failed = False

    def gathered(self, value: T) -> list[T]:
        """The values that all processes give here, in the order of ranks. Raises RuntimeError if one has failed."""
        if self.group is None:
            return [value]
        found = self._exchanged((value, None))
        for rank, (_, failure) in enumerate(found):
            if failure is not None:
                self._has_failed = True
                raise RuntimeError(f"rank {rank} of the process group failed: {failure}")
        return [own for own, _ in found]

    def _exchanged(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error of one process ends the context in all of them: the others would wait for it."""
        try:
            yield
        except Exception as error:
            if self.group is not None and not self._has_failed:
                self._has_failed = True
                with suppress(RuntimeError):  # of a connection that is lost
                    self._exchanged((None, f"{type(error).__name__}: {error}"))
            raise

    def add_up(self, *tensors: Tensor) -> None:
        """Give all processes the sums of these tensors."""
        self._reduce("SUM", tensors)

    def largest(self, *tensors: Tensor) -> None:
        """Give all processes the largest values of these tensors."""
        self._reduce("MAX", tensors)

    def _reduce(self, op: str, tensors: tuple[Tensor, ...]) -> None:
        self.gathered(None)
        if self.group is not None:
            for t in tensors:
                dist.all_reduce(t, getattr(dist.ReduceOp, op), group=self.group)

    @torch.no_grad()
    def alike(self, *tensors: Tensor) -> None:
        """Give all processes the bits of the first one."""
        self.gathered(None)
        if self.group is not None:
            for t in tensors:
                held = t.contiguous()
                dist.broadcast(held.view(-1).view(torch.uint8), group=self.group, group_src=0)
                if held is not t:
                    t.copy_(held)

    def begin(self, model: nn.Module | None, given: dict[str, Any]) -> None:
        """Give all processes the plain parameters and buffers of the first one, as DistributedDataParallel does. None:
        they all read them from one folder.

        Raises ValueError if they differ in what they were given."""
        for rank, other in enumerate(self.gathered(given)):
            if names := [name for name in given if other[name] != given[name]]:
                raise ValueError(
                    f"rank {rank} has other {', '.join(names)} than rank {self.rank}; all ranks of a group calibrate "
                    "one model alike, and only their batches differ"
                )
        if self.group is not None and model is not None:
            held = [*model.parameters(), *model.buffers()]
            self.alike(*(t.data for t in held if type(t.data) is Tensor and t.numel()))
