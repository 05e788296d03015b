"""Cases of `lowbit_kernels.decoding.gated_activation`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call; gate and up are slices of one tensor."""

    name: str
    rows: tuple[int, ...]
    width: int
    activation: str = "silu"
    norm_width: int = 0
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """gate, up, x, activation, eps."""
        joint = torch.randn(*self.rows, 2 * self.width, device=device) * 3
        x = torch.randn(*self.rows, self.norm_width, device=device).to(dtype)
        halves = joint.to(dtype).split(self.width, -1)
        return *halves, x if self.norm_width else None, self.activation, 1e-5


CASES = [
    Case("silu", (2, 1), 300),
    Case("gelu", (2, 1), 300, "gelu_tanh"),
    Case("a-norm-afterwards", (3, 1), 257, norm_width=131),
    Case("gelu-and-a-norm", (3, 1), 31, "gelu_tanh", norm_width=8),
    Case("one-row", (), 40),
    Case("one-element", (1,), 1),
    Case("no-rows", (0,), 16),
    Case("llama-8b", (1, 1), 14336, large=True),
    Case("llama-8b, 16 sequences", (16, 1), 14336, large=True),
]
