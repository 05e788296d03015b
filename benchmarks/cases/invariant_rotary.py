"""Cases of `lowbit_kernels.invariant.invariant_rotary`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with positions from 0 to a power of two."""

    name: str
    shape: tuple[int, ...]
    half: int
    powers: int = 12
    scale: float = 1.0
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """position, inv_freq, scale, out_dtype."""
        position = torch.randint(0, 2**self.powers, self.shape, device=device)
        inv_freq = 1.0 / (1e4 ** (torch.arange(self.half, device=device) / self.half))
        return position, inv_freq, self.scale, dtype


CASES = [
    Case("typical", (2, 9), 32),
    Case("an-odd-half", (2, 3), 7, scale=1.2),
    Case("far-positions", (4, 5), 16, powers=20),
    Case("one-token", (1, 1), 8),
    Case("no-tokens", (2, 0), 8),
    Case("llama-8b", (1, 2048), 64, large=True),
]
