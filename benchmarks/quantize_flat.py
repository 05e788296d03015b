"""Activations rounded to int8 for the backward pass, and read back, against PyTorch ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.cases.quantize_flat import CASES, Case
from benchmarks.registry import Candidate, Problem, benchmark
from lowbit_kernels.quantize import quantize_flat as ops


def moved_bytes(case: Case) -> int:
    """16-bit values read and codes written, or the other way round, with a scale for each 128."""
    return case.count * 3 + case.count // 64


@benchmark("quantize_flat", "activations to int8 and back, a scale for each 128 elements")
def quantize_flat() -> Iterator[Problem]:
    for case in CASES:
        if not case.large:
            continue
        (x,) = case.arguments("cuda")
        codes = ops.quantize_flat(x)
        for got, want in zip(codes, ops.quantize_flat.reference(x), strict=True):
            assert torch.equal(got, want), "lowbit is wrong"
        runs: dict[str, tuple[Callable, Callable, tuple]] = {
            "rounded": (ops.quantize_flat, ops.quantize_flat.reference, (x,)),
            "read": (ops.dequantize_flat, ops.dequantize_flat.reference, (*codes, case.count)),
        }
        for name, (kernel, formula, arguments) in runs.items():
            sides = {"lowbit": kernel, "formula in PyTorch ops": formula}
            made = partial(tuple, arguments)
            candidates = [Candidate(n, run, made, moved_bytes(case)) for n, run in sides.items()]
            yield Problem(f"{case.name} {name}", candidates)
