"""Cases of `lowbit_kernels.quantize.round_columns`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FP4 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Case:
    """Columns of one weight; every third scale is negative."""

    name: str
    columns: int
    rows: int
    groups: int = 4
    bits: int = 4
    offset: bool = False
    levels: tuple[float, ...] = ()
    pruned: bool = False
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """columns, upper, group, scale, least, most, offset, levels, kept."""
        count, rows = self.columns, self.rows
        w = torch.randn(count, rows, device=device)
        upper = (torch.randn(count, count, device=device) / 16).triu_(1)
        upper += torch.rand(count, device=device).add_(0.5).diag()
        group = torch.randint(self.groups, (count,), device=device)
        scale = torch.rand(self.groups, rows, device=device).add_(0.5).mul_(2.0**-self.bits * 4)
        scale[:, ::3] *= -1
        offset = torch.randn_like(scale) / 2 if self.offset else None
        least = torch.full_like(scale, -(2.0 ** (self.bits - 1)))
        levels = torch.tensor(self.levels, dtype=torch.float32, device=device)
        kept = torch.rand(count, rows, device=device) > 0.5 if self.pruned else None
        return w, upper, group, scale, least, -1 - least, offset, levels, kept


CASES = [
    Case("one-element", 1, 1, 1),
    Case("a-prime-of-both", 61, 67),
    Case("whole", 128, 64, 1),
    Case("value-zeros", 128, 33, offset=True),
    Case("two-bits", 100, 40, bits=2),
    Case("levels", 128, 40, levels=FP4),
    Case("levels-and-zeros", 31, 130, offset=True, levels=FP4),
    Case("pruned", 60, 70, pruned=True),
    Case("pruned-levels", 128, 33, levels=FP4, pruned=True),
    Case("no-column", 0, 8),
    Case("no-row", 8, 0),
    Case("llama", 128, 14336, 1, large=True),
]
