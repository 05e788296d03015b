"""quantize_tokens: every implementation gives the bits of lowbit's dynamic schemes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.quantize_tokens import CASES, Case
from lowbit.schemes.presets import (
    Float8DynamicActivationFloat8Weight,
    Int8DynamicActivationInt8Weight,
)
from lowbit_kernels.quantize import quantize_tokens_sm90
from lowbit_kernels.quantize.quantize_tokens import (
    FORMATS,
    codes_of,
    quantize_tokens,
    reference,
)
from tests.kernels import emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]
OP = torch.ops.lowbit.quantize_tokens
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


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 4: torch.int32}[x.itemsize])


def same(a: tuple, b: tuple) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("case", [c for c in SMALL if not c.tensorwise], ids=lambda c: c.name)
def test_equals_the_dynamic_schemes(case: Case) -> None:
    x, format, _ = case.arguments()
    codes, scale = quantize_tokens(x, format)
    assert codes.shape == (case.m, -(-case.k // 16) * 16) and not codes[:, case.k :].float().any()
    if x.numel():
        assert same((codes[:, : case.k].contiguous(), scale), by_scheme(x, format))


@settings(max_examples=60)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.sampled_from(["int8", "e4m3"]),
)
def test_any_finite_row(row: list[float], format: str) -> None:
    x = torch.tensor([row])
    codes, scale = quantize_tokens(x, format)
    assert same((codes[:, : len(row)].contiguous(), scale), by_scheme(x, format))


def test_one_scale_for_all_is_the_largest() -> None:
    x = torch.randn(9, 33)
    codes, scale = quantize_tokens(x, "e4m3", tensorwise=True)
    assert scale.shape == (1,) and scale.item() == pytest.approx(x.abs().max().item() / 448)
    step = (codes[:, :33].float() * scale - x).abs() / x.abs().clamp(min=scale.item() / 64)
    assert step.max() <= 2.0**-4 + 1e-6


@pytest.mark.parametrize("format", ["int8", "e4m3"])
def test_nan_and_infinity_show_in_the_scale(format: str) -> None:
    x = torch.randn(4, 8)
    x[0, 1], x[1, 2], x[2, 3] = math.nan, math.inf, -math.inf
    codes, scale = quantize_tokens(x, format)
    assert scale[0].isnan() and scale[1].isinf() and scale[2].isinf() and scale[3].isfinite()
    if format == "int8":  # int8 has no code for them; lowbit uses 0
        assert not codes[:3].any() and torch.equal(codes[:, :8], by_scheme(x, format)[0])


INTERPRETED = """
import json, math, torch
from lowbit_kernels.quantize.quantize_tokens import FORMATS, codes_of, reference
from tests.kernels.test_quantize_tokens import OP, SMALL, by_scheme, same

torch.manual_seed(0)
results = {}
for case in SMALL:
    x, *rest = case.arguments()
    results[case.name] = same(OP(x, *rest), reference(x, *rest))
ties = (torch.arange(-256, 255) / 2).repeat(2, 1)
ties[1] *= 2.0**-140
results["ties"] = all(
    same((codes[:, :511].contiguous(), scale), by_scheme(ties, format))
    for format in ("int8", "e4m3") for codes, scale in [OP(ties, format)]
)
x = torch.randn(4, 8)
x[0, 1], x[1, 2], x[2, 3] = math.nan, math.inf, -math.inf
found = OP(x, "int8")[1]
results["not-finite"] = str(found[:3].tolist()) == "[nan, inf, inf]"
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


NAMES = [*(c.name for c in SMALL), "ties", "not-finite", "as-bfloat16", "e4m3-as-float16"]


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernel(under_triton: dict[str, bool], name: str) -> None:
    assert under_triton[name]


def emulated(
    x: torch.Tensor, format: str, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the CUDA kernel when the CPU emulates it; codes that it does not write stay -1."""
    codes = torch.full(x.shape, -1.0).to(dtype or FORMATS[format])
    scale = torch.full((len(x),), -1.0)
    emulator.quantize_tokens(x, codes, scale, format)
    return codes, scale


@pytest.mark.cover("pairs")
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
        assert str(scale[3:6].tolist()) == "[nan, inf, inf]" and not codes[3:6].float().any()
        finite = [0, 1, 2, 6, 7, 8]
        expected = tuple(part[finite] for part in reference(x, format))
        assert same((codes[finite], scale[finite]), expected)
    for format, numbers in (("int8", dtype), ("e4m3", torch.float16)):
        codes, scale = emulated(x[6:], format, numbers)
        assert codes.dtype == numbers
        assert same((codes.to(FORMATS[format]), scale), reference(x[6:], format))


@pytest.mark.parametrize("k", [16, 4096, 14336, 65536])
def test_cuda_blocks_hold_their_row(k: int) -> None:
    own, threads = quantize_tokens_sm90.plan(k)
    assert threads % 32 == 0 and 32 <= threads <= 1024 and own in (4, 8)
    assert own * threads * 8 >= k


@pytest.mark.parametrize("case", SMALL[::3], ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    every = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(OP.default, case.arguments(), test_utils=every)


@pytest.mark.parametrize(
    ("arguments", "raised", "message"),
    [
        ((torch.ones(2, 2).double(), "int8"), TypeError, r"got torch\.float64"),
        ((torch.ones(2), "int8"), ValueError, r"got \(2,\); flatten"),
        ((torch.ones(2, 2), "int4"), ValueError, "int8, e4m3, got 'int4'"),
        ((torch.ones(2, 2), "int8", True), ValueError, "leave it out"),
    ],
)
def test_wrong_arguments(arguments: tuple, raised: type[Exception], message: str) -> None:
    with pytest.raises(raised, match=message):
        OP(*arguments)


@each_shape
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    """The first call brings the launcher in, the second teaches it this layout, and the third runs without Python."""
    for factor in (1, 2, 3):
        x, *rest = case.arguments("cuda")
        x.mul_(factor)
        assert same(OP(x, *rest), reference(x, *rest))


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
        codes, scale = (part.cpu() for part in OP(ties.cuda(), format))
        assert same((codes[:, :511].contiguous(), scale), by_scheme(ties, format))
