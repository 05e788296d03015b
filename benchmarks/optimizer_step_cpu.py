"""One optimizer step on the processor: lowbit's formats, torch's fused AdamW, and the other low-bit ones.

float32 weights: many processors have no instructions for bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.optimizer_step import StepCandidate, StepTimes, measure_step
from benchmarks.optimizers import OptimizerChoice, lowbit_choice, lowbit_formats, peers, torch_fused
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio

SHAPES = {
    "100 tensors of 64 x 64": [(64, 64)] * 100,
    "4 tensors of 1024 x 1024": [(1024, 1024)] * 4,
}


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
    measure=measure_step,
    cells=cpu_cells,
    legend="Medians of a whole step, over the number of tensors.",
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
        yield Problem(name, [StepCandidate(c, shapes, "cpu") for c in choices], reference)
