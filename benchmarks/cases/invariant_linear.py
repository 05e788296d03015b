"""Cases of `lowbit_kernels.invariant.invariant_linear`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call; rows of x are huge, tiny and zeros."""

    name: str
    rows: tuple[int, ...]
    n: int
    k: int
    bias: bool = False
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """x, codes, scale, bias."""
        x = torch.randn(*self.rows, self.k, device=device)
        sizes = torch.tensor([1.0, 1e3, 1e-3, 0.0], device=device)
        flat = x.view(torch.Size(self.rows).numel(), self.k)
        flat *= sizes.repeat(len(flat) // 4 + 1)[: len(flat), None]
        codes = torch.randint(-128, 128, (self.n, self.k), dtype=torch.int8, device=device)
        scale = torch.rand(self.n, 1, device=device) * 0.01
        bias = torch.randn(self.n, device=device).to(dtype) if self.bias else None
        return x.to(dtype), codes, scale.to(dtype), bias


CASES = [
    Case("typical", (3, 4), 48, 64),
    Case("a-bias", (5,), 33, 96, bias=True),
    Case("an-odd-k", (2, 3), 7, 131),
    Case("one-token", (1,), 16, 32, bias=True),
    Case("no-tokens", (0,), 16, 32),
    Case("llama-8b", (1,), 14336, 4096, large=True),
    Case("llama-8b, 16 tokens", (16,), 4096, 14336, bias=True, large=True),
    Case("llama-8b, 512 tokens", (512,), 4096, 4096, large=True),
]
