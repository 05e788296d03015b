"""``python -m benchmarks.write_linear_table`` measures every implementation of a weight-only product and rewrites the
table of the fastest, `lowbit_kernels.weight_only.linear_table.REGIMES`. Run it on the GPU that the table is for; it
takes minutes.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases.weight_linear import Case
from benchmarks.registry import Candidate
from benchmarks.timing import measure_over
from benchmarks.weight_linear import LAYERS, ROTATED_BYTES
from lowbit_kernels.weight_only import linear_table
from lowbit_kernels.weight_only.linear_table import Regime
from lowbit_kernels.weight_only.weight_linear import IMPLEMENTATIONS, run
from lowbit_kernels.weight_only.weight_operands import WeightOperands

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUPS = {4: (128,), 8: (0,)}  # 0: one scale a row; other groups take the row of the nearest
SMALL = ((1024, 4096),)
REPEATS = 10

Rows = tuple[tuple[int, Regime], ...]


def thresholds(fastest: Mapping[int, Regime]) -> Rows:
    """Pairs of the largest number of tokens and the regime, for each run of equal fastest regimes.

    Beyond the last pair the table means "dequantize", so a last run of "dequantize" is left out."""
    runs: list[tuple[int, Regime]] = []
    for tokens, regime in sorted(fastest.items()):
        if runs and runs[-1][1] == regime:
            runs.pop()
        runs.append((tokens, regime))
    if runs and runs[-1][1] == "dequantize":
        runs.pop()
    return tuple(runs)


def written(source: str, table: Mapping[tuple[int, int, int, int], Rows]) -> str:
    """The module's source with another table in it."""
    lines = [f"    {key}: {rows},".replace("'", '"') for key, rows in table.items()]
    head = re.search(r"^REGIMES: .* = \{\n", source, re.M)
    assert head, "linear_table has no REGIMES"
    end = source.index("\n}\n", head.end() - 1)
    return source[: head.end()] + "\n".join(lines) + source[end:]


def _regimes(arguments: tuple) -> list[Regime]:
    """The regimes that take the operands; Triton only where neither CUDA kernel does."""
    *tensors, group = arguments
    operands = WeightOperands.of(*tensors, group_size=group)
    found: list[Regime] = ["dequantize"]
    for regime in ("decode", "large_batch"):
        if IMPLEMENTATIONS[regime].product(operands) is not None:
            found.append(regime)
    if len(found) == 1 and IMPLEMENTATIONS["triton"].product(operands) is not None:
        found.append("triton")
    return found


def fastest(bits: int, group: int, n: int, k: int) -> dict[int, Regime]:
    """The fastest regime for each number of tokens.

    Args:
        bits: bits of a weight's code.
        group: inputs that share a scale.
        n: output features.
        k: input features.
    """
    found: dict[int, Regime] = {}
    for m in TOKENS:
        case = Case("", m, n, k, group or k, bits)
        times = {}
        for regime in _regimes(case.arguments("cuda")):
            timed = partial(run, implementation=regime)
            moved = n * k * bits // 8
            one = Candidate(regime, timed, partial(case.arguments, "cuda"), moved)
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
