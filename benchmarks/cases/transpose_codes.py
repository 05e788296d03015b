"""Calls of `transpose_codes`: odd shapes and padded columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    shape: tuple[int, int, int]
    k: int
    dtype: torch.dtype = torch.int8
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """codes, k."""
        codes = torch.randint(0, 100, self.shape, dtype=torch.uint8, device=device)
        return codes.view(self.dtype), self.k


SHAPES: list[tuple[tuple[int, int, int], int]] = [
    ((3, 40, 48), 33),
    ((1, 130, 272), 272),
    ((2, 0, 16), 16),
    ((0, 4, 16), 5),
    ((2, 5, 16), 0),
]
CASES = [
    Case(f"{str(dtype)[6:]}-{'x'.join(map(str, shape))}-{k}", shape, k, dtype)
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    for shape, k in SHAPES
]
