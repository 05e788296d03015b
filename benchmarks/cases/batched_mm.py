"""Cases of `lowbit_kernels.matmul.batched_mm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Shapes of one product, and how it is stored and computed."""

    name: str
    count: int
    m: int
    k: int
    n: int
    a_turned: bool = False
    b_turned: bool = False
    symmetric: bool = False
    has_addend: bool = False
    dtype: torch.dtype = torch.float16
    large: bool = False
    out_dtype: torch.dtype | None = None
    commuting: bool = False
    """The product of a symmetric matrix and its square, not of a matrix and its transpose."""

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """a, b, addend, symmetric, alpha, beta, gamma, out_dtype."""

        def made(rows: int, columns: int, turned: bool) -> Tensor:
            shape = (self.count, columns, rows) if turned else (self.count, rows, columns)
            x = torch.randn(shape, device=device).div_(max(1, self.k) ** 0.5).to(self.dtype)
            return x.mT if turned else x

        a = made(self.m, self.k, self.a_turned)
        b = a.mT if self.symmetric else made(self.k, self.n, self.b_turned)
        if self.commuting:
            a = (a + a.mT).div_(2)
            b = (a.float() @ a.float()).to(self.dtype).mT
        addend = made(self.m, self.n, False) if self.has_addend else None
        if addend is not None and self.symmetric:
            addend = addend + addend.mT
        factors = self.factors() or {"alpha": 1.0, "beta": 0.0, "gamma": 0.0}
        return a, b, addend, self.symmetric, *factors.values(), self.out_dtype

    def factors(self) -> dict[str, float]:
        return {"alpha": 2.03, "beta": -4.8, "gamma": 3.4} if self.has_addend else {}


CASES = [
    Case("typical", 3, 64, 96, 32),
    Case("one-matrix", 1, 33, 47, 65),
    Case("a-turned", 2, 40, 35, 70, a_turned=True),
    Case("b-turned", 2, 70, 35, 40, b_turned=True),
    Case("symmetric", 3, 97, 40, 97, symmetric=True),
    Case("symmetric-turned", 2, 70, 33, 70, a_turned=True, symmetric=True),
    Case("polynomial", 2, 97, 97, 97, symmetric=True, has_addend=True),
    Case("addend", 2, 33, 64, 50, has_addend=True),
    Case("bfloat16", 2, 40, 64, 40, dtype=torch.bfloat16, symmetric=True),
    Case("one-element", 1, 1, 1, 1),
    Case("no-matrix", 0, 8, 8, 8),
    Case("no-columns", 2, 8, 0, 8, has_addend=True),
    Case("commuting", 3, 97, 97, 97, symmetric=True, has_addend=True, commuting=True),
    Case("float32", 2, 40, 64, 40, symmetric=True, out_dtype=torch.float32),
    Case("llama-gram", 4, 2048, 8192, 2048, symmetric=True, large=True),
    Case("llama-gram-turned", 4, 2048, 8192, 2048, a_turned=True, symmetric=True, large=True),
    Case("llama-polynomial", 4, 2048, 2048, 2048, symmetric=True, has_addend=True, large=True),
    Case(
        "llama-commuting",
        4,
        2048,
        2048,
        2048,
        symmetric=True,
        has_addend=True,
        large=True,
        commuting=True,
    ),
    Case("llama-float32", 4, 2048, 8192, 2048, symmetric=True, large=True, out_dtype=torch.float32),
    Case(
        "sum-in-float32",
        2,
        256,
        128,
        256,
        symmetric=True,
        has_addend=True,
        large=True,
        out_dtype=torch.float32,
    ),
    Case("half-a-tile", 3, 192, 128, 192, symmetric=True, has_addend=True, large=True),
    Case("llama-apply", 4, 2048, 2048, 8192, large=True),
    Case("llama-apply-turned", 4, 8192, 2048, 2048, b_turned=True, large=True),
    Case("expert-gram", 64, 768, 2048, 768, symmetric=True, large=True),
    Case(
        "expert-commuting",
        64,
        768,
        768,
        768,
        symmetric=True,
        has_addend=True,
        large=True,
        commuting=True,
    ),
    Case("not-a-multiple-of-64", 3, 1000, 1111, 777, large=True),
]
