"""Cases of `lowbit_kernels.quantize.round_rows`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    rows: int
    columns: int
    has_old: bool = True
    has_largest: bool = False
    stochastic: bool = True
    start: int = 0
    packed: bool = False  # int4
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """values, old, largest, first, start, most, packed."""
        values = torch.randn(self.rows, self.columns, device=device)
        bad = (float("nan"), float("inf"), 0.0)
        for row, value in zip(range(self.rows - 1), bad, strict=False):
            values[row] = values[row] * 0 + value if value == 0 else values[row]
            if value != 0 and self.columns:
                values[row, self.columns // 2] = value
        largest = values.abs().amax(1) * 1.5 if self.columns else values.new_zeros(self.rows)
        most = 7 if self.packed else 127
        old = largest / 1.5 / most * (torch.rand(self.rows, device=device) < 0.5)
        first = torch.randint(-(2**63), 2**63 - 1, (self.rows,), device=device)
        return (
            values,
            old if self.has_old else None,
            largest if self.has_largest else None,
            first if self.stochastic else None,
            self.start,
            most,
            self.packed,
        )


CASES = [
    Case("typical", 8, 256),
    Case("to-nearest", 8, 256, stochastic=False),
    Case("no-scale-yet", 7, 101, has_old=False),
    Case("a-part-of-rows", 5, 50, has_largest=True, start=50),
    Case("several-blocks", 5, 5000),
    Case("one-element", 1, 1),
    Case("groups-of-int4", 37, 64, packed=True),
    Case("two-columns-of-int4", 1031, 2, packed=True, stochastic=False),
    Case("no-rows", 0, 16),
    Case("no-columns", 4, 0, has_old=False),
    Case("llama-8b-up", 14336, 4096, large=True),
    Case("llama-8b-down", 4096, 14336, large=True),
    Case("llama-8b-up-in-int4", 14336 * 64, 64, packed=True, large=True),
]
