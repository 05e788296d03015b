"""Calls of `dynamic_linear` in int8, int8 by int4, float8 and float8 by FP4, small and at shapes of real layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases.operands import ProductCase

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case(ProductCase):
    """One call, with random arguments."""

    format: str = "int8"  # of the weight: "int8", "int4", "e4m3", "mxfp4" or "nvfp4"
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.float32
    bias: bool = False
    residual: bool = False
    tensorwise: bool = False  # one scale for all of x
    one_scale: bool = False  # one scale for the whole weight
    leading: tuple[int, ...] = ()  # dimensions before M
    group: int = 0  # of "int4"
    zero: bool = False  # "int4" has zero points

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, codes, scale, bias, residual, tensorwise, zero_point, group_size, global_scale."""

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        codes = torch.randn(self.n, self.k, device=device) * (112 if self.format == "e4m3" else 32)
        codes = (
            codes.clamp(-448, 448).to(E4M3)
            if self.format == "e4m3"
            else codes.round().clamp(-128, 127).to(torch.int8)
        )
        scale_shape: tuple[int, ...] = (1 if self.one_scale else self.n,)
        zero_point, group = None, 0
        if self.format == "int4":
            group = self.group or max(self.k, 1)
            groups = -(-self.k // group)
            size = self.n, -(-groups * group // 2)
            codes = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
            scale_shape = self.n, groups
            if self.zero:
                zero_point = torch.randint(-8, 8, scale_shape, dtype=torch.int8, device=device)
        scale = torch.rand(scale_shape, device=device) * 0.01 + 1e-4
        scale[1::3] *= -1  # a weight's scales may be negative
        scale, global_scale = scale.to(self.scale_dtype), None
        if self.format in ("mxfp4", "nvfp4"):
            group = 32 if self.format == "mxfp4" else 16
            size = self.n, -(-self.k // group) * group // 2
            codes = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
            size = self.n, -(-self.k // group)
            if self.format == "mxfp4":
                scale = torch.randint(110, 124, size, dtype=torch.uint8, device=device)
            else:
                scale = (torch.rand(size, device=device) * 448).to(E4M3)
                global_scale = torch.tensor([1e4], device=device)
        return (
            floats(*self.leading, self.m, self.k),
            codes,
            scale,
            floats(self.n) if self.bias else None,
            floats(*self.leading, self.m, self.n) if self.residual else None,
            self.tensorwise,
            zero_point,
            group,
            global_scale,
        )


SHAPES: list[tuple[str, int, int, int, dict]] = [
    ("typical", 40, 64, 128, {"bias": True}),
    ("one-token", 1, 48, 256, {"residual": True}),
    ("few-tokens", 9, 33, 96, {"bias": True, "residual": True}),
    ("fp32", 17, 24, 64, {"dtype": torch.float32, "bias": True}),
    ("fp16", 17, 24, 64, {"dtype": torch.float16}),
    ("bf16-scales", 20, 24, 64, {"scale_dtype": torch.bfloat16}),
    ("prime-everything", 31, 37, 101, {"bias": True}),
    ("one-element", 1, 1, 1, {}),
    ("leading", 3, 24, 64, {"leading": (2, 2), "residual": True}),
    ("no-tokens", 0, 32, 64, {"bias": True}),
    ("no-rows", 4, 0, 64, {}),
    ("no-k", 4, 6, 0, {"bias": True}),
]
TENSORWISE: list[tuple[str, int, int, int, dict]] = [
    ("tensorwise", 40, 64, 128, {"one_scale": True, "bias": True}),
    ("tensorwise-activation", 9, 33, 101, {}),
    ("tensorwise-no-tokens", 0, 32, 64, {"one_scale": True}),
]
INT4: list[tuple[str, int, int, int, dict]] = [
    ("typical", 40, 64, 256, {"group": 128, "bias": True, "scale_dtype": torch.bfloat16}),
    ("one-token", 1, 48, 256, {"group": 32, "residual": True, "zero": True}),
    ("few-tokens", 9, 33, 96, {"group": 32, "bias": True, "residual": True}),
    ("many-tokens", 300, 72, 320, {"group": 64, "bias": True, "residual": True, "zero": True}),
    ("odd-rows", 150, 37, 1000, {"group": 128, "zero": True, "dtype": torch.float16}),
    ("one-group", 140, 40, 160, {"bias": True}),
    ("prime-everything", 31, 37, 101, {"group": 32, "zero": True, "bias": True}),
    ("short-groups", 150, 24, 48, {"group": 16, "zero": True}),
    ("leading", 3, 24, 64, {"group": 32, "leading": (2, 2), "residual": True}),
    ("fp32", 17, 24, 64, {"group": 32, "dtype": torch.float32}),
    ("no-tokens", 0, 32, 64, {"group": 32, "bias": True}),
    ("no-rows", 4, 0, 64, {"group": 32}),
    ("no-k", 4, 6, 0, {"group": 32, "bias": True}),
]
FP4: list[tuple[str, int, int, int, dict]] = [
    ("typical", 40, 64, 256, {"bias": True}),
    ("one-token", 1, 48, 256, {"residual": True}),
    ("many-tokens", 300, 72, 320, {"bias": True, "residual": True}),
    ("odd-rows", 150, 37, 1000, {"dtype": torch.float16}),
    ("prime-everything", 31, 37, 101, {"bias": True}),
    ("leading", 3, 24, 64, {"leading": (2, 2), "residual": True}),
    ("fp32", 17, 24, 64, {"dtype": torch.float32}),
    ("no-tokens", 0, 32, 64, {"bias": True}),
    ("no-k", 4, 6, 0, {"bias": True}),
]
CASES = [
    *(Case(name, m, n, k, **options) for name, m, n, k, options in SHAPES),
    *(Case(f"e4m3-{name}", m, n, k, "e4m3", **options) for name, m, n, k, options in SHAPES),
    *(Case(f"e4m3-{c}", m, n, k, "e4m3", tensorwise=True, **o) for c, m, n, k, o in TENSORWISE),
    *(Case(f"int4-{name}", m, n, k, "int4", **options) for name, m, n, k, options in INT4),
    *(Case(f"{f}-{c}", m, n, k, f, **o) for f in ("mxfp4", "nvfp4") for c, m, n, k, o in FP4),
    Case("e4m3-one-scale", 9, 33, 96, "e4m3", one_scale=True),
    Case("8192-cubed", 8192, 8192, 8192, large=True),
    Case("llama-8b-up", 8192, 14336, 4096, large=True),
    Case("llama-8b-up-one-token", 1, 14336, 4096, large=True),
    Case("e4m3-8192-cubed", 8192, 8192, 8192, "e4m3", large=True),
]
