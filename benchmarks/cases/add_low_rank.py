"""Cases of `lowbit_kernels.composed.add_low_rank`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """A weight [n, k] and products of these ranks, whose factors have a dtype of their own."""

    name: str
    n: int
    k: int
    ranks: tuple[int, ...] = (16,)
    dtype: torch.dtype = torch.bfloat16
    factors: torch.dtype = torch.float32
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """w, a, b, scales."""
        a = [torch.randn(r, self.k, device=device).to(self.factors) for r in self.ranks]
        b = [torch.randn(self.n, r, device=device).to(self.factors) for r in self.ranks]
        scales = [0.5 ** (i + 1) for i in range(len(self.ranks))]
        return torch.randn(self.n, self.k, device=device).to(self.dtype), a, b, scales


CASES = [
    Case("bfloat16", 64, 96),
    Case("odd", 37, 53, (3,)),
    Case("float32", 37, 53, (5,), torch.float32),
    Case("float16-of-float16", 24, 40, (8,), torch.float16, torch.float16),
    Case("float64", 24, 40, (8,), torch.float64),
    Case("two", 24, 40, (4, 7)),
    Case("none", 24, 40, ()),
    Case("rank-zero", 24, 40, (0,)),
    Case("no-rows", 0, 40),
    Case("no-columns", 24, 0),
    Case("two-chunks", 5, 2**20),
    Case("llama", 8192, 2048, large=True),
]
