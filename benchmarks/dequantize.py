"""int4 and int8 weights to bf16: the kernel, its formula in PyTorch ops, and the formula under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import lowbit_kernels
from benchmarks.cases.dequantize import CASES, Case
from benchmarks.registry import Problem, benchmark, problem_of


def moved_bytes(case: Case) -> int:
    """Each argument read once, the result written once."""
    groups = case.rows * -(-case.size // case.group_size)
    codes = groups * case.group_size * case.bits // 8
    parameters = groups * (case.scale_dtype.itemsize + case.has_zero_point)
    return codes + parameters + case.rows * case.size * case.dtype.itemsize


@benchmark("dequantize", "packed int4 weights and int8 weights, group scales, to bf16")
def dequantize() -> Iterator[Problem]:
    reference = lowbit_kernels.dequantize.reference
    for case in CASES:
        torch.compiler.reset()  # one compilation a shape, however many shapes there are
        if not case.large:
            continue
        runs: dict[str, Callable] = {
            "lowbit": torch.ops.lowbit.dequantize,
            "torch.compile of the formula": torch.compile(reference, fullgraph=True, dynamic=False),
            "formula in PyTorch ops": reference,
        }
        arguments = case.arguments("cuda")
        expected = reference(*arguments)
        for name, run in runs.items():
            torch.testing.assert_close(run(*arguments), expected, msg=f"{name} is wrong")
        del arguments, expected
        yield problem_of(
            f"{case.name} {case.rows} x {case.size}, group {case.group_size}",
            case,
            runs,
            moved_bytes(case),
        )
