"""Weights in every format to bf16: the kernel, its formula in PyTorch ops, and the formula under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import lowbit_kernels
from benchmarks.cases.dequantize import CASES, Case
from benchmarks.cases.formats import FORMATS, Format
from benchmarks.registry import Problem, benchmark, problem_of

SHAPES_OF_FORMATS = ((14336, 4096), (4096, 4096))


@dataclass(frozen=True)
class FormatCase:
    """A weight in a format, in the group size in which models have it."""

    format: Format
    rows: int
    size: int

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """All arguments of the op, by position."""
        weight = self.format.weight(self.rows, self.size, device=device)
        tensors = (weight["codes"], weight["scale"], weight["zero_point"])
        last = (weight["global_scale"], weight["bits"], weight["table"])
        return (*tensors, weight["group_size"], self.size, torch.bfloat16, *last)

    def moved_bytes(self) -> int:
        """Each argument read once, the result written once."""
        one = self.format.weight(1, self.size)
        tensors = (one["codes"], one["scale"], one["zero_point"])
        row = sum(t.nbytes for t in tensors if t is not None)
        return self.rows * (row + self.size * torch.bfloat16.itemsize)


def moved_bytes(case: Case) -> int:
    """Each argument read once, the result written once."""
    groups = case.rows * -(-case.size // case.group_size)
    codes = groups * case.group_size * case.bits // 8
    parameters = groups * (case.scale_dtype.itemsize + case.has_zero_point)
    return codes + parameters + case.rows * case.size * case.dtype.itemsize


def compared(name: str, case: Case | FormatCase, moved: int) -> Problem:
    """The implementations on one weight, after a comparison of their results."""
    reference = lowbit_kernels.dequantize.reference
    torch.compiler.reset()  # one compilation a shape, however many shapes there are
    runs: dict[str, Callable] = {
        "lowbit": torch.ops.lowbit.dequantize,
        "torch.compile of the formula": torch.compile(reference, fullgraph=True, dynamic=False),
        "formula in PyTorch ops": reference,
    }
    arguments = case.arguments("cuda")
    expected = reference(*arguments)
    for candidate, run in runs.items():
        torch.testing.assert_close(run(*arguments), expected, msg=f"{candidate} is wrong")
    return problem_of(name, case, runs, moved)


@benchmark("dequantize", "weights in every format to bf16")
def dequantize() -> Iterator[Problem]:
    for case in CASES:
        if case.large:
            name = f"{case.name} {case.rows} x {case.size}, group {case.group_size}"
            yield compared(name, case, moved_bytes(case))
    for rows, size in SHAPES_OF_FORMATS:
        for format in FORMATS:
            of_format = FormatCase(format, rows, size)
            name = f"{format.name} {rows} x {size}, group {format.group_size or size}"
            yield compared(name, of_format, of_format.moved_bytes())
