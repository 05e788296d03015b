"""Cases of `lowbit_kernels.matmul.ternary_mm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.operands import ProductCase


@dataclass(frozen=True)
class Case(ProductCase):
    """One call, with random arguments."""

    has_bias: bool = False
    out_dtype: torch.dtype = torch.bfloat16

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """a, packed, a_scale, b_scale, bias, out_dtype."""
        padded = -(-self.k // 16) * 16
        a = torch.randint(-127, 128, (self.m, padded), dtype=torch.int8, device=device)
        a[:, self.k :] = 0
        lanes = torch.randint(1, 4, (self.n, -(-self.k // 4), 4), dtype=torch.uint8, device=device)
        packed = (lanes << torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=device)).sum(-1)
        scales = torch.rand(self.m, device=device) * 0.02, torch.rand(1, device=device) * 0.1
        bias = torch.randn(self.n, device=device).to(self.out_dtype) if self.has_bias else None
        return a, packed.to(torch.uint8), *scales, bias, self.out_dtype


CASES = [
    Case("typical", 4, 64, 256, True),
    Case("one-row", 1, 96, 512),
    Case("fp16", 16, 32, 128, True, torch.float16),
    Case("fp32", 7, 40, 160, True, torch.float32),
    Case("odd-sizes", 5, 33, 101, True, torch.float32),
    Case("prime-everything", 17, 31, 13, False, torch.float32),
    Case("one-element", 1, 1, 1, True, torch.float32),
    Case("more-rows-than-a-block", 65, 48, 96, True, torch.float32),
    Case("most-rows", 64, 48, 600),
    Case("no-rows", 0, 16, 64, True),
    Case("no-columns", 3, 0, 64),
    Case("no-terms", 3, 16, 0, True),
    Case("bitnet-2b-up", 1, 6912, 2560, large=True),
    Case("llama-8b-up", 1, 14336, 4096, large=True),
    Case("llama-8b-up-16", 16, 14336, 4096, True, large=True),
    Case("llama-8b-down", 1, 4096, 14336, large=True),
]
