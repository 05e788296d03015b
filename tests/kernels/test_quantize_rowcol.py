"""Quantization along rows and columns: the reference against numpy, every implementation against the reference."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.quantize_rowcol import CASES, Case
from lowbit_kernels.quantize import quantize_rowcol_sm90, quantize_rowcol_triton
from lowbit_kernels.quantize.quantize_rowcol import (
    FORMATS,
    quantize_rowcol,
    reference,
    results_of,
)
from lowbit_kernels.runtime import nvrtc
from tests.kernels import emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.interpreted import interpreted, names

SMALL = [case for case in CASES if not case.large]
OP = torch.ops.lowbit.quantize_rowcol


each_shape = pytest.mark.cover("values", case=lambda c: (c.format, c.name.removeprefix("e4m3-")))


def name_of(case) -> str:
    return case.name


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same dtype, shape and values, NaNs in the same places."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.float().nan_to_num(-1e9), b.float().nan_to_num(-1e9))


def assert_same(out: tuple, expected: tuple) -> None:
    found = [same(a, b) for a, b in zip(out, expected, strict=True)]
    assert all(found), dict(zip(("codes", "scale", "codes_t", "scale_t"), found, strict=True))


def by_formula(x: torch.Tensor, format: str, tensorwise: bool) -> tuple[np.ndarray, np.ndarray]:
    """The quotients of rows in float64, and the scales."""
    values, largest = x.double().numpy(), FORMATS[format][1]
    below = largest + (format == "int8")
    needed = np.maximum(values / largest, -values / below)
    found = needed.max(axis=None if tensorwise else 1, initial=0)
    scale = np.atleast_1d(found).astype(np.float32)
    scale[scale == 0] = 1
    return values / scale.astype(np.float64)[:, None], scale


@pytest.mark.parametrize("case", [c for c in SMALL if not c.stochastic], ids=name_of)
def test_reference_is_the_formula(case) -> None:
    x, format, rows, columns, tensorwise, seed, factor, row_scales = arguments = case.arguments()
    codes, scale, codes_t, scale_t = reference(*arguments)
    dtype, largest = FORMATS[format]
    if row_scales:
        own = reference(x, format, True, False, tensorwise, seed)
        assert torch.equal(codes_t[:, : len(x)].float(), own[0][:, : x.shape[1]].T.float())
        assert torch.equal(scale_t, own[1]) and not codes_t[:, len(x) :].float().any()
        columns, codes_t, scale_t = False, codes_t[:0, :0], scale_t[:0]
    for wanted, matrix, got, got_scale in (
        (rows, x if factor is None else x.float() * factor, codes, scale),
        (columns, x.T, codes_t, scale_t),
    ):
        if not wanted:
            assert got.shape == (0, 0) and got_scale.shape == (0,)
            continue
        quotients, expected_scale = by_formula(matrix, format, tensorwise)
        m, k = matrix.shape
        assert got.dtype == dtype and got.shape == (m, -(-k // 16) * 16) and got.is_contiguous()
        assert got_scale.dtype == torch.float32
        np.testing.assert_allclose(got_scale.numpy(), expected_scale, rtol=1e-6)
        got = got.float().double().numpy()
        assert not got[:, k:].any()
        # The error is at most half a step: 1 for int8, the distance between neighbouring numbers for float8.
        bits, smallest = {"int8": (None, 1), "e4m3": (4, 2.0**-9), "e5m2": (3, 2.0**-16)}[format]
        step = 1.0
        if bits is not None:
            exponent = np.floor(np.log2(np.maximum(np.abs(quotients), 2.0**-20)))
            step = np.maximum(2.0 ** (exponent + 1 - bits), smallest)
        assert (np.abs(got[:, :k] - quotients) <= 0.5 * step * (1 + 1e-5)).all()
        assert got.max(initial=0) <= largest and got.min(initial=0) >= -largest - (format == "int8")


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_cpu(case) -> None:
    x, format, *options = arguments = case.arguments()
    names = ("rows", "columns", "tensorwise", "seed", "row_factor", "row_scales")
    before = x.clone()
    out = quantize_rowcol(x, format, **dict(zip(names, options, strict=True)))
    assert_same(out, reference(*arguments))
    assert torch.equal(x, before)


# The interpreter takes seconds for many tiles, of 32 rows and columns. So its cases have at most 2 x 3 of them. The
# indices of a tile do not depend on the format, and int8 alone has the cases of many tiles.
MOST_TILES = {"typical": (64, 96), "long-rows-only": (3, 1057)}
INTERPRETED_CASES = [
    dataclasses.replace(case, m=min(case.m, m), k=min(case.k, k))
    for case in SMALL
    for m, k in [MOST_TILES.get(case.name, (43, 71))]
    if case.name not in ("e4m3-several-tiles", "e4m3-long-rows-only")
]
INTERPRETED = """
import json, torch
from lowbit_kernels.runtime.launches import counted
from tests.kernels.test_quantize_rowcol import INTERPRETED_CASES, OP, extreme, reference, same

