"""Cases of `lowbit_kernels.quantize.quantize_rowcol`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.operands import laid_out_matrix


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    m: int
    k: int
    format: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    rows: bool = True
    columns: bool = True
    tensorwise: bool = False
    stochastic: bool = False
    factor: bool = False
    row_scales: bool = False
    layout: str = "contiguous"  # or "transposed", "strided", "misaligned"
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, format, rows, columns, tensorwise, seed, row_factor, row_scales."""
        x = laid_out_matrix(self.m, self.k, self.layout, self.dtype, device)
        seed = torch.tensor([2**40 + 77], device=device) if self.stochastic else None
        factor = torch.rand(self.k, device=device) + 0.1 if self.factor else None
        options = self.rows, self.columns, self.tensorwise
        return x, self.format, *options, seed, factor, self.row_scales


SHAPES: list[tuple[str, int, int, dict]] = [
    ("typical", 128, 256, {}),
    ("several-tiles", 300, 520, {}),
    ("fp32", 130, 200, {"dtype": torch.float32}),
    ("fp16", 130, 200, {"dtype": torch.float16}),
    ("prime-everything", 131, 127, {}),
    ("prime-everything-fp32", 61, 67, {"dtype": torch.float32}),
    ("one-row", 1, 300, {}),
    ("one-column", 300, 1, {}),
    ("one-element", 1, 1, {}),
    ("no-rows", 0, 32, {}),
    ("no-columns", 16, 0, {}),
    ("rows-only", 70, 333, {"columns": False}),
    ("long-rows-only", 3, 20_001, {"columns": False}),
    ("columns-only", 70, 333, {"rows": False}),
    ("neither", 7, 9, {"rows": False, "columns": False}),
    ("transposed", 90, 70, {"layout": "transposed"}),
    ("strided", 90, 70, {"layout": "strided"}),
    ("misaligned", 140, 144, {"layout": "misaligned"}),
    ("stochastic", 140, 150, {"stochastic": True}),
    ("stochastic-odd", 61, 67, {"stochastic": True, "dtype": torch.float32}),
    ("stochastic-rows-only", 61, 67, {"stochastic": True, "columns": False}),
    ("factor", 140, 150, {"factor": True}),
    ("factor-rows-only", 61, 67, {"factor": True, "columns": False, "dtype": torch.float32}),
    ("factor-stochastic", 130, 200, {"factor": True, "stochastic": True, "dtype": torch.float16}),
    ("row-scales", 140, 150, {"row_scales": True}),
    ("row-scales-columns-only", 131, 127, {"row_scales": True, "rows": False}),
]
TENSORWISE: list[tuple[str, int, int, dict]] = [
    ("tensorwise", 140, 150, {}),
    ("tensorwise-rows-only", 140, 150, {"columns": False}),
    ("tensorwise-columns-only", 61, 67, {"rows": False, "dtype": torch.float32}),
    ("tensorwise-stochastic", 61, 67, {"stochastic": True}),
    ("tensorwise-no-rows", 0, 5, {}),
]
LARGE = [
    ("8192-square", 8192, 8192),
    ("llama-8b-attention", 8192, 4096),
    ("llama-8b-down", 8192, 14336),
    ("weight", 4096, 4096),
]
CASES = [
    *(Case(name, m, k, **options) for name, m, k, options in SHAPES),
    *(Case(f"e4m3-{name}", m, k, "e4m3", **options) for name, m, k, options in SHAPES),
    *(Case(f"e4m3-{n}", m, k, "e4m3", tensorwise=True, **o) for n, m, k, o in TENSORWISE),
    Case("e5m2", 130, 200, "e5m2"),
    Case("e5m2-stochastic", 130, 200, "e5m2", stochastic=True),
    Case("e5m2-tensorwise", 130, 200, "e5m2", tensorwise=True),
    *(Case(name, m, k, large=True) for name, m, k in LARGE),
    Case("factor-llama-8b-attention", 8192, 4096, factor=True, large=True),
    Case("row-scales-weight", 4096, 4096, rows=False, row_scales=True, large=True),
    Case("rows-only-llama-8b-attention", 8192, 4096, columns=False, large=True),
    Case("stochastic-llama-8b-attention", 8192, 4096, stochastic=True, large=True),
    Case(
        "stochastic-rows-only-llama-8b-attention",
        *(8192, 4096),
        columns=False,
        stochastic=True,
        large=True,
    ),
]
