"""Cases of `lowbit_kernels.elementwise.fake_quantize`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.granularity import PerGroup, PerRow
from lowbit.numerics.lookup_table import E2M1
from lowbit.numerics.number_format import Float8, Int, NumberFormat
from lowbit.numerics.spec import Spec
from lowbit_kernels.elementwise.grid import E4M3, Grid


@dataclass(frozen=True)
class Case:
    """One call, with random arguments; `spec` has scales of rows or of groups."""

    name: str
    rows: int
    columns: int
    spec: Spec
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.float32
    row_step: int = 1  # every n-th row of a larger matrix
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    @property
    def grid(self) -> Grid:
        fmt = self.spec.format
        name = (
            str(fmt.dtype).lower().removeprefix("torch.").replace("float8_", "").removesuffix("fn")
        )
        return Grid(
            *(self.spec.mapping, name, float(fmt.quant_min), float(fmt.quant_max)),
            self.spec.scale_format,
        )

    def global_scale(self, x: Tensor) -> Tensor | None:
        if self.grid.scales != E4M3:
            return None
        return self.spec.joint_part([x], torch.float32).flatten()

    @property
    def group_size(self) -> int:
        return self.spec.block_size((self.rows, self.columns))[1]

    def x(self, device: torch.device | str = "cpu") -> Tensor:
        rows = self.rows * self.row_step
        x = torch.randn(rows, self.columns, device=device) * torch.rand(rows, 1, device=device)
        return x.to(self.dtype)[:: self.row_step]

    def arguments(self, device: torch.device | str = "cpu", inside: bool = True) -> tuple[Any, ...]:
        """The arguments of the op, without parameters."""
        dtypes, x = (self.scale_dtype, self.dtype), self.x(device)
        end = (inside, None, self.global_scale(x))
        return (x, None, None, self.group_size, self.grid.name, *dtypes, *end)


def specs() -> dict[str, tuple[NumberFormat, Any]]:
    """Formats with their mappings, by name."""
    found: dict[str, tuple[NumberFormat, Any]] = {
        "int4": (Int(4), "symmetric"),
        "int4-unclipped": (Int(4), "symmetric_no_clipping_err"),
        "int4-asymmetric": (Int(4), "asymmetric"),
        "int4-float-zero": (Int(4), "float_zero_point"),
        "uint4": (Int(4, signed=False), "symmetric"),
        "uint4-asymmetric": (Int(4, signed=False), "asymmetric"),
        "int2-half": (Int(2), "half_integer"),
        "uint2-half": (Int(2, signed=False), "half_integer"),
        "int1-half": (Int(1), "half_integer"),
        "int1-asymmetric": (Int(1), "asymmetric"),
        "e4m3": (Float8(), "symmetric"),
        "e5m2": (Float8(torch.float8_e5m2), "symmetric"),
        "e2m1": (E2M1, "symmetric"),
    }
    for bits in (2, 3, 5, 6, 7, 8):
        found[f"int{bits}"] = Int(bits), "symmetric"
    for mapping in ("asymmetric", "float_zero_point", "symmetric_no_clipping_err"):
        found[f"int8-{mapping}"] = Int(8), mapping
        found[f"uint8-{mapping}"] = Int(8, signed=False), mapping
    return found


def microscaled() -> dict[str, Spec]:
    """Formats whose scales are stored as powers of two, or as e4m3 numbers over a global scale, by name."""
    found = {}
    for mapping in ("symmetric", "symmetric_no_clipping_err"):
        for fmt in (E2M1, Float8(), Float8(torch.float8_e5m2)):
            name = str(fmt.dtype).lower().rsplit("_")[-1].removesuffix("fn")
            found[f"mx-{name}-{mapping}"] = Spec(fmt, PerGroup(32), mapping, scale_format="e8m0")
    found["nvfp4"] = Spec(E2M1, PerGroup(16), scale_format="e4m3")
    return found


# name, rows, columns, group (None: a row), options
SHAPES: list[tuple[str, int, int, int | None, dict[str, Any]]] = [
    ("groups", 6, 96, 32, {}),
    ("rows-fp32", 5, 101, None, {"dtype": torch.float32}),
    ("padded-fp16", 3, 45, 16, {"dtype": torch.float16, "scale_dtype": torch.float16}),
    ("odd-groups", 4, 33, 7, {"scale_dtype": torch.bfloat16}),
]
EDGES: list[tuple[str, int, int, int | None, dict[str, Any]]] = [
    ("long-rows", 2, 17_001, None, {}),
    ("one-element", 1, 1, None, {}),
    ("group-of-one", 3, 9, 1, {}),
    ("group-longer-than-a-row", 3, 5, 64, {}),
    ("many-groups", 43, 64, 8, {}),
    ("one-column", 37, 1, None, {"dtype": torch.float32}),
    ("strided-rows", 7, 64, 32, {"row_step": 3}),
    ("no-rows", 0, 32, 8, {}),
    ("no-columns", 4, 0, 8, {}),
]


WITH_EDGES = ("int4", "e4m3", "mx-e2m1-symmetric", "nvfp4")


def _case(name: str, n: int, k: int, group: int | None, kind: str, **options: Any) -> Case:
    granularity = PerRow() if group is None else PerGroup(group)
    if kind in microscaled():
        spec = replace(microscaled()[kind], granularity=granularity)
    else:
        fmt, mapping = specs()[kind]
        spec = Spec(fmt, granularity, mapping)
    return Case(f"{kind}-{name}", n, k, spec, **options)


CASES = [
    *(_case(n, r, c, g, kind, **o) for kind in specs() for n, r, c, g, o in SHAPES),
    *(_case(n, r, c, g, kind, **o) for kind in microscaled() for n, r, c, g, o in SHAPES),
    *(_case(n, r, c, g, kind, **o) for kind in WITH_EDGES for n, r, c, g, o in EDGES),
    _case("llama-1b-up", 8192, 2048, 128, "int4", scale_dtype=torch.bfloat16, large=True),
    _case(
        "llama-1b-down", 2048, 8192, 32, "int4-unclipped", scale_dtype=torch.bfloat16, large=True
    ),
    _case(
        "llama-1b-up-zero",
        8192,
        2048,
        32,
        "int4-float-zero",
        scale_dtype=torch.bfloat16,
        large=True,
    ),
    _case("gpt-oss-up", 32 * 5760, 2880, 32, "mx-e2m1-symmetric_no_clipping_err", large=True),
    _case("gpt-oss-up", 32 * 5760, 2880, 16, "nvfp4", large=True),
    _case("llama-1b-up", 8192, 2048, 32, "mx-e2m1-symmetric", large=True),
    _case("llama-1b-up", 8192, 2048, 32, "mx-e4m3-symmetric_no_clipping_err", large=True),
    _case("tokens-of-2048", 16384, 2048, None, "int8-symmetric_no_clipping_err", large=True),
    _case("tokens-of-8192", 16384, 8192, None, "int8-symmetric_no_clipping_err", large=True),
]
