"""The hidden states of all batches between two blocks of a model, and the blocks that run on them.

Each block reads the states and replaces them by its outputs: those of the rounded model, and where a step compares with
it, those of the model in high precision.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, MutableSequence, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.inference.calibration.batches import Batches
from lowbit.tracing.block_inputs import Arguments, NotAChain, call_after, capture, moved

Cache = torch.device | Path | None
"""Where hidden states are kept: a device, a folder on disk, or None for where the model makes them."""


class StatesOnDisk(MutableSequence[Tensor]):
    """Tensors in a file without a name, which is gone when the process ends in any way. They are read to the CPU.

    Args:
        folder: where the file lies.
        tensors: the first ones.
    """

    def __init__(self, folder: Path, tensors: Iterable[Tensor] = ()) -> None:
        self._file: Any = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # it lives as long as this object
        self._entries: list[tuple[int, torch.Size, torch.dtype]] = []
        self._end = 0
        self.extend(tensors)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Any:
        begin, shape, dtype = self._entries[index]
        found = torch.empty(shape, dtype=dtype)
        self._file.seek(begin)
        self._file.readinto(_bytes_of(found))
        return found

    def shape(self, index: int) -> torch.Size:
        """That of a tensor, which is not read."""
        return self._entries[index][1]

    def __setitem__(self, index: Any, value: Any) -> None:
        begin, shape, dtype = self._entries[index]
        if math.prod(shape) * dtype.itemsize != value.nbytes:
            begin = self._end
        self._entries[index] = self._write(begin, value)

    def __delitem__(self, index: Any) -> None:
        del self._entries[index]

    def insert(self, index: int, value: Tensor) -> None:
        self._entries.insert(index, self._write(self._end, value))

    def _write(self, begin: int, value: Tensor) -> tuple[int, torch.Size, torch.dtype]:
        self._file.seek(begin)
        self._file.write(_bytes_of(value.detach().cpu().contiguous()))
        self._end = max(self._end, begin + value.nbytes)
        return begin, value.shape, value.dtype


class StatesInMemory(MutableSequence[Tensor]):
    """Tensors on a device. One that was copied there gives its memory to the tensor of its shape and dtype that
    replaces it.

    Args:
        device: None: each where it is.
        tensors: the first ones.
        copy: hold copies of these.
    """

    def __init__(
        self, device: torch.device | None, tensors: Iterable[Tensor] = (), copy: bool = False
    ) -> None:
        self._device = device
        self._held = [self._taken(t, copy) for t in tensors]
        self._written: dict[int, torch.cuda.Event] = {}
        """By the address of host memory: when a GPU will have written it."""

    def _taken(self, value: Tensor, copy: bool = False) -> tuple[Tensor, bool]:
        """The tensor on the device, and whether nobody else has its memory."""
        found = moved(value, self._device, copy)
        return found, found is not value

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: Any) -> Any:
        held = self._held[index][0]
        written = self._written.pop(held.data_ptr(), None)
        if written is not None:
            written.synchronize()
        return held

    def shape(self, index: int) -> torch.Size:
        """That of a tensor."""
        return self._held[index][0].shape

    def __setitem__(self, index: Any, value: Any) -> None:
        held, is_own = self._held[index]
        if not is_own or (held.shape, held.dtype) != (value.shape, value.dtype):
            self._held[index] = self._taken(value)
        elif value.is_cuda and held.is_pinned():  # whoever reads it waits, so that the GPU goes on
            held.copy_(value, non_blocking=True)
            with torch.cuda.device_of(value):
                self._written[held.data_ptr()] = torch.cuda.current_stream().record_event()
        else:
            held.copy_(value)

    def __delitem__(self, index: Any) -> None:
        del self._held[index]

    def insert(self, index: int, value: Tensor) -> None:
        self._held.insert(index, self._taken(value))


def _bytes_of(t: Tensor) -> memoryview:
    return t.reshape(-1).view(torch.uint8).numpy().data


class States:
    """The hidden states of all batches before the first block.

    Args:
        model, blocks, batches: those of `lowbit.tracing.block_inputs.capture`.
        cache: where the states are kept.
        compares: keep those of the model in high precision too.

    Attributes:
        low, high: of the rounded model, and of the one in high precision, for each batch; `high` is `low` without
            `compares`.
        arguments: for each batch the other arguments of each block.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        batches: Batches,
        cache: Cache,
        compares: bool,
    ) -> None:
        self.model, self.blocks, self.batches, self.cache = model, list(blocks), batches, cache
        self.arguments: list[tuple[Arguments, ...]] = []
        self.low = self.kept(self._captured())
        self.high: MutableSequence[Tensor] = (
            self.kept(self.low, copy=True) if compares else self.low
        )

    def _captured(self) -> Iterable[Tensor]:
        device = torch.device("cpu") if isinstance(self.cache, Path) else self.cache
        self.arguments = []
        for number, batch in enumerate(self.batches):
            try:
                (found,) = capture(self.model, self.blocks, [batch], device)
            except (NotAChain, torch.OutOfMemoryError):
                raise
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"the model does not run on batch {number}: {error}; accepted: keyword arguments, a tuple of "
                    "arguments, or one argument of the model, such as token ids [B, T]"
                ) from error
            self.arguments.append(found.arguments)
            yield found.hidden

    def kept(self, tensors: Iterable[Tensor], copy: bool = False) -> StatesOnDisk | StatesInMemory:
        """Tensors, kept where the states are. `copy`: others go on with these."""
        if isinstance(self.cache, Path):
            return StatesOnDisk(self.cache, tensors)
        return StatesInMemory(self.cache, tensors, copy)

    def again(self) -> None:
        """Take the states of the model as it is now. Those in high precision stay."""
        arguments = self.arguments
        self.low = self.kept(self._captured())
        self.arguments = arguments

    def run(self, at: int, block: nn.Module, hidden: Tensor, number: int) -> Tensor:
        """The output of block `at`, or of a copy of it, for a hidden state of batch `number`."""
        home = next((p.device for p in block.parameters()), hidden.device)
        x = moved(hidden, home, copy=True)  # a block may write to its input
        return self.arguments[number][at].run(block, x)

    def advance(
        self, states: MutableSequence[Tensor], at: int, block: nn.Module, first: int = 0
    ) -> None:
        """Replace states, those of the batches from `first` on, by the outputs of a block."""
        for number in range(first, len(states)):
            states[number] = self.run(at, block, states[number], number)

    def after(self, states: Sequence[Tensor], number: int) -> Any:
        """The model's output for a batch, with this state after the last block."""
        hidden = states[number]
        last = (p.device for block in reversed(self.blocks) for p in block.parameters())
        home = next((device for device in last if device.type != "meta"), hidden.device)
        x = moved(hidden, home, copy=True)  # what follows may write to it
        return call_after(self.model, self.blocks, self.batches[number], x)
