"""Cases of `lowbit_kernels.quantize.quantize_blocks`."""

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
    tiles: bool = False
    dtype: torch.dtype = torch.bfloat16
    rows: bool = True
    columns: bool = True
    power_of_two: bool = False
    layout: str = "contiguous"  # or "transposed", "misaligned"
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, tiles, rows, columns, power_of_two, offsets."""
        x = laid_out_matrix(self.m, self.k, self.layout, self.dtype, device)
        return x, self.tiles, self.rows, self.columns, self.power_of_two, None


SHAPES: list[tuple[str, int, int, dict]] = [
    ("typical", 256, 384, {}),
    ("fp32", 130, 260, {"dtype": torch.float32}),
    ("fp16", 130, 260, {"dtype": torch.float16}),
    ("prime-everything", 131, 257, {}),
    ("prime-everything-fp32", 61, 67, {"dtype": torch.float32}),
    ("one-row", 1, 300, {}),
    ("one-column", 300, 1, {}),
    ("one-element", 1, 1, {}),
    ("no-rows", 0, 32, {}),
    ("no-columns", 16, 0, {}),
    ("rows-only", 70, 333, {"columns": False}),
    ("columns-only", 70, 333, {"rows": False}),
    ("neither", 7, 9, {"rows": False, "columns": False}),
    ("power-of-two", 140, 150, {"power_of_two": True}),
    ("transposed", 90, 170, {"layout": "transposed"}),
    ("misaligned", 140, 144, {"layout": "misaligned"}),
]
CASES = [
    *(Case(name, m, k, **options) for name, m, k, options in SHAPES),
    *(Case(f"tiles-{name}", m, k, True, **options) for name, m, k, options in SHAPES),
    Case("activation-8192-square", 8192, 8192, large=True),
    Case("activation-16384-7168", 16384, 7168, large=True),
    Case("activation-16384-7168-rows-only", 16384, 7168, columns=False, large=True),
    Case("weight-8192-square", 8192, 8192, True, large=True),
    Case("weight-8192-square-rows-only", 8192, 8192, True, columns=False, large=True),
]
