"""Quantization along rows and columns in one call, beside the formula in PyTorch ops, compiled and plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.registry import Candidate, Problem, benchmark
from lowbit_kernels import quantize_rowcol_triton
from lowbit_kernels.quantize_rowcol import CASES, Case, allocate, reference


def moved_bytes(case: Case) -> int:
    """x read once, codes and scales written once."""
    elements = case.m * case.k
    return (
        elements * (case.dtype.itemsize + case.rows + case.columns)
        + 4 * case.m * case.rows
        + 4 * case.k * case.columns
    )


def _in_triton(x, format, rows, columns, tensorwise, seed) -> tuple:
    out = allocate(x, format, rows, columns, tensorwise)
    quantize_rowcol_triton.quantize(x, format, rows, columns, tensorwise, seed, out)
    return out


@benchmark("quantize_rowcol", "bf16 matrices to int8 along rows and, transposed, along columns")
def quantize_rowcol() -> Iterator[Problem]:
    for case in CASES:
        torch.compiler.reset()  # one shape a compilation, however many there are
        if not case.large:
            continue
        compiled = torch.compile(reference, fullgraph=True, dynamic=False)
        runs: dict[str, Callable] = {
            "lowbit": torch.ops.lowbit.quantize_rowcol,
            "lowbit in Triton": _in_triton,
            "torch.compile of the formula": compiled,
            "formula in PyTorch ops": reference,
        }
        arguments = case.arguments("cuda")
        expected = reference(*arguments)
        for name, run in runs.items():
            for got, want in zip(run(*arguments), expected, strict=True):
                far = (got.float() - want.float()).abs() > want.float().abs() * 1e-5
                # compiled code divides approximately, so that a tie may fall to the other side
                assert far.float().mean() < 1e-3, f"{name} is wrong"
        del arguments, expected
        yield Problem(
            f"{case.name} {case.m} x {case.k}",
            [
                Candidate(name, run, partial(case.arguments, "cuda"), moved_bytes(case))
                for name, run in runs.items()
            ],
        )
