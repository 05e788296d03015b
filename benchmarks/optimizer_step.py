"""One optimizer step over all weights of a model: lowbit's formats and options, torch's, and the other low-bit ones.

The step's time is that between CUDA events around each of a row of steps, issued one after another: the GPU's time
where the host keeps ahead of it, as in a training loop, and the host's where it can't. What the host spends is also
measured alone, with nothing queued. The floor reads the gradient, and reads and writes the weight and the states in
the format in which they are stored.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.optimizers import (
    LLAMA_1B,
    REFERENCE,
    OptimizerChoice,
    lowbit_formats,
    lowbit_options,
    peers,
    random_parameters,
    state_bytes,
    torch_fused,
)
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio

WARM_UP = 2


@dataclass(frozen=True)
class StepCandidate:
    """An optimizer over parameters of these shapes."""

    choice: OptimizerChoice
    shapes: Sequence[tuple[int, ...]]
    device: str = "cuda"

    @property
    def name(self) -> str:
        return self.choice.name


@dataclass(frozen=True)
class StepTimes:
    """Of one optimizer. Seconds and bytes; the allocator's figures are None on a CPU.

    Attributes:
        step: of a step among others, the median.
        issue: of the host in ``step()``, nothing queued, gradients at new addresses; the median.
        first: the first step, until the device is done; in this process, which may have compiled for another before.
        moved: what a step must read and write.
        parameters: elements.
        held: what the optimizer holds after its steps.
        extra: the most that a step holds beyond that while it runs.
    """

    step: float
    issue: float
    first: float
    moved: int
    parameters: int
    held: int | None = None
    extra: int | None = None


def measure_step(candidate: StepCandidate, repeats: int) -> StepTimes:
    """Time ``repeats`` steps and measure their memory. RuntimeError when the weights don't move, or not to numbers."""
    choice, on_gpu = candidate.choice, candidate.device == "cuda"
    gc.collect()  # what earlier candidates held is not to be freed while this one is measured
    params = random_parameters(candidate.shapes, choice.dtype, candidate.device)
    watched = params[min(1, len(params) - 1)]
    before = watched.detach().clone()
    own_gradients = [p.grad for p in params if p.grad is not None]
    gradients = [own_gradients, [grad.clone() for grad in own_gradients]]
    own = torch.cuda.memory_allocated() if on_gpu else 0
    optimizer = choice.make(params)

    first = first_step_seconds(optimizer, on_gpu)
    for _ in range(WARM_UP):
        optimizer.step()
    issue = statistics.median(issue_seconds(optimizer, params, gradients, repeats, on_gpu))
    held = extra = None
    if on_gpu:
        step = statistics.median(event_seconds(optimizer.step, repeats))
        held = torch.cuda.memory_allocated() - own
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - own - held
    else:
        step = issue
    if not watched.isfinite().all() or torch.equal(watched, before):
        raise RuntimeError(f"{choice.name}: the weights are not finite, or have not moved")

    elements = sum(p.numel() for p in params)
    weight_bytes = elements * choice.dtype.itemsize
    moved = weight_bytes * (2 + choice.gradient_reads) + 2 * state_bytes(optimizer)
    return StepTimes(step, issue, first, moved, elements, held, extra)


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def first_step_seconds(optimizer: torch.optim.Optimizer, on_gpu: bool) -> float:
    """Seconds of one step, until the device is done."""
    _synchronize(on_gpu)
    started = time.perf_counter()
    optimizer.step()
    _synchronize(on_gpu)
    return time.perf_counter() - started


def issue_seconds(
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    gradients: list[list[Tensor]],
    repeats: int,
    on_gpu: bool,
) -> list[float]:
    """Seconds until ``step()`` returns, with nothing queued. Each step finds its gradients at other addresses than the
    one before, as after ``zero_grad()``; they take turns between the sets of ``gradients``."""
    seconds = []
    for i in range(repeats):
        for param, gradient in zip(params, gradients[(i + 1) % len(gradients)], strict=True):
            param.grad = gradient
        _synchronize(on_gpu)
        started = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def event_seconds(step: Callable[[], object], repeats: int) -> list[float]:
    """Between the events after each of ``repeats`` + 2 steps in a row, the first two steps left out."""
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
    for event in events:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events[1:])]


def step_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    times: StepTimes = row.measured
    reference = result.reference.measured
    floor = times.moved / bandwidth
    held, extra = times.held, times.extra
    return [
        f"{times.step * 1e3:.2f}",
        ratio(times.step, reference and reference.step),
        f"{floor * 1e3:.2f}",
        f"{floor / times.step:.0%}",
        f"{times.issue * 1e3:.2f}",
        f"{times.first:.2f}",
        "" if held is None else f"{held / times.parameters:.2f}",
        "" if extra is None else f"{extra / 2**20:.0f}",
    ]


STEP_TABLE = Table(
    columns=(
        "step ms",
        "/ torch fused",
        "floor ms",
        "of the floor's speed",
        "host ms",
        "first step s",
        "state B/param",
        "extra peak MiB",
    ),
    measure=measure_step,
    cells=step_cells,
    legend="Medians. *floor*: the bytes that a step must move, at the speed of the copy. *host*: what `step()` "
    "takes to return, nothing queued, the gradients elsewhere than in the step before. *first step*: in this process, "
    "other rows' compilation before it. *state*: what the optimizer holds, by the allocator. "
    "*extra peak*: what a step holds beyond that.",
)


@benchmark("optimizer_step", "one optimizer step over all weights of a model", table=STEP_TABLE)
def optimizer_step() -> Iterator[Problem]:
    choices = [*lowbit_formats(), *lowbit_options(), torch_fused(), torch_fused(torch.float32)]
    llama = [StepCandidate(choice, LLAMA_1B) for choice in [*choices, *peers()]]
    yield Problem("Llama-3.2-1B, 1.236e9 weights in 146 tensors", llama, REFERENCE)
    for name, shape in (("20 x 50", (20, 50)), ("1,000", (1000,))):
        small = [StepCandidate(c, [shape] * 5000) for c in [*lowbit_formats()[:3], torch_fused()]]
        yield Problem(f"5,000 tensors of {name}", small, REFERENCE)