torch.manual_seed(0)
results = {}
cases = {case.name: case.arguments() for case in INTERPRETED_CASES}
cases |= {f"extreme-{format}": (extreme(), format) for format in ("int8", "e4m3", "e5m2")}
factor = torch.rand(150)
factor[5], factor[6], factor[8] = torch.inf, 0, 1e30
cases |= {"extreme-factor": (extreme(), "int8", True, True, False, None, factor)}
for name in NAMES:
    arguments = cases[name]
    with counted() as calls:
        out, expected = OP(*arguments), reference(*arguments)
    results[name] = all(same(a, b) for a, b in zip(out, expected))
    nothing = arguments[0].numel() == 0 or arguments[2:4] == (False, False)
    results[name] &= calls == {("quantize_rowcol", "torch" if nothing else "triton"): 1}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton(request: pytest.FixtureRequest) -> dict[str, bool]:
    return interpreted(f"NAMES = {names(request)}\n{INTERPRETED}")


@pytest.mark.cover("values", name=lambda name: (name[:4] == "e4m3", name.removeprefix("e4m3-")))
@pytest.mark.parametrize(
    "name", [*map(name_of, INTERPRETED_CASES), *(f"extreme-{f}" for f in (*FORMATS, "factor"))]
)
def test_interpreted_kernel(under_triton: dict[str, bool], name: str) -> None:
    assert under_triton[name]


def extreme() -> torch.Tensor:
    x = torch.randn(140, 150)
    x[20] *= 1e-34
    x[21] *= 1e30
    x[22] *= 1e-42
    x[24], x[24, 0] = 0, -1e-45  # smaller than a step of the smallest scale
    x[23] = 3e38
    x[3, 4], x[7, 9], x[11], x[:, 13] = math.nan, -math.inf, 0, 0
    return x


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_values(format: str) -> None:
    x = extreme()
    codes, scale, codes_t, scale_t = quantize_rowcol(x, format)
    bad = torch.zeros(140, dtype=torch.bool)
    bad[[3, 7]] = True
    assert torch.equal(scale.isnan(), bad) and not codes.float()[bad].any()
    bad = torch.zeros(150, dtype=torch.bool)
    bad[[4, 9]] = True
    assert torch.equal(scale_t.isnan(), bad) and not codes_t.float()[bad].any()
    assert scale[11] == 1 and scale_t[13] == 1 and not codes[11].float().any()
    assert scale[22] == scale[24] == 2.0**-126
    rows = [0, 20, 21, 23]
    rounded = codes.float().double()[rows, :150] * scale[rows].double()[:, None]
    assert (rounded - x[rows].double()).norm(dim=1).le(0.08 * x[rows].double().norm(dim=1)).all()


def options_of(case: Case) -> tuple:
    numbers = case.m % 2, case.k % 2, case.m == 1
    flags = case.rows, case.columns, case.tensorwise, case.stochastic, case.factor, case.row_scales
    return case.format, case.dtype, case.layout, *numbers, *flags


