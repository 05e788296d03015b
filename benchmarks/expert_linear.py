"""Tokens times the experts that a router chose: Qwen3-30B-A3B's gate and up, and its down, beside bf16.

The bf16 peers are what transformers does: for few tokens it gathers the chosen experts and multiplies them
("batched_mm"), for many it sorts the tokens and calls torch's grouped product ("grouped_mm").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.expert_linear import Case
from benchmarks.registry import Candidate, Problem, benchmark
from lowbit_kernels.composed.expert_linear import expert_linear, reference

EXPERTS, TOP, HIDDEN, INNER = 128, 8, 2048, 768
FORMATS = {
    "int4": "lowbit, int4 g128",
    "mxfp4": "lowbit, mxfp4",
    "int8": "lowbit, int8",
    "float8_e4m3fn": "lowbit, float8",
}
BITS = {"int4": 4.125, "mxfp4": 4.25, "int8": 8.0, "float8_e4m3fn": 8.0, "bf16": 16.0}
FEW = 64
"""The most tokens for which transformers gathers experts."""


def _case(format: str, up: bool, tokens: int) -> Case:
    n, k = (2 * INNER, HIDDEN) if up else (HIDDEN, INNER)
    return Case("", EXPERTS, n, k, tokens, TOP, format, gated=up, per_pair=not up)


def run_lowbit(x, codes, scale, zero, ids, bias, group, gated, global_scale, bits, table) -> Tensor:
    return expert_linear(
        *(x, codes, scale, zero, ids, bias),
        group_size=group,
        gated=gated,
        global_scale=global_scale,
        bits=bits,
        table=table,
    )


def _bf16(case: Case) -> tuple:
    x, *_, ids, _, _, gated, _, _, _ = case.arguments("cuda")
    shape = case.experts, case.n, case.k
    return x, torch.randn(shape, dtype=torch.bfloat16, device="cuda"), ids, gated


def _gated(y: Tensor, gated: bool) -> Tensor:
    if not gated:
        return y
    gate, up = y.chunk(2, 1)
    return F.silu(gate) * up


def batched_mm(x: Tensor, weight: Tensor, ids: Tensor, gated: bool) -> Tensor:
    """As transformers' forward of this name."""
    rows = x.repeat_interleave(len(ids) // len(x), 0)
    return _gated(torch.bmm(weight[ids], rows.unsqueeze(-1)).squeeze(-1), gated)


def grouped_mm(x: Tensor, weight: Tensor, ids: Tensor, gated: bool) -> Tensor:
    """As transformers' forward of this name, without the way back to the order of tokens."""
    chosen, order = torch.sort(ids)
    rows = x[order // (len(ids) // len(x))]
    counts = torch.histc(chosen.int(), bins=len(weight), min=0, max=len(weight) - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    return _gated(torch._grouped_mm(rows, weight.mT, offs=ends), gated)


def check(case: Case) -> None:
    """AssertionError unless some results are right."""
    x, codes, scale, zero, ids, *rest = case.arguments("cuda")
    found = run_lowbit(x, codes, scale, zero, ids, *rest)
    some = torch.arange(0, len(ids), max(1, len(ids) // 16), device="cuda")
    rows = x[some // (len(ids) // len(x))]
    expected = reference(rows, codes, scale, zero, ids[some], *rest).double()
    error = (found[some].double() - expected).norm() / expected.norm()
    assert error < 4e-3, f"{case}: {error}"  # both are rounded


def _used(tokens: int) -> float:
    """Experts that random tokens choose, on average."""
    return EXPERTS * (1 - (1 - TOP / EXPERTS) ** tokens)


@benchmark("expert_linear", "tokens times the experts that a router chose")
def expert_linears() -> Iterator[Problem]:
    for up in (True, False):
        for tokens in (1, 16, FEW, 256, 2048):
            candidates: list[Candidate] = []
            peer = batched_mm if tokens <= FEW else grouped_mm
            ways: list[tuple[str, str, Callable[..., Any], Callable[..., tuple]]] = [
                (name, format, run_lowbit, partial(_case(format, up, tokens).arguments, "cuda"))
                for format, name in FORMATS.items()
            ]
            case = _case("int4", up, tokens)
            ways.append((f"bf16, {peer.__name__}", "bf16", peer, partial(_bf16, case)))
            for name, format, run, arguments in ways:
                if format in FORMATS:
                    check(_case(format, up, tokens))
                weights = _used(tokens) * case.n * case.k * BITS[format] / 8
                columns = case.k + (case.n // 2 if up else case.n)
                moved = int(weights) + 2 * tokens * TOP * columns
                candidates.append(Candidate(name, run, arguments, moved))
            name = "gate and up" if up else "down"
            yield Problem(f"{name}, {tokens} tokens", candidates)
