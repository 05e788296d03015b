"""Rows alone, to nearest: every implementation of quantize_rowcol gives the bits of lowbit's dynamic schemes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowbit.schemes.presets import (
    Float8DynamicActivationFloat8Weight,
    Int8DynamicActivationInt8Weight,
)
from lowbit_kernels.quantize import quantize_rowcol, quantize_rows_sm90
from lowbit_kernels.quantize.quantize_rowcol import codes_of
from tests.kernels import emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.interpreted import interpreted


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    m: int
    k: int
    format: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    tensorwise: bool = False
    transposed: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, format, tensorwise."""
        shape = (self.k, self.m) if self.transposed else (self.m, self.k)
        x = torch.randn(shape, device=device) * torch.rand(shape[0], 1, device=device)
        x = x.to(self.dtype)
        return x.T if self.transposed else x, self.format, self.tensorwise


SHAPES: list[tuple[str, int, int, dict]] = [
    ("typical", 12, 256, {}),
    ("fp32", 9, 200, {"dtype": torch.float32}),
    ("fp16", 9, 200, {"dtype": torch.float16}),
    ("prime-everything", 13, 127, {}),
    ("one-row", 1, 300, {}),
    ("one-element", 1, 1, {}),
    ("long-rows", 3, 20_001, {}),
    ("no-rows", 0, 32, {}),
    ("no-columns", 16, 0, {}),
    ("transposed", 20, 30, {"transposed": True}),
]
CASES = [
    *(Case(name, m, k, **options) for name, m, k, options in SHAPES),
    *(Case(f"e4m3-{name}", m, k, "e4m3", **options) for name, m, k, options in SHAPES),
    *(Case(f"tensorwise-{name}", m, k, "e4m3", tensorwise=True, **o) for name, m, k, o in SHAPES),
]
FORMATS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
SCHEMES = {
    "int8": Int8DynamicActivationInt8Weight(),
    "e4m3": Float8DynamicActivationFloat8Weight(),
}
each_shape = pytest.mark.cover(
    "values",
    case=lambda c: (c.format, c.tensorwise, c.name.rpartition("wise-")[2].removeprefix("e4m3-")),
)


def by_scheme(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    activation = SCHEMES[format].activation
    assert activation is not None
    codes, scale, _ = activation.quantize(x)
    return codes, scale[:, 0]


def quantize_rows(x: torch.Tensor, format: str, tensorwise: bool = False) -> tuple:
    """The row pair of the op."""
    return torch.ops.lowbit.quantize_rowcol(x, format, True, False, tensorwise)[:2]


def reference(x: torch.Tensor, format: str, tensorwise: bool = False) -> tuple:
    return quantize_rowcol.reference(x, format, True, False, tensorwise)[:2]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 4: torch.int32}[x.itemsize])


