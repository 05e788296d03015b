"""int4 weights with a scale a group to int8 codes with a scale a row, as int8 products in training read them, against
values in bf16 that are written, read and rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.cases.int4_to_int8 import CASES, Case
from benchmarks.registry import Problem, benchmark, problem_of
from lowbit_kernels.quantize.int4_to_int8 import int4_to_int8 as convert
from lowbit_kernels.quantize.int4_to_int8 import reference
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from lowbit_kernels.weight_only.dequantize import dequantize


def moved_bytes(case: Case) -> int:
    """Two codes a byte and the scales of groups read; int8 codes and the scales of rows written."""
    groups = -(-case.size // case.group_size)
    return case.rows * (case.size // 2 + 4 * groups + case.size + 4)


def in_one_kernel(codes: Tensor, scale: Tensor, group_size: int, size: int) -> tuple[Tensor, ...]:
    return convert(codes, scale, group_size=group_size, size=size)


def by_way_of_bf16(codes: Tensor, scale: Tensor, group_size: int, size: int) -> tuple[Tensor, ...]:
    values = dequantize(codes, scale, group_size=group_size, size=size, dtype=torch.bfloat16)
    return quantize_rowcol(values, "int8", columns=False)[:2]


@benchmark("int4_to_int8", "int4 weights to int8 codes with a scale a row")
def int4_to_int8() -> Iterator[Problem]:
    runs: dict[str, Callable] = {"lowbit": in_one_kernel, "dequantized to bf16": by_way_of_bf16}
    for case in CASES:
        if not case.large:
            continue
        arguments = case.arguments("cuda")
        for got, want in zip(in_one_kernel(*arguments), reference(*arguments, None), strict=True):
            assert torch.equal(got.nan_to_num(-1.0), want.nan_to_num(-1.0)), "lowbit is wrong"
        del arguments
        yield problem_of(f"{case.name} {case.rows} x {case.size}", case, runs, moved_bytes(case))
