"""Cases of `lowbit_kernels.quantize.quantize_flat`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One run of elements."""

    name: str
    count: int
    dtype: torch.dtype = torch.bfloat16
    large: bool = False  # activations of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Tensor]:
        """x [count]: blocks of normal values of many sizes, then of positive ones, of zeros, of tiny, huge and special
        values, as far as `count` goes."""
        x = torch.randn(self.count, device=device)
        for i, block in enumerate(x[: 40 * 128].split(128)):
            kind = i % 8
            if kind == 1:
                block.abs_()
            elif kind == 2:
                block.zero_()
            elif kind == 3:
                block.abs_().mul_(torch.finfo(self.dtype).tiny)
            elif kind == 4:
                block.mul_(torch.finfo(self.dtype).max / 8)
            elif kind == 5:
                special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], device=device)
                block[: 4 if len(block) >= 4 else 0] = special[: 4 if len(block) >= 4 else 0]
            elif kind == 6:
                block.abs_().pow_(6)
            elif kind == 7:
                block.fill_(torch.nan if i % 16 == 7 else -torch.inf)
        return (x.to(self.dtype),)


CASES = [
    Case("typical", 128 * 80),
    Case("float32", 128 * 80, torch.float32),
    Case("float16", 128 * 80, torch.float16),
    Case("odd", 128 * 40 + 77),
    Case("odd-float32", 128 * 17 + 1, torch.float32),
    Case("one-element", 1),
    Case("empty", 0),
    Case("residual", 4 * 4096 * 2048, large=True),
    Case("gate", 4 * 4096 * 8192, large=True),
]
