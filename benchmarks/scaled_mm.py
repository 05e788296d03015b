"""Scaled products of int8 and float8 matrices, against bf16 and torch's own, at the shapes of Llama 3 8B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.cases.operands import codes_of_normals
from benchmarks.cases.scaled_mm import CASES, Case
from benchmarks.registry import Candidate, Problem, Result, Row, Table, benchmark
from benchmarks.report import readable
from benchmarks.timing import measure
from lowbit_kernels.matmul import int8_mm_triton
from lowbit_kernels.matmul.scaled_mm import _float8_by_cublas, reference
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol

LAYOUTS = {  # for each operand: True if the product sums over its rows in memory, and so takes the transposed copy
    "NT after quantize_rowcol": (False, False),
    "NN after quantize_rowcol": (False, True),
    "TN after quantize_rowcol": (True, True),
}


@dataclass(frozen=True)
class Product(Candidate):
    """``operations``: multiplications and additions."""

    operations: int = 0


def _cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    seconds, bf16 = row.measured.median, result.reference
    speed = f"{row.candidate.operations / seconds / 1e12:.0f}"
    if bf16.measured is None:
        return [readable(seconds), speed, "", ""]
    ratio = bf16.measured.median / seconds
    # 8-bit units multiply twice as fast as 16-bit units; and each matrix must be read or written once
    floor = max(bf16.measured.median / 2, row.candidate.moved_bytes / bandwidth)
    return [readable(seconds), speed, f"{ratio:.2f}x", f"{seconds / floor:.2f}"]


TABLE = Table(
    columns=("time", "TFLOP/s or TOPS", "speed / bf16", "time / floor"),
    measure=measure,
    cells=_cells,
    legend="Medians. *speed / bf16*: relative to bf16 in the same run. *floor*: half of bf16's time, since 8-bit units "
    "multiply twice as fast, or the time to move each matrix once at the speed of the copy, if longer.",
)


def in_bfloat16(case: Any) -> tuple[torch.Tensor, ...]:
    """Operands [m, k] and [n, k] of a case."""
    return tuple(
        torch.randn(rows, case.k, dtype=torch.bfloat16, device="cuda") for rows in (case.m, case.n)
    )


def large_by_shape(cases: Iterable[Any]) -> dict[tuple[int, int, int], list[Any]]:
    """The large cases by (m, n, k)."""
    shapes: dict[tuple[int, int, int], list[Any]] = {}
    for case in cases:
        if case.large:
            shapes.setdefault((case.m, case.n, case.k), []).append(case)
    return shapes


def _quantized(case: Case) -> tuple:
    """Codes like those of normal numbers, with the case's scales."""
    _, _, a_scale, b_scale, *_ = case.arguments("cuda")
    shapes = (case.m, case.k), (case.n, case.k)
    return (
        *(codes_of_normals(s, case.a_dtype, "cuda") for s in shapes),
        a_scale,
        b_scale,
        None,
        torch.bfloat16,
    )


def _after_quantizing(case: Case, transposed: tuple[bool, bool]) -> tuple:
    """Operands as quantize_rowcol writes them; for a `transposed` one, [K, rows] in memory, the transposed copy."""
    operands = []
    for rows, is_transposed in zip((case.m, case.n), transposed, strict=True):
        shape = (case.k, rows) if is_transposed else (rows, case.k)
        x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        codes, scale, codes_t, scale_t = quantize_rowcol(
            x, "int8", rows=not is_transposed, columns=is_transposed
        )
        operands.append((codes_t, scale_t) if is_transposed else (codes, scale))
    (a, a_scale), (b, b_scale) = operands
    return a, b, a_scale, b_scale, None, torch.bfloat16


def _int_mm(a, b, a_scale, b_scale, bias, out_dtype) -> torch.Tensor:
    return (torch._int_mm(a, b.T) * a_scale[:, None] * b_scale).to(out_dtype)


def _rowwise(a, b, a_scale, b_scale, bias, out_dtype) -> torch.Tensor:
    return torch._scaled_mm(
        a, b.T, a_scale[:, None], b_scale[None], out_dtype=out_dtype, use_fast_accum=True
    )


def _runs(case: Case) -> dict[str, Callable]:
    if case.a_dtype != torch.int8:
        return {
            "lowbit, float8": torch.ops.lowbit.scaled_mm,
            "lowbit by cuBLAS, float8": _float8_by_cublas,
            "torch._scaled_mm, float8 by rows": _rowwise,
        }
    return {
        "lowbit, int8": torch.ops.lowbit.scaled_mm,
        "lowbit in Triton, int8": int8_mm_triton.int8_mm,
        "torch._int_mm": lambda a, b, *rest: torch._int_mm(a, b.T),
        "torch._int_mm and scales": _int_mm,
    }


def _products(case: Case) -> list[Product]:
    """The products of one shape and format, after a comparison with the reference."""
    runs, arguments = _runs(case), _quantized(case)
    expected = reference(*arguments).float()
    for name, run in runs.items():
        if name != "torch._int_mm":  # it has no scales
            error = (run(*arguments).float() - expected).norm() / expected.norm()
            assert error < 1e-2, f"{name} is wrong: {error}"
    make = {name: (run, partial(_quantized, case)) for name, run in runs.items()}
    if case.name == "8192-cubed":
        for layout, transposed in LAYOUTS.items():
            quantized = partial(_after_quantizing, case, transposed)
            make[f"lowbit, int8, {layout}"] = (runs["lowbit, int8"], quantized)
    operations = 2 * case.m * case.n * case.k
    moved = (case.m + case.n) * case.k + case.m * case.n * 2
    return [
        Product(name, run, arguments, moved, operations=operations)
        for name, (run, arguments) in make.items()
    ]


@benchmark("scaled_mm", "scaled products of int8 and float8 matrices, to bf16", table=TABLE)
def scaled_mm() -> Iterator[Problem]:
    for (m, n, k), cases in large_by_shape(CASES).items():
        products = [product for case in cases for product in _products(case)]
        plain = Product(
            "bf16",
            lambda a, b: a @ b.T,
            partial(in_bfloat16, cases[0]),
            2 * ((m + n) * k + m * n),
            operations=2 * m * n * k,
        )
        yield Problem(f"{cases[0].name} {m} x {n} x {k}", [*products, plain], reference="bf16")
