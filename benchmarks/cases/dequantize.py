"""Cases of `lowbit_kernels.weight_only.dequantize`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    rows: int
    size: int
    group_size: int
    scale_dtype: torch.dtype = torch.float32
    has_zero_point: bool = False
    dtype: torch.dtype = torch.bfloat16
    bits: int = 4
    row_step: int = 1  # every n-th row of a larger weight
    byte_offset: int = 0  # of the first byte from an aligned address
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """codes, scale, zero_point, group_size, size, dtype."""
        groups = -(-self.size // self.group_size)
        rows = self.rows * self.row_step
        width = (groups * self.group_size * self.bits + 7) // 8
        codes = random_bytes(rows * width + self.byte_offset, device)[self.byte_offset :]
        codes = codes.view(rows, width)[:: self.row_step]
        scale = (torch.rand(rows, groups, device=device) * 0.02 - 0.001).to(self.scale_dtype)
        zero_point = None
        if self.has_zero_point:
            zero_point = random_bytes(rows * groups, device).view(rows, groups)[:: self.row_step]
        return (
            codes.view(torch.uint8) if self.bits == 4 else codes,
            scale[:: self.row_step],
            zero_point,
            self.group_size,
            self.size,
            self.dtype,
        )


def random_bytes(count: int, device: torch.device | str) -> Tensor:
    return torch.randint(-128, 128, (count,), dtype=torch.int8, device=device)


# name, rows, size, group_size, options
SHAPES: list[tuple[str, int, int, int, dict]] = [
    ("typical", 64, 256, 128, {}),
    ("zero-point", 64, 256, 128, {"has_zero_point": True}),
    ("group-32-bf16-scale", 33, 512, 32, {"scale_dtype": torch.bfloat16, "has_zero_point": True}),
    ("fp16", 16, 256, 64, {"scale_dtype": torch.float16, "dtype": torch.float16}),
    ("fp32", 16, 256, 64, {"has_zero_point": True, "dtype": torch.float32}),
    (
        "fp32-with-bf16-scales",
        *(16, 250, 128),
        {"scale_dtype": torch.bfloat16, "has_zero_point": True, "dtype": torch.float32},
    ),
    ("padded", 17, 250, 128, {"has_zero_point": True}),
    ("padded-by-a-group-less-one", 5, 129, 128, {}),
    ("several-chunks", 3, 17_000, 17_000, {}),
    ("several-chunks-of-a-padded-row", 3, 17_000, 128, {}),
    ("several-chunks-of-padded-groups", 3, 17_001, 8, {"scale_dtype": torch.bfloat16}),
    ("odd-size", 7, 63, 32, {"has_zero_point": True}),
    ("prime-everything", 31, 101, 7, {"has_zero_point": True, "dtype": torch.float32}),
    ("odd-group", 13, 45, 9, {}),
    ("group-12", 6, 96, 12, {"scale_dtype": torch.bfloat16}),
    ("group-of-one", 4, 24, 1, {"has_zero_point": True}),
    ("one-group-a-row", 40, 136, 136, {}),
    ("one-element", 1, 1, 1, {}),
    ("one-row", 1, 4096, 128, {}),
    ("one-column", 37, 1, 1, {}),
    ("no-rows", 0, 128, 32, {}),
    ("no-columns", 5, 0, 32, {}),
    ("strided-rows", 19, 256, 64, {"has_zero_point": True, "row_step": 3}),
    ("misaligned", 9, 256, 32, {"byte_offset": 1}),
]
LARGE: list[tuple[str, int, int, int, dict]] = [
    ("llama-8b-attention", 4096, 4096, 128, {}),
    ("llama-8b-up", 14336, 4096, 128, {}),
    ("llama-8b-down", 4096, 14336, 128, {}),
    ("llama-70b-up", 28672, 8192, 128, {}),
    ("llama-8b-up-zero-point", 14336, 4096, 128, {"has_zero_point": True}),
    ("llama-8b-up-group-32", 14336, 4096, 32, {}),
    ("int8-llama-8b-attention", 4096, 4096, 4096, {"bits": 8}),
    ("int8-llama-8b-up", 14336, 4096, 4096, {"bits": 8}),
    ("int8-llama-8b-up-group-128", 14336, 4096, 128, {"bits": 8}),
]
CASES = [
    *(Case(name, n, k, group, **options) for name, n, k, group, options in SHAPES),
    *(Case(f"int8-{name}", n, k, g, bits=8, **options) for name, n, k, g, options in SHAPES),
    *(
        Case(name, n, k, group, torch.bfloat16, large=True, **options)
        for name, n, k, group, options in LARGE
    ),
]
