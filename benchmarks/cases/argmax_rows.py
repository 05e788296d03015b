"""Cases of `lowbit_kernels.decoding.argmax_rows`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with many equal scores."""

    name: str
    rows: int
    width: int
    is_slice: bool = False
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """scores."""
        scores = torch.randint(-9, 9, (self.rows, self.width * (1 + self.is_slice)), device=device)
        return (scores[:, :: 1 + self.is_slice].to(dtype),)


CASES = [
    Case("one-score", 3, 1),
    Case("part-of-a-block", 2, 100),
    Case("a-block", 1, 1024),
    Case("several-blocks", 3, 5000),
    Case("a-slice", 2, 2000, is_slice=True),
    Case("no-rows", 0, 16),
    Case("llama-8b", 1, 128_256, large=True),
    Case("llama-8b, 16 sequences", 16, 128_256, large=True),
]
