"""Which sizes of layers gain by low-bit products: lines through measured times. Training schemes ask them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Least:
    """The smallest products that gain, forward and backward together.

    Low-bit products save time in proportion to M·N·K. Quantization costs time in proportion to M·(N + K), and the
    launches a fixed time. Both costs are counted here in units of M·N·K: a layer gains where
    M·(N·K - quantizing·(N + K)) exceeds `launches`. Measured on an H200
    (`benchmarks/results/train_linear-nvidia-h200.md`): 16384 rows of a 2048 x 2048 weight run at 1.25 times the speed,
    1024 at 0.59. That makes the costs 343 and 1.24e10; the limit is a fifth higher.

    If the input is quantized anyway, for a larger layer, only the gradient costs: the layer gains where
    M·(N·K - quantizing·N) exceeds `launches_beside`. Measured on an H100 (`benchmarks/LOG.md`): all layers with 1.4e10
    or more gain, and about half of those with 7.2e9 to 7.9e9.

    Attributes:
        weight: the smallest measured N·K / (N + K) with a gain; `prepare_` leaves smaller weights alone.
        weight_beside: the smallest N·K of a weight beside a larger one, that of 256 x 4096.
    """

    weight: int = 1024
    quantizing: int = 343
    launches: float = 1.5e10
    weight_beside: int = 2**20
    launches_beside: float = 1.0e10

    def rows(self, n: int, k: int) -> int:
        """The fewest rows M with which a weight [N, K] gains."""
        return self._rows(self.launches, n * k - self.quantizing * (n + k))

    def rows_beside(self, n: int, k: int) -> int:
        """`rows` where the input is quantized anyway."""
        return self._rows(self.launches_beside, n * k - self.quantizing * n)

    @staticmethod
    def _rows(launches: float, each: int) -> int:
        return math.ceil(launches / each) if each > 0 else sys.maxsize


@dataclass(frozen=True)
class LeastExperts:
    """The smallest grouped products of E experts [N, K] and M rows that gain, forward and backward together.

    As for `Least`, low-bit products save time in proportion to M·N·K, and quantization of the rows costs time in
    proportion to M·(N + K). The weights count too, in proportion to E·N·K, since an expert may have few rows. In
    units of M·N·K, experts gain where M·N·K exceeds `rows`·M·(N + K) + `weights`·E·N·K + `launches`. Measured on an
    H200 (`benchmarks/LOG.md`): the products of 131,072 rows and 128 experts of 1536 x 2048 take 1,837 us less in int8
    than in bfloat16; quantization takes 783 us for the rows and 568 us for the weights. That makes the costs 374 and
    316; the limits are a tenth higher.
    """

    rows: int = 410
    weights: int = 350
    launches: float = 1.5e10

    def gains(self, m: int, experts: int, n: int, k: int) -> bool:
        spent = self.rows * m * (n + k) + self.weights * experts * n * k + self.launches
        return m * n * k > spent

    def may_gain(self, n: int, k: int) -> bool:
        """True if experts [N, K] gain with enough rows."""
        return n * k > self.rows * (n + k)
