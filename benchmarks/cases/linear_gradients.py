"""Cases of `lowbit_kernels.composed.linear_gradients`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases.operands import ProductCase
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol


@dataclass(frozen=True)
class Case(ProductCase):
    """A gradient [m, n] of a linear with a weight [n, k]. `rounds`: the op gets the weight in high precision."""

    format: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.bfloat16
    grad_x: bool = True
    grad_weight: bool = True
    stochastic: bool = False
    tensorwise: bool = False
    strided: bool = False
    rounds: bool = False
    seed: int = 5

    def operands(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """dy, the weight and x in high precision; dy's columns have different magnitudes."""
        shape = (self.m, 2 * self.n if self.strided else self.n)
        grad = torch.randn(shape, device=device) * torch.rand(shape[1], device=device)
        grad = grad.to(self.dtype)[:, : self.n]
        weight = torch.randn(self.n, self.k, device=device) * torch.rand(self.n, 1, device=device)
        return grad, weight.to(self.dtype), torch.randn(self.m, self.k, device=device)

    def arguments(self, device: str = "cpu") -> tuple:
        """The arguments of the op."""
        grad, weight, x = self.operands(device)
        fmt, one = "e4m3" if self.format == "e5m2" else self.format, self.tensorwise
        given: list[Tensor | None] = [None] * 4
        if self.rounds:
            given[0] = weight
        elif self.grad_x:
            given[:2] = quantize_rowcol(
                weight, fmt, rows=False, tensorwise=one, row_scales=not one
            )[2:]
        if self.grad_weight:
            given[2:] = quantize_rowcol(x, fmt, rows=False, tensorwise=one)[2:]
        options = self.stochastic, self.seed, self.tensorwise, self.weight_dtype
        return grad, self.format, *given, *options


CASES = [
    Case("typical", 128, 64, 48),
    Case("stochastic", 200, 128, 64, stochastic=True),
    Case("several-tiles", 300, 144, 272, stochastic=True),
    Case("large-seed", 200, 64, 48, stochastic=True, seed=2**31 - 1),
    Case("negative-seed", 200, 64, 48, stochastic=True, seed=-77),
    Case("fp32", 130, 64, 48, dtype=torch.float32, weight_dtype=torch.float32, stochastic=True),
    Case("fp16", 130, 64, 48, dtype=torch.float16, weight_dtype=torch.float32, stochastic=True),
    Case("of-x-only", 64, 80, 32, grad_weight=False, stochastic=True),
    Case("of-the-weight-only", 64, 80, 32, grad_x=False, stochastic=True),
    Case("strided", 70, 48, 64, stochastic=True, strided=True),
    Case("prime", 131, 61, 67, stochastic=True),
    Case("one-row", 1, 32, 16, stochastic=True),
    Case("one-column", 32, 1, 16, stochastic=True),
    Case("no-rows", 0, 32, 16),
    Case("no-columns", 16, 0, 32),
    Case("e4m3", 128, 64, 48, "e4m3"),
    Case("e5m2", 128, 64, 48, "e5m2", stochastic=True),
    Case("e4m3-fp32", 130, 64, 48, "e4m3", torch.float32, torch.float32, stochastic=True),
    Case("tensorwise", 128, 64, 48, "e4m3", tensorwise=True),
    Case("tensorwise-of-x-only", 128, 64, 48, "e5m2", tensorwise=True, grad_weight=False),
    Case("rounds", 128, 64, 48, stochastic=True, rounds=True),
    Case("rounds-of-x-only", 130, 48, 144, rounds=True, grad_weight=False, stochastic=True),
    Case("rounds-fp32", 300, 144, 272, dtype=torch.float32, rounds=True),
    Case("rounds-prime", 131, 61, 67, rounds=True),
    Case("rounds-one-column", 32, 1, 16, rounds=True),
    Case("rounds-e5m2", 128, 64, 48, "e5m2", rounds=True),
    Case("rounds-tensorwise", 128, 64, 48, "e4m3", tensorwise=True, rounds=True),
    Case("layer", 4096, 1024, 2048, stochastic=True, large=True),
    Case("layer-e4m3", 4096, 1024, 2048, "e4m3", large=True),
    Case("long-sums-e4m3", 16384, 256, 512, "e4m3", large=True),
]
