"""Cases of `lowbit_kernels.composed.linear_output`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.operands import ProductCase, bias_of
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol


@dataclass(frozen=True)
class Case(ProductCase):
    """An input [m, k] and a weight [n, k]."""

    format: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None
    tensorwise: bool = False
    strided: bool = False

    def operands(self, device: str = "cpu") -> tuple:
        """x, the weight and the bias in high precision."""
        weight = torch.randn(self.n, 2 * self.k if self.strided else self.k, device=device)
        weight = weight[:, : self.k] * torch.rand(self.n, 1, device=device)
        weight = weight.to(self.dtype)
        if self.strided:
            weight = torch.cat([weight, weight], 1)[:, : self.k]
        bias = bias_of(self.n, self.bias, device)
        return torch.randn(self.m, self.k, device=device), weight, bias

    def arguments(self, device: str = "cpu") -> tuple:
        x, weight, bias = self.operands(device)
        codes = quantize_rowcol(x, self.format, columns=False, tensorwise=self.tensorwise)[:2]
        return *codes, weight, self.format, self.tensorwise, bias, self.out_dtype


CASES = [
    Case("typical", 128, 64, 48),
    Case("several-tiles", 300, 144, 272, bias=torch.bfloat16),
    Case("fp32", 130, 64, 48, dtype=torch.float32, out_dtype=torch.float32, bias=torch.float32),
    Case("fp16", 130, 64, 48, dtype=torch.float16, out_dtype=torch.float16),
    Case("strided", 70, 48, 64, strided=True),
    Case("prime", 131, 61, 67, bias=torch.float16),
    Case("odd-k", 64, 32, 67),
    Case("one-row", 1, 32, 16),
    Case("one-column", 32, 1, 16),
    Case("no-rows", 0, 32, 16),
    Case("no-columns", 16, 0, 32),
    Case("no-sum", 16, 32, 0, bias=torch.bfloat16),
    Case("e4m3", 128, 64, 48, "e4m3", bias=torch.bfloat16),
    Case("tensorwise", 128, 64, 48, "e4m3", tensorwise=True),
    Case("layer", 4096, 2048, 1024, large=True),
    Case("layer-e4m3", 4096, 2048, 1024, "e4m3", large=True),
    Case("long-sums-e4m3", 512, 256, 16384, "e4m3", large=True),
]
