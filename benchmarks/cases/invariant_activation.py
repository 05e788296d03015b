"""Cases of `lowbit_kernels.invariant.invariant_activation`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call."""

    name: str
    shape: tuple[int, ...]
    kind: str = "silu"
    is_slice: bool = False
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """x, kind."""
        *rows, width = self.shape
        x = (torch.randn(*rows, 2 * width, device=device) * 20).to(dtype)[..., :width]
        return x if self.is_slice else x.contiguous(), self.kind


CASES = [
    Case("silu", (3, 1031)),
    Case("gelu", (3, 300), "gelu_tanh"),
    Case("a-slice", (5, 40), is_slice=True),
    Case("one-element", (1,)),
    Case("no-rows", (0, 16)),
    Case("llama-8b", (16, 14336), large=True),
]
