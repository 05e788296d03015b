"""Quantization in blocks of 128, along rows and, transposed, along columns, against the formula in PyTorch ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.cases.quantize_blocks import CASES, Case
from benchmarks.registry import Problem, benchmark, problem_of
from lowbit_kernels.quantize.quantize_blocks import reference
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol


def moved_bytes(case: Case) -> int:
    """x read once, codes written; scales are a hundredth."""
    return case.m * case.k * (case.dtype.itemsize + case.rows + case.columns)


def _by_rows(x, tiles, rows, columns, power_of_two, offsets) -> tuple:
    return quantize_rowcol(x, "e4m3", rows=rows, columns=columns)


@benchmark("quantize_blocks", "bf16 matrices to float8 in blocks, and transposed")
def quantize_blocks() -> Iterator[Problem]:
    for case in CASES:
        if not case.large:
            continue
        runs: dict[str, Callable[..., tuple]] = {
            "lowbit": torch.ops.lowbit.quantize_blocks,
            "lowbit, scales of rows and columns": _by_rows,
            "formula in PyTorch ops": reference,
        }
        arguments = case.arguments("cuda")
        for found, want in zip(runs["lowbit"](*arguments), reference(*arguments), strict=True):
            assert torch.equal(found.float(), want.float()), f"{case.name} is wrong"
        del arguments, found, want
        yield problem_of(f"{case.name} {case.m} x {case.k}", case, runs, moved_bytes(case))
