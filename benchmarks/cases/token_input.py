"""Cases of `lowbit_kernels.decoding.token_input`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call at the last position."""

    name: str
    batch: int
    width: int
    pairs: int
    tokens: int = 50
    positions: int = 9
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """token, position, embedding, cos, sin."""
        angles = torch.rand(self.positions, self.pairs, device=device) * 6
        return (
            torch.randint(0, self.tokens, (self.batch, 1), device=device),
            torch.tensor([self.positions - 1], device=device),
            torch.randn(self.tokens, self.width, device=device, dtype=dtype),
            angles.cos(),
            angles.sin(),
        )


CASES = [
    Case("one-block", 1, 64, 8),
    Case("parts-of-blocks", 3, 1100, 5),
    Case("no-tokens", 0, 16, 4),
    Case("llama-8b", 1, 4096, 64, 128_256, 2048, large=True),
    Case("llama-8b, 16 sequences", 16, 4096, 64, 128_256, 2048, large=True),
]
