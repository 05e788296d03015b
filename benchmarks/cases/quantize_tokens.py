"""Cases of `lowbit_kernels.quantize.quantize_tokens`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    m: int
    k: int
    format: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    tensorwise: bool = False
    transposed: bool = False
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, format, tensorwise."""
        shape = (self.k, self.m) if self.transposed else (self.m, self.k)
        x = torch.randn(shape, device=device) * torch.rand(shape[0], 1, device=device)
        x = x.to(self.dtype)
        return x.T if self.transposed else x, self.format, self.tensorwise


SHAPES: list[tuple[str, int, int, dict]] = [
    ("typical", 12, 256, {}),
    ("fp32", 9, 200, {"dtype": torch.float32}),
    ("fp16", 9, 200, {"dtype": torch.float16}),
    ("prime-everything", 13, 127, {}),
    ("one-row", 1, 300, {}),
    ("one-element", 1, 1, {}),
    ("long-rows", 3, 20_001, {}),
    ("no-rows", 0, 32, {}),
    ("no-columns", 16, 0, {}),
    ("transposed", 20, 30, {"transposed": True}),
]
CASES = [
    *(Case(name, m, k, **options) for name, m, k, options in SHAPES),
    *(Case(f"e4m3-{name}", m, k, "e4m3", **options) for name, m, k, options in SHAPES),
    *(Case(f"tensorwise-{name}", m, k, "e4m3", tensorwise=True, **o) for name, m, k, o in SHAPES),
    Case("llama-8b-attention", 8192, 4096, large=True),
    Case("llama-8b-down", 8192, 14336, large=True),
    Case("e4m3-llama-8b-attention", 8192, 4096, "e4m3", large=True),
]
