"""Cases of `lowbit_kernels.matmul.block_scaled_mm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases.operands import ProductCase, bias_of
from lowbit_kernels.quantize.quantize_blocks import quantize_blocks


@dataclass(frozen=True)
class Case(ProductCase):
    """One call, with random arguments."""

    tiles: bool = True  # b has scales of tiles; otherwise of groups
    bias: torch.dtype | None = None
    out_dtype: torch.dtype = torch.bfloat16

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """a, b, a_scale, b_scale, bias, out_dtype."""

        def operand(rows: int, tiles: bool) -> tuple[Tensor, Tensor]:
            size = torch.rand(rows, 1, device=device) + 0.25  # rows of several magnitudes
            x = torch.randn(rows, self.k, device=device) * size
            codes, scale, _, _ = quantize_blocks(x, tiles=tiles, columns=False)
            return codes, scale

        (a, a_scale), (b, b_scale) = operand(self.m, False), operand(self.n, self.tiles)
        bias = bias_of(self.n, self.bias, device)
        return a, b, a_scale, b_scale, bias, self.out_dtype


SHAPES: list[tuple[str, int, int, int, dict]] = [
    ("typical", 128, 256, 256, {}),
    ("bias", 65, 72, 128, {"bias": torch.bfloat16}),
    ("fp16", 40, 24, 384, {"out_dtype": torch.float16, "bias": torch.float16}),
    ("fp32", 33, 48, 128, {"out_dtype": torch.float32, "bias": torch.float32}),
    ("bias-of-another-dtype", 31, 48, 128, {"bias": torch.float32}),
    ("prime-everything", 131, 127, 128, {}),
    ("odd-columns-fp32", 17, 19, 256, {"out_dtype": torch.float32}),
    ("one-row", 1, 64, 256, {}),
    ("one-column", 70, 1, 256, {}),
    ("one-element", 1, 1, 128, {}),
    ("several-tiles", 300, 520, 384, {}),
    ("several-tiles-and-an-odd-one", 515, 386, 640, {"bias": torch.bfloat16}),
    ("long-sums", 8, 16, 20_096, {"out_dtype": torch.float32}),
    ("no-rows", 0, 32, 128, {}),
    ("no-columns", 16, 0, 128, {"bias": torch.bfloat16}),
    ("no-k", 5, 7, 0, {"bias": torch.float32}),
]
LARGE = [
    ("deepseek-v3", 4096, 7168, 16384),
    ("deepseek-v3-down", 16384, 7168, 2048),
    ("llama-8b-attention", 8192, 4096, 4096),
    ("llama-8b-up", 8192, 14336, 4096),
    ("llama-8b-down", 8192, 4096, 14336),
]
FP32 = torch.float32
CASES = [
    *(Case(name, m, n, k, **options) for name, m, n, k, options in SHAPES),
    *(Case(f"groups-{name}", m, n, k, False, **options) for name, m, n, k, options in SHAPES),
    *(Case(name, m, n, k, large=True) for name, m, n, k in LARGE),
    *(Case(f"groups-{n}", m, i, k, False, out_dtype=FP32, large=True) for n, m, i, k in LARGE),
]
