"""One optimizer step over all weights of a model, on a GPU and on a CPU: lowbit's formats and options, torch's fused
AdamW, and the low-bit optimizers of other libraries.

The step time is the time between CUDA events after consecutive steps, issued one after another: the GPU's time where
the host keeps ahead of it, as in a training loop, else the host's. The host's time is also measured alone, with nothing
queued. The floor reads the gradient, and reads and writes the weight and the states in their stored format.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.optimizers import (
    LLAMA_1B,
    REFERENCE,
    OptimizerChoice,
    lowbit_choice,
    lowbit_formats,
    lowbit_options,
    peers,
    random_parameters,
    state_bytes,
    step_seconds,
    synchronize,
    torch_fused,
)
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio

WARM_UP = 2
ODD_SHAPES: list[tuple[int, ...]] = [(4097, 1023)] * 40 + [(333, 777)] * 100 + [(1601,)] * 500
"""Rows of 1023 and 777 elements begin at odd addresses. Tensors of 1601 elements keep float32 states."""
CPU_SHAPES = {
    "100 tensors of 64 x 64": [(64, 64)] * 100,
    "4 tensors of 1024 x 1024": [(1024, 1024)] * 4,
}
CPU_THREADS = (1, 2)
CPU_ROUNDS = 5
"""The best of these rounds counts, as other processes share the machine."""


@dataclass(frozen=True)
class StepCandidate:
    """An optimizer over parameters of these shapes; ``threads`` on a CPU."""

    choice: OptimizerChoice
    shapes: Sequence[tuple[int, ...]]
    device: str = "cuda"
    threads: int = 1

    @property
    def name(self) -> str:
        return self.choice.name


@dataclass(frozen=True)
class StepTimes:
    """Seconds and bytes of one optimizer; the allocator's figures are None on a CPU.

    Attributes:
        step: one step of many, the median.
        issue: the host's part of ``step()``, nothing queued, gradients at new addresses; the median.
        first: the first step, until the device has finished. Another candidate may have compiled for it before.
        moved: the bytes that a step must read and write.
        parameters: elements.
        held: memory that the optimizer holds after its steps.
        extra: memory that a step holds beyond that at its peak.
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
    gc.collect()  # or the memory of earlier candidates may be freed during this measurement
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
        step = statistics.median(step_seconds(optimizer.step, repeats, on_gpu))
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


def first_step_seconds(optimizer: torch.optim.Optimizer, on_gpu: bool) -> float:
    """Seconds of one step, until the device has finished."""
    synchronize(on_gpu)
    started = time.perf_counter()
    optimizer.step()
    synchronize(on_gpu)
    return time.perf_counter() - started


def issue_seconds(
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    gradients: list[list[Tensor]],
    repeats: int,
    on_gpu: bool,
) -> list[float]:
    """Seconds until ``step()`` returns, with nothing queued.

    The steps alternate between the sets of ``gradients``, so each finds its gradients at other addresses than the
    previous one, as after ``zero_grad()``.

    Args:
        optimizer: the optimizer to time.
        params: its parameters.
        gradients: sets of gradients, one gradient a parameter.
        repeats: timed steps.
        on_gpu: True waits for the GPU between the steps.
    """
    seconds = []
    for i in range(repeats):
        for param, gradient in zip(params, gradients[(i + 1) % len(gradients)], strict=True):
            param.grad = gradient
        synchronize(on_gpu)
        started = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds


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
    legend="Medians. *floor*: the bytes that a step must move, at the speed of the copy. *host*: the time until "
    "`step()` returns, nothing queued, the gradients at other addresses than in the previous step. *first step*: in "
    "this process, after the compilation of other rows. *state*: memory of the optimizer, by the allocator. "
    "*extra peak*: memory of a step beyond that.",
)


@benchmark("optimizer_step", "one optimizer step over all weights of a model", table=STEP_TABLE)
def optimizer_step() -> Iterator[Problem]:
    choices = [*lowbit_formats(), *lowbit_options(), torch_fused(), torch_fused(torch.float32)]
    llama = [StepCandidate(choice, LLAMA_1B) for choice in [*choices, *peers()]]
    yield Problem("Llama-3.2-1B, 1.236e9 weights in 146 tensors", llama, REFERENCE)
    for name, shape in (("20 x 50", (20, 50)), ("1,000", (1000,))):
        small = [StepCandidate(c, [shape] * 5000) for c in [*lowbit_formats()[:3], torch_fused()]]
        yield Problem(f"5,000 tensors of {name}", small, REFERENCE)
    for name, shapes in odd_problems().items():
        for dtype in (torch.float16, torch.bfloat16):
            choices = [replace(c, dtype=dtype) for c in [*lowbit_formats()[:3], torch_fused()]]
            odd = [StepCandidate(c, shapes) for c in choices]
            yield Problem(f"{name}, {str(dtype).removeprefix('torch.')}", odd, REFERENCE)


def odd_problems() -> dict[str, list[tuple[int, ...]]]:
    """The odd shapes together, then each alone."""
    together: dict[str, list[tuple[int, ...]]] = {"odd shapes together": ODD_SHAPES}
    for shape in dict.fromkeys(ODD_SHAPES):
        alike = [shape] * ODD_SHAPES.count(shape)
        together[f"{len(alike)} of {' x '.join(map(str, shape))}"] = alike
    return together


def measure_best_step(candidate: StepCandidate, repeats: int) -> StepTimes:
    """The fastest of some rounds, with the first step of the first one."""
    before = torch.get_num_threads()
    torch.set_num_threads(candidate.threads)
    try:
        rounds = [measure_step(candidate, repeats) for _ in range(CPU_ROUNDS)]
    finally:
        torch.set_num_threads(before)
    best = min(rounds, key=lambda times: times.step)
    return replace(best, first=rounds[0].first)


def cpu_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    times: StepTimes = row.measured
    reference = result.reference.measured
    tensors = len(row.candidate.shapes)
    return [
        f"{times.step / tensors * 1e6:.1f}",
        f"{times.step / times.parameters * 1e9:.2f}",
        ratio(times.step, reference and reference.step),
        f"{times.first:.3f}",
    ]


CPU_TABLE = Table(
    columns=("µs a tensor", "ns an element", "/ torch fused", "first step s"),
    measure=measure_best_step,
    cells=cpu_cells,
    legend=f"Medians of a whole step, over the number of tensors; the best of {CPU_ROUNDS} rounds. lowbit's first step "
    "compiles its kernels, unless they are on the disk already.",
)


def cpu_choices() -> list[OptimizerChoice]:
    """The steps with float32 weights, since many CPUs have no instructions for bfloat16."""
    fp32 = [torch_fused(torch.float32)]
    choices = [*lowbit_formats(), lowbit_choice("Lion8bit", "Lion8bit"), *fp32, *peers()]
    return [replace(choice, dtype=torch.float32) for choice in choices]


@benchmark("optimizer_step_cpu", "one optimizer step on a CPU", table=CPU_TABLE, device="cpu")
def optimizer_step_cpu() -> Iterator[Problem]:
    choices = cpu_choices()
    reference = torch_fused(torch.float32).name
    for name, shapes in CPU_SHAPES.items():
        for threads in CPU_THREADS:
            each = [StepCandidate(c, shapes, "cpu", threads) for c in choices]
            label = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            yield Problem(label, each, reference)
