"""float32 rows rounded stochastically to int8, as int8 weights are after a step, against PyTorch ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.cases.round_rows import CASES, Case
from benchmarks.registry import Problem, benchmark, problem_of
from lowbit_kernels.quantize.round_rows import reference


def moved_bytes(case: Case) -> int:
    """Values read, codes written; for each row the old scale, the new scale and the random-number offset."""
    return case.rows * (case.columns * 4 + case.columns // (2 if case.packed else 1) + 16)


@benchmark("round_rows", "float32 rows to int8, stochastically")
def round_rows() -> Iterator[Problem]:
    runs: dict[str, Callable] = {
        "lowbit": torch.ops.lowbit.round_rows,
        "formula in PyTorch ops": reference,
    }
    for case in CASES:
        if not case.large:
            continue
        arguments = case.arguments("cuda")
        for got, want in zip(runs["lowbit"](*arguments), reference(*arguments), strict=True):
            assert torch.equal(got.nan_to_num(-1.0), want.nan_to_num(-1.0)), "lowbit is wrong"
        del arguments
        yield problem_of(f"{case.name} {case.rows} x {case.columns}", case, runs, moved_bytes(case))
