"""Which kernel multiplies M tokens by a weight: measured, looked up, never tried out at a user's call.

``python -m benchmarks.write_linear_table`` measures every regime at the shapes of REGIMES on an H200 and writes this
table anew; a shape that isn't in it takes the row of the nearest one.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

Regime = Literal["few", "many", "dequantize", "triton"]

# bits, group (0: one a row), N, K: pairs of the most tokens and the regime up to there; beyond the last: "dequantize".
REGIMES: dict[tuple[int, int, int, int], tuple[tuple[int, Regime], ...]] = {
    (4, 128, 4096, 4096): ((8, "few"), (4096, "many")),
    (4, 128, 14336, 4096): ((16, "few"), (4096, "many")),
    (4, 128, 4096, 14336): ((8, "few"), (4096, "many")),
    (4, 128, 28672, 8192): ((16, "few"), (4096, "many")),
    (4, 128, 1024, 4096): ((8, "few"), (4096, "many")),
    (8, 0, 4096, 4096): ((16, "few"), (4096, "many")),
    (8, 0, 14336, 4096): ((16, "few"), (4096, "many")),
    (8, 0, 4096, 14336): ((8, "few"), (4096, "many")),
    (8, 0, 28672, 8192): ((16, "few"), (4096, "many")),
    (8, 0, 1024, 4096): ((16, "few"), (4096, "many")),
}


@functools.lru_cache(maxsize=65536)
def choose(m: int, n: int, k: int, bits: int, group_size: int) -> Regime:
    """The regime for M tokens by a weight [N, K] of `bits`, with groups of `group_size` (K or more: one a row)."""
    group = 0 if group_size >= k else group_size

    def distance(row: tuple[int, int, int, int]) -> tuple[bool, float, float]:
        """Of other bits; how far in shape; how far in groups."""
        _, its_group, its_n, its_k = row
        shape = abs(math.log2(max(n, 1) / its_n)) + abs(math.log2(max(k, 1) / its_k))
        return row[0] != bits, shape, abs(math.log2((group or k or 1) / (its_group or its_k)))

    return next(
        (regime for most, regime in REGIMES[min(REGIMES, key=distance)] if m <= most), "dequantize"
    )
