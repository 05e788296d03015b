"""float8 products with scales of blocks, against bf16 and torch's float8 products by tensors and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.cases.block_scaled_mm import CASES, Case
from benchmarks.cases.operands import codes_of_normals
from benchmarks.registry import Problem, benchmark
from benchmarks.scaled_mm import TABLE, Product, in_bfloat16, large_by_shape
from lowbit_kernels.matmul.block_scaled_mm import reference

E4M3 = torch.float8_e4m3fn
CHECKED_ROWS = 256


class Run(NamedTuple):
    """A product, and what makes its arguments."""

    run: Callable[..., torch.Tensor]
    arguments: Callable[[], tuple]


def _codes(case: Case) -> tuple[torch.Tensor, ...]:
    return tuple(codes_of_normals((rows, case.k), E4M3, "cuda") for rows in (case.m, case.n))


def _by_tensor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = a.new_ones((), dtype=torch.float32)
    return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _by_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = a.new_ones((a.shape[0], 1), dtype=torch.float32)
    columns = a.new_ones((1, b.shape[0]), dtype=torch.float32)
    return torch._scaled_mm(a, b.T, rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True)


def _check(case: Case) -> None:
    """RuntimeError unless the product is right, on its first rows."""
    a, b, a_scale, b_scale, bias, dtype = case.arguments("cuda")
    found = torch.ops.lowbit.block_scaled_mm(a, b, a_scale, b_scale, bias, dtype)
    rows = slice(CHECKED_ROWS)
    expected = reference(a[rows], b, a_scale[:, rows].contiguous(), b_scale, bias, torch.float32)
    error = (found[rows].float() - expected).norm() / expected.norm()
    if not error < 1e-2:
        raise RuntimeError(f"{case.name} is wrong: {error}")


def _runs(cases: list[Case]) -> dict[str, Run]:
    runs = {}
    for case in cases:
        kind = "groups x tiles" if case.tiles else "groups x groups"
        dtype = str(case.out_dtype).removeprefix("torch.")
        product = Run(torch.ops.lowbit.block_scaled_mm, partial(case.arguments, "cuda"))
        runs[f"lowbit, {kind}, {dtype}"] = product
    first = cases[0]
    runs["torch._scaled_mm, by tensors"] = Run(_by_tensor, partial(_codes, first))
    runs["torch._scaled_mm, by rows"] = Run(_by_row, partial(_codes, first))
    runs["bf16"] = Run(lambda a, b: a @ b.T, partial(in_bfloat16, first))
    return runs


@benchmark(
    "block_scaled_mm", "float8 products with a scale for each 128 along K, to bf16", table=TABLE
)
def block_scaled_mm() -> Iterator[Problem]:
    for (m, n, k), cases in large_by_shape(CASES).items():
        for case in cases:
            _check(case)
        products = []
        for name, (run, arguments) in _runs(cases).items():
            size = 2 if name == "bf16" else 1
            moved = size * (m + n) * k + (4 if "float32" in name else 2) * m * n
            products.append(Product(name, run, arguments, moved, operations=2 * m * n * k))
        yield Problem(f"{cases[0].name} {m} x {n} x {k}", products, reference="bf16")
