"""Cases of `lowbit_kernels.matmul.scaled_mm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases.operands import ProductCase, bias_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Case(ProductCase):
    """One call, with random arguments."""

    a_dtype: torch.dtype = torch.int8
    b_dtype: torch.dtype | None = None  # a's
    rowwise: bool = True  # a scale for each row of both operands, or one for each operand
    bias: torch.dtype | None = None
    out_dtype: torch.dtype = torch.bfloat16
    row_step: int = 1  # every n-th row of larger operands
    transposed_copy: bool = False  # each operand is a copy's transpose: a single row has stride 1

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """a, b, a_scale, b_scale, bias, out_dtype."""

        def operand(rows: int, dtype: torch.dtype) -> Tensor:
            size = (rows * self.row_step, self.k)
            if dtype == torch.int8:
                codes = torch.randint(-127, 128, size, dtype=dtype, device=device)
            else:
                codes = (torch.randn(size, device=device) * 16).to(dtype)
            if self.transposed_copy:
                codes = codes.new_empty((self.k, rows)).copy_(codes.T).T.contiguous()
            return codes[:: self.row_step]

        def scale(rows: int) -> Tensor:
            found = torch.rand(rows if self.rowwise else 1, device=device) * 0.01 + 1e-4
            found[1::3] *= -1  # scales may be negative
            return found

        bias = bias_of(self.n, self.bias, device)
        return (
            operand(self.m, self.a_dtype),
            operand(self.n, self.b_dtype or self.a_dtype),
            scale(self.m),
            scale(self.n),
            bias,
            self.out_dtype,
        )


SHAPES: list[tuple[str, int, int, int, dict]] = [
    ("typical", 128, 256, 128, {}),
    ("one-scale", 64, 96, 64, {"rowwise": False}),
    ("bias", 65, 72, 80, {"bias": torch.bfloat16}),
    ("fp16", 40, 24, 48, {"out_dtype": torch.float16, "bias": torch.float16}),
    ("fp32", 33, 48, 64, {"out_dtype": torch.float32, "bias": torch.float32}),
    ("bias-of-another-dtype", 31, 48, 64, {"bias": torch.float32}),
    ("prime-everything", 131, 127, 16, {}),
    ("odd-columns-fp32", 17, 19, 32, {"out_dtype": torch.float32}),
    ("one-row", 1, 64, 256, {}),
    ("one-column", 70, 1, 144, {}),
    ("one-element", 1, 1, 16, {}),
    ("one-row-transposed", 1, 64, 16, {"transposed_copy": True}),
    ("one-column-transposed", 16, 1, 144, {"transposed_copy": True}),
    ("one-element-transposed", 1, 1, 64, {"transposed_copy": True}),
    ("several-tiles", 300, 520, 272, {}),
    ("several-tiles-and-an-odd-one", 257, 514, 400, {"bias": torch.bfloat16}),
    ("long-sums", 8, 16, 20_000, {"out_dtype": torch.float32}),
    ("no-rows", 0, 32, 64, {}),
    ("no-columns", 16, 0, 64, {"bias": torch.bfloat16}),
    ("no-k", 5, 7, 0, {"bias": torch.float32}),
    ("strided-rows", 50, 60, 64, {"row_step": 3}),
]
LARGE = [
    ("8192-cubed", 8192, 8192, 8192),
    ("llama-8b-attention", 8192, 4096, 4096),
    ("llama-8b-up", 8192, 14336, 4096),
    ("llama-8b-down", 8192, 4096, 14336),
    ("llama-1b-key-gradient", 512, 2048, 16384),
]
CASES = [
    *(Case(name, m, n, k, **options) for name, m, n, k, options in SHAPES),
    *(Case(f"e4m3-{name}", m, n, k, E4M3, **options) for name, m, n, k, options in SHAPES),
    Case("e5m2-e4m3", 48, 64, 96, E5M2, E4M3),
    Case("e4m3-e5m2", 48, 64, 96, E4M3, E5M2, bias=torch.bfloat16),
    Case("e5m2-e4m3-one-scale", 30, 34, 96, E5M2, E4M3, rowwise=False),
    *(Case(name, m, n, k, large=True) for name, m, n, k in LARGE),
    *(Case(f"e4m3-{name}", m, n, k, E4M3, large=True) for name, m, n, k in LARGE),
]
