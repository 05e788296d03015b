"""What a call of an op allocates and launches, as data that depends on the layouts of its operands alone.

An op makes a `Plan` once for operands of the same layouts. `run` carries it out from Python; `launcher` gives it to a
compiled launcher, which carries out the same plan in a tenth of the time. Tensors of a call have numbers: first the
operands, then the results, then scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.tensor_map import tensor_map

if TYPE_CHECKING:
    from lowbit_kernels.nvrtc import Kernel


class Buffer(NamedTuple):
    """A contiguous tensor to allocate; `zeroed` before the first launch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Address(NamedTuple):
    """The address of the tensor with this number, plus `offset` bytes. 0, a null pointer, for an operand of None."""

    tensor: int
    offset: int = 0


class Map(NamedTuple):
    """A tensor map over the tensor with this number; the other fields are arguments of `tensor_map.tensor_map`."""

    tensor: int
    size: int
    rows: int
    columns: int
    stride: int
    box: int
    width: int


class Launch(NamedTuple):
    """A launch of `grid` blocks of `threads` threads; an int among the arguments is passed as it is."""

    kernel: Kernel
    grid: int
    threads: int
    arguments: tuple[int | Address | Map, ...]


class Plan(NamedTuple):
    """The buffers of a call and its launches, in order."""

    results: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    launches: tuple[Launch, ...]


def run(plan: Plan, operands: Sequence[Tensor | None]) -> list[Tensor]:
    """Carry the plan out on the operands' device and return the results. The first operand is not None."""
    first = operands[0]
    assert first is not None
    made = [_allocated(buffer, first.device) for buffer in (*plan.results, *plan.scratch)]
    addresses = [0 if t is None else t.data_ptr() for t in (*operands, *made)]
    with torch.cuda.device_of(first):
        stream = torch.cuda.current_stream().cuda_stream
        for launch in plan.launches:
            values = (_value(argument, addresses) for argument in launch.arguments)
            launch.kernel(stream, launch.grid, launch.threads, *values)
    return made[: len(plan.results)]


def _allocated(buffer: Buffer, device: torch.device) -> Tensor:
    make = torch.zeros if buffer.zeroed else torch.empty
    return make(buffer.shape, dtype=buffer.dtype, device=device)


def _value(argument: int | Address | Map, addresses: Sequence[int]) -> int:
    if isinstance(argument, Address):
        address = addresses[argument.tensor]
        return address and address + argument.offset
    if isinstance(argument, Map):
        return tensor_map(addresses[argument.tensor], *argument[1:]).getPtr()
    return argument
