"""Cases of `lowbit_kernels.elementwise.block_hadamard`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with a row of zeros, a tiny one, and a channel of outliers."""

    name: str
    shape: tuple[int, ...]
    size: int
    bits: int = 0
    is_slice: bool = False
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """x, size, bits."""
        *rows, width = self.shape
        x = torch.randn(*rows, width * (1 + self.is_slice), device=device)[..., :width]
        huge = 100.0 if dtype == torch.float16 else 1000.0  # 50 times as much is finite
        sizes = torch.tensor([1.0, huge, 1e-3, 0.0], device=device)
        flat = x.flatten(0, -2) if rows else x[None]
        flat *= sizes.repeat(len(flat) // 4 + 1)[: len(flat), None]
        flat[:, width // 3] *= 50
        return x.to(dtype), self.size, self.bits


CASES = [
    Case("one-block", (1, 16), 16),
    Case("blocks-of-32", (2, 3, 96), 32),
    Case("blocks-of-64-of-a-slice", (5, 320), 64, is_slice=True),
    Case("blocks-of-128", (3, 384), 128),
    Case("one-row", (64,), 64),
    Case("a-size-of-no-kernel", (3, 24), 8),
    Case("size-1", (3, 7), 1),
    Case("no-rows", (0, 32), 32),
    Case("several-tiles", (2, 9 * 2048), 64),
    Case("4-bits", (7, 192), 64, bits=4),
    Case("3-bits-of-a-slice", (4, 160), 32, bits=3, is_slice=True),
    Case("8-bits", (2, 5, 256), 128, bits=8),
    Case("4-bits-several-tiles", (2, 5 * 4096), 128, bits=4),
    Case("llama-8b-down", (16, 14336), 128, large=True),
    Case("llama-8b-down, 4 bits", (2048, 14336), 128, bits=4, large=True),
]
