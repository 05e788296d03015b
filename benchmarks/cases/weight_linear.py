"""Calls of `weight_linear`: every layout and dtype at small shapes, and the shapes of Llama 3 layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases.operands import ProductCase


@dataclass(frozen=True)
class Case(ProductCase):
    """One call, with random arguments."""

    group_size: int
    bits: int = 4
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.bfloat16
    zero_point: bool = False
    bias: bool = False
    residual: bool = False
    leading: tuple[int, ...] = ()  # dimensions before M
    row_step: int = 1  # every n-th row of a larger weight

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, codes, scale, zero_point, bias, residual, group_size."""
        groups, rows, step = -(-self.k // self.group_size), self.n * self.row_step, self.row_step
        padded = groups * self.group_size
        low, high, width, of = -128, 128, padded, torch.int8
        if self.bits == 4:
            low, high, width, of = 0, 256, (padded + 1) // 2, torch.uint8
        codes = torch.randint(low, high, (rows, width), dtype=of, device=device)
        scale = (torch.rand(rows, groups, device=device) * 0.02 + 1e-3).to(self.scale_dtype)
        scale.flatten()[1::3] *= -1  # scales may be negative
        zero_point = torch.randint(-8, 8, (rows, groups), dtype=torch.int8, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        return (
            floats(*self.leading, self.m, self.k),
            codes[::step],
            scale[::step],
            zero_point[::step] if self.zero_point else None,
            floats(self.n) if self.bias else None,
            floats(*self.leading, self.m, self.n) if self.residual else None,
            self.group_size,
        )


SHAPES: list[tuple[str, int, int, int, int, dict]] = [
    ("one-token", 1, 64, 256, 128, {}),
    ("typical", 8, 96, 512, 128, {"bias": True}),
    ("group-32", 3, 64, 160, 32, {"residual": True}),
    ("group-64-zero-point", 16, 48, 320, 64, {"zero_point": True}),
    ("group-256", 5, 32, 512, 256, {"dtype": torch.float16, "scale_dtype": torch.float16}),
    ("per-row", 7, 48, 384, 384, {"bias": True, "residual": True}),
    ("per-row-odd", 7, 17, 331, 331, {"zero_point": True}),
    ("fp32", 9, 33, 200, 64, {"dtype": torch.float32, "scale_dtype": torch.float32, "bias": True}),
    ("fp32-scales", 17, 40, 256, 64, {"scale_dtype": torch.float32, "zero_point": True}),
    ("padded", 2, 19, 250, 128, {"zero_point": True, "bias": True}),
    ("odd-group", 4, 13, 45, 9, {}),
    ("prime-everything", 13, 31, 101, 7, {"zero_point": True}),
    ("one-element", 1, 1, 1, 1, {}),
    ("leading", 3, 24, 128, 32, {"leading": (2, 2), "residual": True}),
    ("no-tokens", 0, 32, 64, 32, {"bias": True}),
    ("no-rows", 4, 0, 64, 32, {}),
    ("no-k", 4, 6, 0, 32, {"bias": True}),
    ("strided-rows", 6, 32, 256, 64, {"row_step": 3, "zero_point": True}),
    ("some-tokens", 50, 64, 256, 64, {"bias": True, "residual": True}),
    ("many-tokens", 70, 65, 256, 128, {"zero_point": True}),
]
LARGE = [
    ("llama-8b-attention", 4096, 4096),
    ("llama-8b-up", 14336, 4096),
    ("llama-8b-down", 4096, 14336),
    ("llama-70b-up", 28672, 8192),
]
CASES = [
    *(Case(name, m, n, k, group, **options) for name, m, n, k, group, options in SHAPES),
    *(
        Case(f"int8-{name}", m, n, k, group, 8, **options)
        for name, m, n, k, group, options in SHAPES
    ),
    *(Case(name, 1, n, k, 128, large=True) for name, n, k in LARGE),
    *(Case(f"int8-{name}", 1, n, k, k, 8, large=True) for name, n, k in LARGE),
]
