"""Quantization along rows and columns in one call, against the formula in PyTorch ops, compiled and plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.cases.quantize_rowcol import CASES, Case
from benchmarks.registry import Candidate, Problem, Result, Row, Table, benchmark
from benchmarks.report import readable
from benchmarks.timing import measure
from lowbit_kernels.quantize import quantize_rowcol_triton
from lowbit_kernels.quantize.quantize_rowcol import allocate, reference

WITH_PYTORCH = (
    "llama-8b-attention"  # only one shape, since compiling takes as long as all other measurements
)


@dataclass(frozen=True)
class Quantization(Candidate):
    """``read_again``: the bytes of x if x is read twice, else 0."""

    read_again: int = 0


def moved_bytes(case: Case) -> int:
    """x read once, codes and scales written once."""
    elements = case.m * case.k
    return (
        elements * (case.dtype.itemsize + case.rows + case.columns)
        + 4 * case.m * case.rows
        + 4 * case.k * case.columns
    )


def _cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    candidate, seconds, lowbit = row.candidate, row.measured.median, result.reference
    once, twice = candidate.moved_bytes, candidate.moved_bytes + candidate.read_again
    is_peer = row is not lowbit and lowbit.measured is not None
    return [
        readable(seconds),
        f"{readable(row.measured.low)} .. {readable(row.measured.high)}",
        f"{once / 1e6:.1f} MB",
        f"{once / seconds / bandwidth:.0%}",
        f"{twice / seconds / bandwidth:.0%}",
        f"{seconds / lowbit.measured.median:.2f}x" if is_peer else "",
    ]


TABLE = Table(
    columns=("time", "middle half", "once", "of the copy's speed", "with two reads", "lowbit is"),
    measure=measure,
    cells=_cells,
    legend="Medians; *middle half*: between the quartiles. *once*: the bytes if x is read once, codes and scales "
    "written. *of the copy's speed*: with those bytes. *with two reads*: with x counted twice, since no scale of a "
    "column is known before all of x is read; rows alone take one read. *lowbit is*: how many times faster lowbit is "
    "than this peer.",
)


def _in_triton(x, format, rows, columns, tensorwise, seed, row_factor, row_scales) -> tuple:
    out = allocate(x, format, rows, columns, tensorwise, row_scales)
    options = rows, columns, tensorwise, seed, row_factor, row_scales
    quantize_rowcol_triton.quantize(x, format, *options, out)
    return out


def _runs(case: Case) -> dict[str, Callable]:
    runs: dict[str, Callable] = {
        "lowbit": torch.ops.lowbit.quantize_rowcol,
        "lowbit in Triton": _in_triton,
    }
    if case.name == WITH_PYTORCH:
        compiled = torch.compile(reference, fullgraph=True, dynamic=False)
        runs |= {"torch.compile of the formula": compiled, "formula in PyTorch ops": reference}
    return runs


@benchmark(
    "quantize_rowcol",
    "bf16 matrices to int8 along rows and, transposed, along columns",
    table=TABLE,
)
def quantize_rowcol() -> Iterator[Problem]:
    for case in CASES:
        if not case.large:
            continue
        runs = _runs(case)
        arguments = case.arguments("cuda")
        expected = reference(*arguments)
        for name, run in runs.items():
            for got, want in zip(run(*arguments), expected, strict=True):
                far = (got.float() - want.float()).abs() > want.float().abs() * 1e-5
                # Compiled code divides approximately, so a tie may round to the other side.
                assert far.sum() <= far.numel() * 1e-3, f"{name} is wrong"
        del arguments, expected
        again = case.m * case.k * case.dtype.itemsize if case.columns else 0
        yield Problem(
            f"{case.name} {case.m} x {case.k}",
            [
                Quantization(
                    *(name, run, partial(case.arguments, "cuda"), moved_bytes(case)),
                    read_again=again,
                )
                for name, run in runs.items()
            ],
        )
