"""Calls of `quantize_grouped`: distributions of tokens over experts, formats and odd shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.operands import offsets_of


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    tokens: tuple[int, ...]  # of each expert
    k: int
    format: str = "int8"
    rows: bool = True
    columns: bool = True
    dtype: torch.dtype = torch.bfloat16
    seed: int | None = None
    factor: bool = False
    beyond: int = 0  # tokens that belong to no expert
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, offsets, format, rows, columns, seed, row_factor."""
        m, experts = sum(self.tokens) + self.beyond, len(self.tokens)
        x = torch.randn(m, self.k, device=device) * torch.rand(m, 1, device=device).exp2()
        factor = torch.rand(experts, self.k, device=device) + 0.5
        return (
            x.to(self.dtype),
            offsets_of(self.tokens, device),
            *(self.format, self.rows, self.columns),
            None if self.seed is None else torch.tensor([self.seed], device=device),
            factor if self.factor else None,
        )


FORMS: list[tuple[str, dict]] = [
    ("int8", {}),
    ("e4m3", {"format": "e4m3"}),
    ("e5m2", {"format": "e5m2", "dtype": torch.float16}),
    ("factor", {"factor": True}),
    ("stochastic", {"seed": 1234, "factor": True}),
    ("e4m3-stochastic", {"format": "e4m3", "seed": 9}),
    ("columns", {"rows": False, "dtype": torch.float32}),
    ("factored-rows", {"columns": False, "factor": True}),
]
SHAPES: list[tuple[str, tuple[int, ...], int, int]] = [
    ("typical", (5, 137, 1, 256), 272, 0),
    ("empty-experts", (0, 0, 131, 0, 20, 0), 99, 0),
    ("one-has-all", (0, 300, 0), 144, 0),
    ("beyond", (2, 130), 130, 40),
    ("nothing-but-beyond", (0, 0), 16, 3),
    ("no-tokens", (0, 0), 16, 0),
]
CASES = [
    Case(f"{form}-{name}", tokens, k, beyond=beyond, **options)
    for form, options in FORMS
    for name, tokens, k, beyond in SHAPES
]
