"""Cases of `lowbit_kernels.elementwise.normalize_matrices`."""

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

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """x, eps, out_dtype."""
        x = torch.randn(self.count, self.rows, self.columns, device=device).mul_(1e-2)
        if self.count == 3:
            x[1] = 0
        return x.to(self.dtype), 1e-7, torch.float16


CASES = [
    Case("one-is-zero", 3, 20, 500),
    Case("one-element", 1, 1, 1),
    Case("whole-pieces", 2, 3, 8192),
    Case("a-part-of-a-piece", 2, 129, 131),
    Case("float32", 2, 40, 500, torch.float32),
    Case("float16", 2, 40, 500, torch.float16),
    Case("no-matrix", 0, 4, 4),
    Case("no-rows", 2, 0, 4),
    Case("llama", 4, 2048, 8192, large=True),
]
