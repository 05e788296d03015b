"""``python -m benchmarks.write_linear_table``: measures every way of a weight-only product, and writes the table of the
fastest anew, `lowbit_kernels.linear_table.REGIMES`. On the GPU that the table is for; it takes some minutes.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.registry import Candidate
from benchmarks.timing import measure_over
from benchmarks.weight_linear import LAYERS, ROTATED_BYTES
from lowbit_kernels import linear_table, weight_mm_few, weight_mm_many, weight_mm_triton
from lowbit_kernels.linear_table import Regime
from lowbit_kernels.weight_linear import Case, _linear

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUPS = {4: (128,), 8: (0,)}  # 0: one a row; the nearest serves for others
SMALL = ((1024, 4096),)
REPEATS = 10

Rows = tuple[tuple[int, Regime], ...]


def thresholds(fastest: Mapping[int, Regime]) -> Rows:
    """The fastest regime by numbers of tokens, as the most tokens of each run of equal ones. The last run, which has no
    end, must be "dequantize": where it isn't, the table ends with what was measured."""
    runs: list[tuple[int, Regime]] = []
    for tokens, regime in sorted(fastest.items()):
        if runs and runs[-1][1] == regime:
            runs.pop()
        runs.append((tokens, regime))
    if runs and runs[-1][1] == "dequantize":
        runs.pop()
    return tuple(runs)


def written(source: str, table: Mapping[tuple[int, int, int, int], Rows]) -> str:
    """The module's source with another table."""
    lines = [f"    {key}: {rows},".replace("'", '"') for key, rows in table.items()]
    head = re.search(r"^REGIMES: .* = \{\n", source, re.M)
    assert head, "linear_table has no REGIMES"
    end = source.index("\n}\n", head.end() - 1)
    return source[: head.end()] + "\n".join(lines) + source[end:]


def _regimes(m: int, arguments: tuple, bits: int) -> list[Regime]:
    """Those that take it; Triton's only where neither CUDA kernel does."""
    x, codes, scale, *_, group = arguments
    found: list[Regime] = ["dequantize"]
    if m <= 16 and weight_mm_few.is_available(x, codes, scale, bits=bits, group_size=group):
        found.append("few")
    if weight_mm_many.is_available(x, codes, scale, bits=bits, group_size=group):
        found.append("many")
    if len(found) == 1 and m <= weight_mm_triton.MOST_TOKENS:
        found.append("triton")
    return found


def fastest(bits: int, group: int, n: int, k: int) -> dict[int, Regime]:
    """By numbers of tokens."""
    found: dict[int, Regime] = {}
    for m in TOKENS:
        case = Case("", m, n, k, group or k, bits)
        times = {}
        for regime in _regimes(m, case.arguments("cuda"), bits):
            run = partial(_linear, bits=bits, regime=regime)
            moved = n * k * bits // 8
            one = Candidate(regime, run, partial(case.arguments, "cuda"), moved)
            times[regime] = measure_over(one, -(-ROTATED_BYTES // moved), REPEATS).median
        found[m] = min(times, key=lambda regime: times[regime])
        shown = ", ".join(f"{regime} {1e6 * t:.1f}" for regime, t in times.items())
        print(f"{bits} bits, group {group}, {n} x {k}, {m} tokens: {shown} us", flush=True)
    return found


def main() -> int:
    if not torch.cuda.is_available():
        print("The table is measured on a CUDA device; there is none here.", file=sys.stderr)
        return 1
    table = {}
    for bits, groups in GROUPS.items():
        for group, (n, k) in itertools.product(groups, (*LAYERS, *SMALL)):
            table[bits, group, n, k] = thresholds(fastest(bits, group, n, k))
    file = Path(linear_table.__file__)
    file.write_text(written(file.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
