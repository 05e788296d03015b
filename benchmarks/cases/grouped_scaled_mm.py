"""Calls of `grouped_scaled_mm`: distributions of tokens over experts, both products, and the shapes of real experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.operands import codes_of_normals, offsets_of
from lowbit_kernels.matmul import grouped_columns

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    tokens: tuple[int, ...]  # of each expert
    n: int
    k: int
    ragged: bool = False  # the product that sums over tokens
    a_dtype: torch.dtype = torch.int8
    b_dtype: torch.dtype = torch.int8
    out_dtype: torch.dtype = torch.bfloat16
    one_scale: bool = False  # for all columns
    beyond: int = 0  # tokens that belong to no expert
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """a, b, a_scale, b_scale, offsets, out_dtype."""
        m, experts = sum(self.tokens) + self.beyond, len(self.tokens)
        offsets = offsets_of(self.tokens, device)
        if self.ragged:
            width = grouped_columns.width(m, experts)
            shapes: tuple = ((self.n, width), (self.k, width), (experts, self.n), (experts, self.k))
        else:
            shapes = ((m, self.k), (experts, self.n, self.k), (m,), (experts, self.n))
        dtypes = self.a_dtype, self.b_dtype
        a, b = (codes_of_normals(s, d, device) for s, d in zip(shapes[:2], dtypes, strict=True))
        if self.ragged:
            unused = ~inside(offsets, m, width)
            a, b = (_zeroed(x, unused) for x in (a, b))
        a_scale, b_scale = (torch.rand(shape, device=device) / 50 + 0.01 for shape in shapes[2:])
        b_scale.flatten()[1::3] *= -1  # a weight's scales may be negative
        b_scale = b_scale.flatten()[:1] if self.one_scale else b_scale
        return a, b, a_scale, b_scale, offsets, self.out_dtype


def inside(offsets: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """bool [width]: which columns of transposed copies belong to a token."""
    counts = grouped_columns.counts(offsets, tokens)
    first = grouped_columns.starts(counts)
    column = torch.arange(width, device=offsets.device)[:, None]
    return ((column >= first) & (column < first + counts)).any(1)


def _zeroed(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).masked_fill(unused, 0).view(x.dtype)


SHAPES: list[tuple[str, tuple[int, ...], int, int, dict]] = [
    ("typical", (5, 17, 1, 9), 48, 64, {}),
    ("empty-experts", (0, 131, 0, 0, 20, 0), 33, 160, {"out_dtype": torch.float16}),
    ("one-has-all", (0, 0, 300), 40, 144, {"one_scale": True}),
    ("beyond", (2, 130), 130, 48, {"beyond": 40, "out_dtype": torch.float32}),
    ("nothing-but-beyond", (0, 0), 16, 32, {"beyond": 3}),
    ("wide", (70, 3, 5), 300, 144, {}),
    ("no-tokens", (0, 0), 8, 64, {}),
    ("no-columns", (2, 3), 0, 64, {}),
]
CASES = [
    Case(f"{kind}{'-columns' if ragged else ''}-{name}", tokens, n, k, ragged, *dtypes, **options)
    for kind, dtypes in (("int8", ()), ("e4m3", (E4M3, E4M3)), ("e5m2", (E5M2, E4M3)))
    for ragged in (False, True)
    for name, tokens, n, k, options in SHAPES
]
