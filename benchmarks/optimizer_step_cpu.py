"""One optimizer step on the processor: lowbit's formats, torch's fused AdamW, and the other low-bit ones.

float32 weights: many processors have no instructions for bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.optimizer_step import StepCandidate, StepTimes, measure_step
from benchmarks.optimizers import OptimizerChoice, lowbit_choice, lowbit_formats, peers, torch_fused
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio

SHAPES = {
    "100 tensors of 64 x 64": [(64, 64)] * 100,
    "4 tensors of 1024 x 1024": [(1024, 1024)] * 4,
}
THREADS = (1, 2)
ROUNDS = 5  # of the repeats: other processes share the machine


@dataclass(frozen=True)
class ThreadsCandidate(StepCandidate):
    """An optimizer on so many threads."""

    threads: int = 1


def measure_best_step(candidate: ThreadsCandidate, repeats: int) -> StepTimes:
    """The fastest of some rounds; but the first step is that of the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(candidate.threads)
    try:
        rounds = [measure_step(candidate, repeats) for _ in range(ROUNDS)]
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
    legend=f"Medians of a whole step, over the number of tensors; the best of {ROUNDS} rounds. lowbit's first step "
    "compiles its kernels, unless they are on the disk already.",
)


def cpu_choices() -> list[OptimizerChoice]:
    fp32 = [torch_fused(torch.float32)]
    choices = [*lowbit_formats(), lowbit_choice("Lion8bit", "Lion8bit"), *fp32, *peers()]
    return [replace(choice, dtype=torch.float32) for choice in choices]


@benchmark(
    "optimizer_step_cpu", "one optimizer step on the processor", table=CPU_TABLE, device="cpu"
)
def optimizer_step_cpu() -> Iterator[Problem]:
    choices = cpu_choices()
    reference = torch_fused(torch.float32).name
    for name, shapes in SHAPES.items():
        for threads in THREADS:
            each = [ThreadsCandidate(c, shapes, "cpu", threads) for c in choices]
            label = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            yield Problem(label, each, reference)
