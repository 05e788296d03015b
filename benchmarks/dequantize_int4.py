"""Packed int4 weights to bf16: the kernel, its formula in PyTorch ops, and that compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.registry import Candidate, Problem, benchmark
from lowbit_kernels.dequantize_int4 import CASES, Case, reference


def moved_bytes(case: Case) -> int:
    """Each argument read once, the result written once."""
    groups = case.rows * -(-case.size // case.group_size)
    packed = groups * case.group_size // 2
    parameters = groups * (case.scale_dtype.itemsize + case.has_zero_point)
    return packed + parameters + case.rows * case.size * case.dtype.itemsize


@benchmark("dequantize_int4", "packed int4 weights, group scales, to bf16")
def dequantize_int4() -> Iterator[Problem]:
    for case in CASES:
        torch.compiler.reset()  # one shape a compilation, however many there are
        if not case.large:
            continue
        runs: dict[str, Callable] = {
            "lowbit": torch.ops.lowbit.dequantize_int4,
            "torch.compile of the formula": torch.compile(reference, fullgraph=True, dynamic=False),
            "formula in PyTorch ops": reference,
        }
        arguments = case.arguments("cuda")
        expected = reference(*arguments)
        for name, run in runs.items():
            torch.testing.assert_close(run(*arguments), expected, msg=f"{name} is wrong")
        del arguments, expected
        yield Problem(
            f"{case.name} {case.rows} x {case.size}, group {case.group_size}",
            [
                Candidate(name, run, partial(case.arguments, "cuda"), moved_bytes(case))
                for name, run in runs.items()
            ],
        )
