"""Which kinds of tensors hold the memory at the peak of a training step, by the history of PyTorch's allocator.

The history lists every allocation and release of a step with its address. Read up to the peak, it gives the memory that
is in use there. What was in use before the step are parameters, optimizer states and the rest; the forward pass
allocated what is kept for backward; the gradients of parameters are those that are still there after backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.optimizers import tensor_bytes

MOST_EVENTS = 1_000_000


@dataclass(frozen=True)
class PeakBytes:
    """Bytes in use at the peak of a step.

    Attributes:
        parameters, states: of the model and of its optimizer.
        gradients: of the parameters, as far as the peak finds them.
        activations: what the forward pass has allocated: before backward, everything that backward reads.
        other: the temporary tensors of backward and of the optimizer, and what else was in use before the step.
    """

    parameters: int
    gradients: int
    states: int
    activations: int
    other: int


@dataclass(frozen=True)
class InUse:
    """An allocation that is in use: its size, and the number of its event."""

    size: int
    event: int


def in_use(events: Iterable[Mapping[str, Any]]) -> dict[int, InUse]:
    """What these events have allocated and not released, by address."""
    found: dict[int, InUse] = {}
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            found[event["addr"]] = InUse(event["size"], number)
        elif event["action"] == "free_requested":
            found.pop(event["addr"], None)
    return found


def events_to_peak(events: Sequence[Mapping[str, Any]]) -> int:
    """The number of events until the most memory is in use."""
    now = most = at = 0
    for number, event in enumerate(events, 1):
        sign = {"alloc": 1, "free_requested": -1}.get(event["action"], 0)
        now += sign * event["size"]
        if now > most:
            most, at = now, number
    return at


def split_step(
    events: Sequence[Mapping[str, Any]], forward: int, backward: int, gradients: set[int]
) -> tuple[int, int, int]:
    """Bytes at the peak that a step has allocated and not released: gradients, activations, other; the last may be
    negative, if the step has released memory of before.

    Args:
        events: of the step.
        forward, backward: the number of events when the pass ends.
        gradients: addresses of the gradients after backward.
    """
    until = events_to_peak(events)
    at_peak, after = in_use(events[:until]), in_use(events[:backward])
    by_gradients = by_forward = total = 0
    for address, one in at_peak.items():
        total += one.size
        if address in gradients and after.get(address) == one:
            by_gradients += one.size
        elif one.event < forward:
            by_forward += one.size
    return by_gradients, by_forward, total - by_gradients - by_forward


def peak_by_kind(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[], Tensor],
    before: int,
) -> PeakBytes:
    """Take one step on the current CUDA device; gradients must be freed already.

    Args:
        model, optimizer: the optimizer has its states.
        forward: computes the loss.
        before: bytes that other work held before the model was made; they don't count.
    """
    held = torch.cuda.memory_allocated() - before
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)
    try:
        loss = forward()
        after_forward = len(_events())
        loss.backward()
        after_backward = len(_events())
        gradients = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
        optimizer.step()
        events = _events()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    optimizer.zero_grad()
    parts = split_step(events, after_forward, after_backward, gradients)
    parameters = tensor_bytes([*model.parameters(), *model.buffers()])
    stored = [value for state in optimizer.state.values() for value in state.values()]
    states = tensor_bytes(v for v in stored if isinstance(v, Tensor) and v.is_cuda)
    rest = held - parameters - states
    return PeakBytes(parameters, parts[0], states, parts[1], parts[2] + rest)


def _events() -> list[dict[str, Any]]:
    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