EMULATED = {
    "typical",
    "several-tiles",
    "fp32",
    "prime-everything",
    "long-rows-only",
    "columns-only",
    "misaligned",
    "stochastic-odd",
    "stochastic-rows-only",
    "e4m3-fp16",
    "e4m3-tensorwise",
    "e5m2-stochastic",
    "factor",
    "factor-rows-only",
    "factor-stochastic",
    "row-scales",
    "row-scales-columns-only",
    "e4m3-factor-stochastic",
    "e4m3-row-scales",
}


@pytest.mark.cover("values", case=options_of)
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("case", [c for c in SMALL if c.name in EMULATED], ids=name_of)
def test_emulated_cuda(case) -> None:
    """The CUDA source, compiled by this machine's C++ compiler."""
    arguments = case.arguments()
    assert_same(emulator.quantize_rowcol(*arguments, results(arguments)), reference(*arguments))


def results(arguments: tuple) -> tuple:
    x, format, rows, columns, tensorwise, _, _, row_scales = arguments
    return results_of(*x.shape, format, rows, columns, tensorwise, row_scales)


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(
    "format", ["int8", "e4m3", pytest.param("e5m2", marks=pytest.mark.exhaustive)]
)
def test_emulated_cuda_with_extreme_factors(format: str) -> None:
    x, factor = extreme()[:40], torch.rand(150)
    factor[5], factor[6], factor[8], factor[9] = math.inf, 0, 1e30, math.nan
    seed = torch.tensor([2**40 + 77])
    for own, draws in ((factor, None), (factor.nan_to_num(1, 1, 1), None), (factor, seed)):
        arguments = (x, format, True, True, False, draws, own, False)
        assert_same(emulator.quantize_rowcol(*arguments, results(arguments)), reference(*arguments))


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(list(FORMATS)), st.data())
def test_codes_t_is_the_codes_of_the_transpose(m, k, format, data) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(m, k) * 10.0 ** data.draw(st.integers(-20, 20))
    codes, scale, codes_t, scale_t = quantize_rowcol(x, format)
    assert_same(quantize_rowcol(x.T, format), (codes_t, scale_t, codes, scale))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tensorwise", [False, True])
def test_stochastic_rounding_is_unbiased(format: str, tensorwise: bool) -> None:
    """The mean of n roundings lies within 5 standard errors of x; a step's share s has the variance s (1 - s)."""
    if tensorwise and format == "int8":
        pytest.skip("refused")
    rows, columns, n = 24, 40, 200
    x = torch.randn(rows, columns) * torch.logspace(-3, 0, columns)
    total = torch.zeros(2, rows, columns, dtype=torch.float64)
    nearest = quantize_rowcol(x, format, tensorwise=tensorwise)
    for seed in range(n):
        out = quantize_rowcol(x, format, tensorwise=tensorwise, seed=torch.tensor([seed]))
        assert torch.equal(out[1], nearest[1]) and torch.equal(out[3], nearest[3])
        total[0] += out[0].float().double()[:, :columns]
        total[1] += out[2].float().double()[:, :rows].T
    scales = (nearest[1].double()[:, None], nearest[3].double()[None, :])
    bits, smallest = {"int8": (None, 1.0), "e4m3": (4, 2.0**-9), "e5m2": (3, 2.0**-16)}[format]
    for mean, scale in zip(total / n, scales, strict=True):
        quotient = x.double() / scale
        step = torch.ones_like(quotient)
        if bits is not None:
            step = torch.exp2(quotient.abs().clamp(min=1e-30).log2().floor() + 1 - bits)
            step = step.clamp(min=smallest)
        share = (quotient / step) % 1
        deviation = (share * (1 - share) / n).sqrt().clamp(min=1e-4) * step
        assert ((mean - quotient).abs() <= 5 * deviation).all()
        assert ((mean - quotient) / step).mean().abs() < 5 / math.sqrt(n * mean.numel())


