"""Cases of `lowbit_kernels.decoding.weighted_sum`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call; rows of y have gaps between them."""

    name: str
    tokens: int
    k: int
    width: int
    weights: torch.dtype = torch.bfloat16
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """y, weights."""
        y = torch.randn(self.tokens * self.k, self.width + 3, device=device).bfloat16()
        weights = torch.rand(self.tokens, self.k, device=device).to(self.weights)
        return y[:, : self.width], weights


CASES = [
    Case("typical", 3, 8, 300),
    Case("float32-weights", 1, 2, 64, torch.float32),
    Case("many", 70, 4, 1030),
    Case("narrow", 2, 1, 7),
    Case("no-tokens", 0, 2, 16),
    Case("qwen3-moe", 16, 8, 2048, large=True),
    Case("qwen3-moe-prefill", 2048, 8, 2048, large=True),
]
