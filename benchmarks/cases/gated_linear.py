"""Cases of `lowbit_kernels.composed.gated_linear`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.operands import ProductCase


@dataclass(frozen=True)
class Case(ProductCase):
    """One call, with random arguments; n: rows of the gate and of up together."""

    group_size: int
    bits: int = 4
    dtype: torch.dtype = torch.bfloat16
    zero_point: bool = False
    activation: str = "silu"
    normed: bool = False
    leading: tuple[int, ...] = ()  # dimensions before M

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, codes, scale, zero_point, group_size, global_scale, bits, table, activation, normed, eps."""
        groups = -(-self.k // self.group_size)
        padded = groups * self.group_size
        low, high, width, of = -128, 128, padded, torch.int8
        if self.bits == 4:
            low, high, width, of = 0, 256, (padded + 1) // 2, torch.uint8
        zero_point = torch.randint(-8, 8, (self.n, groups), dtype=torch.int8, device=device)
        x = torch.randn(*self.leading, self.m, self.k, device=device).to(self.dtype)
        scale = (torch.rand(self.n, groups, device=device) + 0.5) * 0.3 / max(self.k, 1) ** 0.5
        return (
            *(x, torch.randint(low, high, (self.n, width), dtype=of, device=device)),
            *(scale.to(self.dtype), zero_point if self.zero_point else None, self.group_size),
            *(None, 0, (), self.activation, self.normed, 1e-5),
        )


CASES = [
    Case("one-token", 1, 96, 512, 128, normed=True),
    Case("one-token-without-norm", 1, 96, 512, 128),
    Case("zero-points", 1, 64, 320, 32, zero_point=True, normed=True),
    Case("int8", 1, 48, 256, 256, 8, activation="gelu_tanh", normed=True),
    Case("few-tokens", 5, 64, 320, 64, leading=(2,)),
    Case("norms", 3, 64, 320, 64, normed=True),
    Case("odd-halves", 2, 26, 160, 32),
    Case("half", 4, 64, 256, 128, dtype=torch.float16),
    Case("fp32", 9, 34, 200, 64, dtype=torch.float32, normed=True),
    Case("many-tokens", 40, 64, 256, 128),
    Case("no-tokens", 0, 32, 64, 32),
    Case("no-rows", 4, 0, 64, 32),
    Case("llama-8b", 1, 28672, 4096, 128, normed=True, large=True),
    Case("llama-8b, 16 sequences", 16, 28672, 4096, 128, large=True),
]
