"""Cases of `lowbit_kernels.invariant.invariant_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call."""

    name: str
    batch: int
    heads: tuple[int, int]
    tokens: int
    keys: int
    width: int
    value_width: int = 0
    causal: bool = True
    masked: bool = False
    spread: float = 1.0
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """query, key, value, mask, scale, causal."""
        (heads, kv_heads), width = self.heads, self.width
        query = torch.randn(self.batch, self.tokens, heads, width, device=device).transpose(1, 2)
        key = torch.randn(self.batch, kv_heads, self.keys, width, device=device)
        values = self.batch, kv_heads, self.keys, self.value_width or width
        value = (
            torch.randn(values, device=device) * torch.rand(values[:3], device=device)[..., None]
        )
        mask = None
        if self.masked:
            mask = torch.rand(self.batch, 1, self.tokens, self.keys, device=device) > 0.4
            mask[0, :, :1] = False  # a query that sees nothing
        given = (t.to(dtype) for t in (query * self.spread, key, value))
        return *given, mask, width**-0.5, self.causal


CASES = [
    Case("a-prompt", 1, (2, 1), 40, 40, 16),
    Case("a-padded-prompt", 2, (2, 2), 9, 9, 16, masked=True),
    Case("a-chunk", 1, (2, 2), 33, 70, 32),
    Case("one-token", 2, (4, 2), 1, 37, 16),
    Case("one-token-of-a-padded-batch", 2, (8, 2), 1, 100, 24, masked=True),
    Case("other-values", 1, (4, 1), 5, 60, 24, value_width=40, causal=False),
    Case("sharp", 1, (2, 2), 7, 40, 16, spread=30.0),
    Case("one-key", 1, (1, 1), 1, 1, 8),
    Case("no-tokens", 1, (2, 2), 0, 4, 8),
    Case("llama-8b", 1, (32, 8), 512, 512, 128, large=True),
    Case("llama-8b, one token", 2, (32, 8), 1, 1000, 128, masked=True, large=True),
]
