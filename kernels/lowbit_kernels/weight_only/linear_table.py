"""The fastest implementation of a weight-only product by shape: measured before, never tuned during a user's call.

``python -m benchmarks.write_linear_table`` measures every regime at the shapes of REGIMES on an H200 and rewrites this
table. A shape that the table lacks takes the row of the nearest shape.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

Regime = Literal["decode", "large_batch", "dequantize", "triton"]

# bits, group (0: one scale a row), N, K: pairs of a number of tokens and the regime up to it. More: "dequantize".
REGIMES: dict[tuple[int, int, int, int], tuple[tuple[int, Regime], ...]] = {
    (4, 128, 4096, 4096): ((8, "decode"), (4096, "large_batch")),
    (4, 128, 14336, 4096): ((16, "decode"), (4096, "large_batch")),
    (4, 128, 4096, 14336): ((8, "decode"), (4096, "large_batch")),
    (4, 128, 28672, 8192): ((16, "decode"), (4096, "large_batch")),
    (4, 128, 1024, 4096): ((8, "decode"), (4096, "large_batch")),
    (8, 0, 4096, 4096): ((16, "decode"), (4096, "large_batch")),
    (8, 0, 14336, 4096): ((16, "decode"), (4096, "large_batch")),
    (8, 0, 4096, 14336): ((8, "decode"), (4096, "large_batch")),
    (8, 0, 28672, 8192): ((16, "decode"), (4096, "large_batch")),
    (8, 0, 1024, 4096): ((16, "decode"), (4096, "large_batch")),
}
MOST_TOKENS_OF_MXFP8 = 2048  # for the large-batch kernel


@functools.lru_cache(maxsize=65536)
def choose(m: int, n: int, k: int, bits: int, group_size: int, is_mxfp8: bool = False) -> Regime:
    """The regime for M tokens and a weight [N, K] of `bits`, in groups of `group_size` (K or more: one scale a row).

    Fewer than 4 bits take the rows of 4, other numbers of bits those of 8. On an H200 the large-batch kernel is faster
    than a dequantized weight from 17 to 4,096 tokens, for every format that it takes but MXFP8, which takes longest to
    unpack: to `MOST_TOKENS_OF_MXFP8`. float8 with floating scales of groups was not timed.
    """
    if is_mxfp8 and m > MOST_TOKENS_OF_MXFP8:
        return "dequantize"
    group, bits = 0 if group_size >= k else group_size, 4 if bits <= 4 else 8

    def distance(row: tuple[int, int, int, int]) -> tuple[bool, float, float]:
        """True if the bits differ, then the distance of shapes, then that of groups."""
        _, its_group, its_n, its_k = row
        shape = abs(math.log2(max(n, 1) / its_n)) + abs(math.log2(max(k, 1) / its_k))
        return row[0] != bits, shape, abs(math.log2((group or k or 1) / (its_group or its_k)))

    return next(
        (regime for most, regime in REGIMES[min(REGIMES, key=distance)] if m <= most), "dequantize"
    )
