"""Few int8 rows times a matrix of 2 bits an element, against int8 and bf16 matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.cases.ternary_mm import CASES, Case
from benchmarks.registry import Candidate, Problem, benchmark
from lowbit_kernels.matmul.ternary_mm import reference


def _ternary(case: Case) -> tuple:
    return case.arguments("cuda")


def _int8(case: Case) -> tuple:
    a, _, a_scale, b_scale, bias, out_dtype = case.arguments("cuda")
    codes = torch.randint(-1, 2, (case.n, a.shape[1]), dtype=torch.int8, device="cuda")
    return a, codes, a_scale, b_scale, bias, out_dtype


def _bf16(case: Case) -> tuple:
    shapes = (case.m, case.k), (case.n, case.k)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    return a, b, case.arguments("cuda")[4]


@benchmark("ternary_mm", "few int8 rows times a ternary matrix of 2 bits an element")
def ternary_mm() -> Iterator[Problem]:
    for case in CASES:
        if not case.large:
            continue
        arguments = case.arguments("cuda")
        expected = reference(*arguments).float()
        error = (torch.ops.lowbit.ternary_mm(*arguments).float() - expected).norm()
        assert error < 1e-2 * expected.norm(), f"lowbit is wrong: {error}"
        del arguments, expected
        # function, arguments, bits of an element of the weight, bits of an element of a
        ways: dict[str, tuple[Callable, Callable[[Case], tuple], int, int]] = {
            "lowbit": (torch.ops.lowbit.ternary_mm, _ternary, 2, 8),
            "lowbit, int8 weights": (torch.ops.lowbit.scaled_mm, _int8, 8, 8),
            "bf16": (torch.nn.functional.linear, _bf16, 16, 16),
        }
        yield Problem(
            f"{case.name} {case.m} x {case.n} x {case.k}",
            [
                Candidate(
                    name,
                    run,
                    partial(arguments, case),
                    case.k * (case.n * weight + case.m * row) // 8 + 2 * case.m * case.n,
                )
                for name, (run, arguments, weight, row) in ways.items()
            ],
        )
