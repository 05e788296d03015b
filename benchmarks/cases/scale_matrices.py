"""Cases of `lowbit_kernels.elementwise.scale_matrices`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """Matrices of one shape; the second one is zero if there are three."""

    name: str
    count: int
    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    large: bool = False
    scaled: str = "rows and columns"

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """x, rows, columns, out_dtype."""
        x = torch.randn(self.count, self.rows, self.columns, device=device).mul_(1e-2)
        if self.count == 3:
            x[1] = 0
        rows = torch.randn(self.count, self.rows, device=device)
        columns = torch.randn(self.count, self.columns, device=device)
        return (
            x.to(self.dtype),
            rows if "rows" in self.scaled else None,
            columns if "columns" in self.scaled else None,
            torch.float16,
        )


CASES = [
    Case("one-is-zero", 3, 20, 500),
    Case("one-element", 1, 1, 1),
    Case("whole-blocks", 2, 3, 8192, scaled="rows"),
    Case("a-part-of-a-block", 2, 129, 131, scaled="columns"),
    Case("two-blocks", 2, 3, 4999),
    Case("float32", 2, 40, 500, torch.float32, scaled=""),
    Case("float16", 2, 40, 500, torch.float16),
    Case("no-matrix", 0, 4, 4),
    Case("no-rows", 2, 0, 4),
    Case("no-columns", 2, 4, 0),
    Case("llama", 4, 2048, 8192, large=True),
]