def test_stochastic_rounding_depends_on_the_seed_and_the_index_alone() -> None:
    x = torch.randn(50, 30).clamp(-1, 1)
    x[:, 0] = x[0] = 1.0  # every row and column has the same scale
    seed = torch.tensor([2**62 + 5])
    codes, _, codes_t, _ = quantize_rowcol(x, "int8", seed=seed)
    assert torch.equal(codes[:, :30], codes_t[:, :50].T)
    assert torch.equal(quantize_rowcol(x, "int8", columns=False, seed=seed)[0], codes)
    assert torch.equal(quantize_rowcol(x[:20], "int8", seed=seed)[0], codes[:20])
    other = quantize_rowcol(x, "int8", seed=seed + 1)[0]
    assert 0.2 < (other != codes)[:, :30].float().mean() < 0.5
    assert not torch.equal(quantize_rowcol(x, "int8", seed=seed + 2**32)[0], codes)


@pytest.mark.parametrize("case", SMALL[:3] + SMALL[8:16], ids=name_of)
def test_operator_is_registered_well(case) -> None:
    torch.library.opcheck(OP.default, case.arguments())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(2, 3, dtype=torch.float64)}, TypeError, r"got torch\.float64"),
        ({"x": torch.ones(2, 3, 4)}, ValueError, r"\[M, K\], got \(2, 3, 4\); flatten"),
        ({"format": "int4"}, ValueError, "int8, e4m3, e5m2, got 'int4'"),
        ({"tensorwise": True}, ValueError, 'got "int8"; leave it out'),
        ({"seed": torch.tensor([1.0])}, TypeError, r"int64, got torch\.float32"),
        ({"seed": torch.tensor([1, 2])}, ValueError, r"seed \[\] or \[1\], .*got \(2,\)"),
        (
            {"row_factor": torch.ones(3, dtype=torch.float64)},
            TypeError,
            r"float32, got torch\.float64",
        ),
        ({"row_factor": torch.ones(2)}, ValueError, r"row_factor \[K\], here \(3,\), got \(2,\)"),
        ({"row_factor": torch.ones(3), "row_scales": True}, ValueError, "leave them out"),
    ],
)
def test_wrong_arguments(change: dict, error: type[Exception], message: str) -> None:
    arguments: dict = {"x": torch.ones(2, 3), "format": "int8"}
    quantize_rowcol(**arguments)
    with pytest.raises(error, match=message):
        quantize_rowcol(**{**arguments, **change})


@each_shape
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_cuda(case) -> None:
    arguments = case.arguments("cuda")
    assert_same(OP(*arguments), reference(*arguments))


def assert_filled(arguments: tuple, run) -> None:
    x, _, rows, columns, *_ = arguments
    if x.numel() == 0 or not (rows or columns):
        pytest.skip("the op answers without a launch")
    assert_same(run(*arguments), reference(*arguments))


def by_triton(*arguments) -> tuple:
    out = tuple(torch.empty(b.shape, dtype=b.dtype, device="cuda") for b in results(arguments))
    for part in out:
        part.view(torch.uint8).fill_(0xAA)
    quantize_rowcol_triton.quantize(*arguments, out)
    return out


def by_sm90(*arguments) -> tuple:
    with emulator.filled_memory():
        return quantize_rowcol_sm90.quantize(*arguments, results(arguments))


@each_shape
@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_cuda_source(case) -> None:
    arguments = case.arguments("cuda")
    if not nvrtc.runs_on_hopper(arguments[0].device):
        pytest.skip("needs a GPU of compute capability 9.0")
    assert_filled(arguments, by_sm90)


@each_shape
@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_cuda_triton(case) -> None:
    arguments = case.arguments("cuda")
    if not quantize_rowcol_triton.takes(case.format, arguments[0].device):
        pytest.skip("needs a GPU with float8 conversions")
    assert_filled(arguments, by_triton)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_cuda_extreme_values(format: str) -> None:
    x = extreme().cuda()
    x[[20, 22]] = 0  # PyTorch's division on a GPU may round subnormal numbers differently
    for rows, columns in ((True, True), (True, False)):
        assert_same(OP(x, format, rows, columns), reference(x, format, rows, columns))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    arguments = Case("", 300, 520, stochastic=True).arguments("cuda")
    OP(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*arguments)
    arguments[0].mul_(2.5)
    arguments[5].add_(1)  # the seed is read on the device
    graph.replay()
    assert_same(out, reference(*arguments))
