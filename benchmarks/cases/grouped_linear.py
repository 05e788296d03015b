"""Calls of `grouped_linear`: distributions of tokens over experts, and the shapes of Mixtral's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases import weight_linear
from benchmarks.cases.formats import FORMATS
from benchmarks.cases.operands import offsets_of

BY_NAME = {one.name: one for one in FORMATS}


@dataclass(frozen=True)
class Case:
    """One call, with random arguments. `format`: of codes; "": integers of `bits`."""

    name: str
    tokens: tuple[int, ...]  # of each expert
    n: int
    k: int
    group_size: int
    bits: int = 4
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.bfloat16
    zero_point: bool = False
    beyond: int = 0  # tokens that belong to no expert
    format: str = ""
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, codes, scale, zero_point, offsets, group_size, global_scale, bits, table."""
        m, experts = sum(self.tokens) + self.beyond, len(self.tokens)
        if self.format:
            made = BY_NAME[self.format].weight(experts * self.n, self.k, self.group_size, device)
            parts = (made[name] for name in ("codes", "scale", "zero_point"))
            return (
                torch.randn(m, self.k, device=device).to(self.dtype),
                *(None if t is None else t.view(experts, self.n, -1) for t in parts),
                offsets_of(self.tokens, device),
                *(made[name] for name in ("group_size", "global_scale", "bits", "table")),
            )
        one = weight_linear.Case("", 0, experts * self.n, self.k, self.group_size, self.bits)
        _, codes, scale, *_ = one.arguments(device)
        shape = (experts, self.n, scale.shape[1])
        zero_point = torch.randint(-8, 8, shape, dtype=torch.int8, device=device)
        return (
            torch.randn(m, self.k, device=device).to(self.dtype),
            codes.view(experts, self.n, -1) if codes.numel() else codes.view(experts, self.n, 0),
            scale.view(shape).to(self.scale_dtype),
            zero_point if self.zero_point else None,
            offsets_of(self.tokens, device),
            self.group_size,
            None,
            0,
            (),
        )


SHAPES: list[tuple[str, tuple[int, ...], int, int, int, dict]] = [
    ("typical", (5, 17, 1, 9), 48, 256, 128, {}),
    ("empty-experts", (0, 3, 0, 0, 20, 0), 33, 160, 32, {"zero_point": True}),
    ("one-expert", (7,), 24, 128, 64, {}),
    ("beyond", (2, 3), 24, 130, 64, {"beyond": 4, "zero_point": True}),
    ("nothing-but-beyond", (0, 0), 16, 64, 32, {"beyond": 3}),
    ("per-row", (3, 40, 2), 17, 99, 99, {"dtype": torch.float16, "scale_dtype": torch.float32}),
    ("fp32", (3, 4, 2), 17, 96, 32, {"dtype": torch.float32}),
    ("odd-group", (3, 4), 9, 45, 9, {}),
    ("no-tokens", (0, 0), 8, 64, 32, {}),
]
CASES = [
    *(Case(name, t, n, k, group, **options) for name, t, n, k, group, options in SHAPES),
    *(
        Case(f"int8-{name}", t, n, k, group, 8, **options)
        for name, t, n, k, group, options in SHAPES
    ),
    Case("mxfp4", (3, 0, 20), 64, 128, 32, format="mxfp4"),
    Case("mxfp4-beyond", (40, 1), 66, 96, 32, beyond=3, format="mxfp4"),
    Case("nvfp4", (3, 4), 18, 64, 16, format="nvfp4"),
    Case("nf4", (3, 17), 18, 128, 64, format="nf4"),
    Case("int3", (3, 17), 18, 128, 128, format="int3"),
    Case("float8", (5, 17), 48, 128, 0, format="float8_e4m3fn"),
    Case("mixtral-up", (2,) * 8, 14336, 4096, 128, large=True),
    Case("mixtral-up-many", (256,) * 8, 14336, 4096, 128, large=True),
]
