"""Cases of `lowbit_kernels.decoding.rms_norm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with rows that are huge, tiny and zeros."""

    name: str
    shape: tuple[int, ...]
    offset: float = 0.0
    is_slice: bool = False
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """x, weight, eps, offset."""
        *rows, width = self.shape
        x = torch.randn(*rows, width * 2, device=device)[..., : width if self.is_slice else None]
        x = x if self.is_slice else x[..., :width].contiguous()
        sizes = torch.tensor([1.0, 1e3, 1e-3, 0.0], device=device)
        flat = x.flatten(0, -2) if rows else x[None]
        flat *= sizes.repeat(len(flat) // 4 + 1)[: len(flat), None]
        return x.to(dtype), torch.randn(width, device=device).to(dtype), 1e-5, self.offset


CASES = [
    Case("typical", (2, 1, 64)),
    Case("an-odd-width", (3, 1, 1031)),
    Case("one-column", (5, 1)),
    Case("heads", (2, 1, 6, 32), offset=1.0),
    Case("a-slice", (3, 40), is_slice=True),
    Case("one-row", (48,)),
    Case("no-rows", (0, 16)),
    Case("a-row-beyond-one-block", (2, 9000)),
    Case("three-blocks-of-a-slice", (3, 16391), offset=1.0, is_slice=True),
    Case("llama-8b", (1, 1, 4096), large=True),
    Case("llama-8b, 16 sequences", (16, 1, 4096), large=True),
]
