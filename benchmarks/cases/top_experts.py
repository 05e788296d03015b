"""Cases of `lowbit_kernels.decoding.top_experts`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call; no two logits of a token are equal."""

    name: str
    tokens: int
    experts: int
    top: int
    normalized: bool = True
    dtype: torch.dtype = torch.bfloat16
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """logits, top, normalized, dtype."""
        order = torch.rand(self.tokens, self.experts, device=device).argsort(-1)
        logits = (order.float() / 16 - 2).to(torch.bfloat16)
        return logits, self.top, self.normalized, self.dtype


CASES = [
    Case("typical", 3, 128, 8),
    Case("float32", 3, 128, 8, dtype=torch.float32),
    Case("one-token", 1, 4, 2),
    Case("odd", 2, 60, 3, normalized=False, dtype=torch.float32),
    Case("one-expert", 5, 1, 1),
    Case("no-tokens", 0, 8, 2),
    Case("qwen3-moe", 16, 128, 8, large=True),
    Case("deepseek-v3", 1, 256, 8, large=True),
]