def same(a: tuple, b: tuple) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("case", [c for c in CASES if not c.tensorwise], ids=lambda c: c.name)
def test_equals_the_dynamic_schemes(case: Case) -> None:
    x, format, _ = case.arguments()
    codes, scale = quantize_rows(x, format)
    assert codes.shape == (case.m, -(-case.k // 16) * 16) and not codes[:, case.k :].float().any()
    if x.numel():
        assert same((codes[:, : case.k].contiguous(), scale), by_scheme(x, format))


@settings(max_examples=60)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.sampled_from(["int8", "e4m3"]),
)
@example(row=[1e-45], format="int8")
def test_any_finite_row(row: list[float], format: str) -> None:
    x = torch.tensor([row])
    codes, scale = quantize_rows(x, format)
    expected = by_scheme(x, format)
    if not x.any():
        scale = torch.where(scale == 1, expected[1], torch.nan)  # of a row of zeros
    assert same((codes[:, : len(row)].contiguous(), scale), expected)


def test_one_scale_for_all_is_the_largest() -> None:
    x = torch.randn(9, 33)
    codes, scale = quantize_rows(x, "e4m3", tensorwise=True)
    assert scale.shape == (1,) and scale.item() == pytest.approx(x.abs().max().item() / 448)
    step = (codes[:, :33].float() * scale - x).abs() / x.abs().clamp(min=scale.item() / 64)
    assert step.max() <= 2.0**-4 + 1e-6


@pytest.mark.parametrize("format", ["int8", "e4m3"])
def test_nan_and_infinity_show_in_the_scale(format: str) -> None:
    x = torch.randn(4, 8)
    x[0, 1], x[1, 2], x[2, 3] = math.nan, math.inf, -math.inf
    codes, scale = quantize_rows(x, format)
    assert scale[:3].isnan().all() and scale[3].isfinite()
    if format == "int8":  # int8 has no code for them; lowbit uses 0
        assert not codes[:3].any() and torch.equal(codes[:, :8], by_scheme(x, format)[0])


INTERPRETED = """
import json, math, torch
from lowbit_kernels.quantize.quantize_rowcol import codes_of
from tests.kernels.test_quantize_rows import CASES, FORMATS, by_scheme, quantize_rows, reference, same

torch.manual_seed(0)
results = {}
for case in CASES:
    x, *rest = case.arguments()
    results[case.name] = same(quantize_rows(x, *rest), reference(x, *rest))
ties = (torch.arange(-256, 255) / 2).repeat(2, 1)
ties[1] *= 2.0**-140
results["ties"] = all(
    same((codes[:, :511].contiguous(), scale), by_scheme(ties, format))
    for format in ("int8", "e4m3") for codes, scale in [quantize_rows(ties, format)]
)
x = torch.randn(4, 8)
x[0, 1], x[1, 2], x[2, 3] = math.nan, math.inf, -math.inf
found = quantize_rows(x, "int8")[1]
results["not-finite"] = str(found[:3].tolist()) == "[nan, nan, nan]"
for name, format, dtype in (
    ("as-bfloat16", "int8", torch.bfloat16), ("e4m3-as-float16", "e4m3", torch.float16)
):
    codes, scale = codes_of(x[3:], format, dtype)
    results[name] = codes.dtype == dtype and same(
        (codes.to(FORMATS[format]), scale), reference(x[3:], format)
    )
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton() -> dict[str, bool]:
    return interpreted(INTERPRETED)


NAMES = [*(c.name for c in CASES), "ties", "not-finite", "as-bfloat16", "e4m3-as-float16"]


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernel(under_triton: dict[str, bool], name: str) -> None:
    assert under_triton[name]


def emulated(
    x: torch.Tensor, format: str, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the CUDA kernel when the CPU emulates it, in memory that is not zero."""
    with emulator.rows_quantization():
        return quantize_rows_sm90.quantize(x, format, dtype or FORMATS[format])


@pytest.mark.cover("values")
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["int8", "e4m3"])
@pytest.mark.parametrize(("m", "k"), [(3, 16), (2, 272), (40, 48), (1, 8208), (2, 33_024)])
def test_cuda_kernel_on_a_cpu(m: int, k: int, format: str, dtype: torch.dtype) -> None:
    x = (torch.randn(m, k) * torch.rand(m, 1)).to(dtype)
    x[0, -1], x[-1, 0] = -9.0, 8.0  # the extremes are the first and the last element
    assert same(emulated(x, format), reference(x, format))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_kernel_of_odd_values_on_a_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(9, 48).to(dtype)[:, :32]
    x[0] = 0
    x[1] *= torch.finfo(dtype).smallest_normal  # for bfloat16, also subnormal in float32
    x[2] *= torch.finfo(dtype).max / 8
    x[3, 5], x[4, 6], x[5, 7] = math.nan, math.inf, -math.inf
    x[6] = torch.arange(-16, 16).to(dtype) / 2 + 0.25
    x[7], x[8] = x[7].abs(), -x[8].abs()
    for format in ("int8", "e4m3"):
        codes, scale = emulated(x, format)
        assert str(scale[3:6].tolist()) == "[nan, nan, nan]" and not codes[3:6].float().any()
        finite = [0, 1, 2, 6, 7, 8]
        expected = tuple(part[finite] for part in reference(x, format))
        assert same((codes[finite], scale[finite]), expected)
    for format, numbers in (("int8", dtype), ("e4m3", torch.float16)):
        codes, scale = emulated(x[6:], format, numbers)
        assert codes.dtype == numbers
        assert same((codes.to(FORMATS[format]), scale), reference(x[6:], format))


@pytest.mark.parametrize("k", [16, 4096, 14336, 65536])
@pytest.mark.parametrize("m", [1, 1000])
def test_cuda_blocks_hold_their_row(m: int, k: int) -> None:
    own, threads = quantize_rows_sm90.plan(m, k)
    assert threads % 32 == 0 and 32 <= threads <= 1024 and own in (1, 2, 4, 8)
    assert own * threads * 8 >= k


@each_shape
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    """The first call brings the launcher in, the second teaches it this layout, and the third runs without Python."""
    for factor in (1, 2, 3):
        x, *rest = case.arguments("cuda")
        x.mul_(factor)
        assert same(quantize_rows(x, *rest), reference(x, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [101, 4096])
@pytest.mark.parametrize("tensorwise", [False, True])
def test_cuda_e4m3_as_numbers(tensorwise: bool, k: int) -> None:
    x = torch.randn(5, k, device="cuda").bfloat16()
    codes, scale = codes_of(x, "e4m3", torch.float16, tensorwise)
    assert codes.dtype == torch.float16
    assert same((codes.to(torch.float8_e4m3fn), scale), reference(x, "e4m3", tensorwise))


@pytest.mark.gpu
def test_cuda_ties() -> None:
    ties = (torch.arange(-256, 255) / 2).repeat(2, 1)
    ties[1] *= 2.0**-140
    for format in ("int8", "e4m3"):
        codes, scale = (part.cpu() for part in quantize_rows(ties.cuda(), format))
        assert same((codes[:, :511].contiguous(), scale), by_scheme(ties, format))
