"""dynamic_linear in int8, int8 by int4, float8 and float8 by FP4: against float64 over codes, and what runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.cases.dynamic_linear import CASES, E4M3, Case
from lowbit_kernels.composed import dynamic_linear
from lowbit_kernels.composed.dynamic_linear import MOST_NUMBERS, format_of_tokens, reference
from lowbit_kernels.runtime import launches
from lowbit_kernels.weight_only.codes_format import dequantized
from lowbit_kernels.weight_only.weight_operands import HALVES, WeightOperands
from tests.kernels.test_quantize_rows import by_scheme

SMALL = [case for case in CASES if not case.large]
COUNTED = [case for case in SMALL if case.format.startswith("int")]  # whose sums are exact
INT8 = [case for case in SMALL if case.format == "int8"]
FOUR_BITS = ("int4", "mxfp4", "nvfp4")
FEW = 8  # tokens up to which a stub takes "decode"
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


op = torch.ops.lowbit.dynamic_linear


def assert_close(out: torch.Tensor, case: Case, arguments: tuple, sums: float = 0.0) -> None:
    expected = reference(*arguments)
    assert out.shape == expected.shape and out.dtype == expected.dtype and out.is_contiguous()
    off = (out.double() - expected.double()).norm()
    assert off <= ((1 + case.residual) * ROUNDING[case.dtype] + sums) * expected.double().norm()


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    arguments = case.arguments()
    is_int4 = case.format in FOUR_BITS
    with launches.counted() as calls:  # `weight_linear` rounds x to its dtype once more
        assert_close(
            op(*arguments), case, arguments, sums=ROUNDING[case.dtype] if is_int4 else 1e-6
        )
    assert calls["dynamic_linear", "weight_linear" if is_int4 else "scaled_mm"] == 1


@pytest.mark.parametrize("case", SMALL[:3] + SMALL[12:15], ids=lambda c: c.name)
def test_reference_multiplies_the_schemes_codes(case: Case) -> None:
    x, codes, scale, bias, residual, *_ = arguments = case.arguments()
    q, t = by_scheme(x, case.format)
    out = (q.double() * t.double()[:, None]) @ (codes.double() * scale.double()[:, None]).T
    for part in (bias, residual):
        out = out if part is None else out + part.double()
    torch.testing.assert_close(reference(*arguments), out.to(x.dtype))


@pytest.fixture
def of_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for the CUDA kernels, in PyTorch ops, takes products on the CPU."""

    def product(operands, tensors):
        x, codes, scale, zero_point, bias, residual, token_scale, global_scale = tensors
        size, table = operands.group_size, operands.format.table
        found = WeightOperands.of(*tensors, group_size=size, out=operands.out, table=table)
        assert operands.codes == found.codes and operands.zero_point == found.zero_point
        assert operands.scale == found.scale or len(codes) == 1  # one row has any stride
        assert operands.residual == found.residual and operands.x.shape == found.x.shape
        if token_scale is None:
            assert operands.x.strides[0] == found.x.strides[0] or len(x) == 1
            x, token_scale = by_scheme(x, format_of_tokens(codes.dtype, scale.dtype))
        else:
            assert token_scale.shape == (len(x),) and x.dtype in HALVES
            assert x.dtype == torch.float16 or codes.dtype != E4M3
        parts = (codes, scale, zero_point, size, x.shape[1], torch.float64)
        weight = dequantized(*parts, global_scale, operands.bits, table)
        out = (x.double() @ weight.T) * token_scale.double()[:, None]
        for part in (bias, residual):
            out = out if part is None else out + part.double()
        return out.to(operands.out)

    def kernel(operands, tensorwise):
        codes = operands.codes.dtype
        if operands.out == torch.float32 or operands.m > MOST_NUMBERS.get(codes, 64):
            return None
        found = partial(product, operands)
        if operands.m <= FEW and not tensorwise:
            return "decode", found, None
        numbers = torch.float16 if codes == E4M3 else operands.x.dtype
        return "large_batch", found, numbers

    monkeypatch.setattr(dynamic_linear, "of_kernel", kernel)
    dynamic_linear.planned.cache_clear()
    yield
    dynamic_linear.planned.cache_clear()


@pytest.mark.cover(
    "values", case=lambda c: (c.format, c.dtype, c.name.removeprefix(f"{c.format}-"))
)
@pytest.mark.usefixtures("of_kernel")
@pytest.mark.parametrize("case", [c for c in SMALL if c.m * c.n * c.k], ids=lambda c: c.name)
def test_kernels_of_small_batches(case: Case) -> None:
    arguments = case.arguments()
    with launches.counted() as calls:
        assert_close(op(*arguments), case, arguments, sums=1e-6)
    m = case.m * math.prod(case.leading)
    is_int4 = case.format in FOUR_BITS
    if case.dtype == torch.float32 or (case.tensorwise and case.one_scale):
        m = 65
    most = MOST_NUMBERS.get(arguments[1].dtype, 64)
    expected = "decode" if m <= FEW and not case.tensorwise else "large_batch"
    expected = expected if m <= most else "weight_linear" if is_int4 else "scaled_mm"
    assert calls["dynamic_linear", expected] == 1


COLUMNS = {
    "contiguous": lambda x: x.contiguous(),
    "a stride of the column": lambda x: x.contiguous().as_strided(x.shape, (2, 1, 7)),
    "gaps between rows": lambda x: torch.cat([x, x], -1)[..., :1],
    "gaps after rows": lambda x: torch.cat([x, x, x], -1)[..., ::3],
    "gaps between tokens": lambda x: torch.stack([x, x], 1)[:, 0],
}


@pytest.mark.usefixtures("of_kernel")
@pytest.mark.parametrize("change", list(COLUMNS.values()), ids=list(COLUMNS))
def test_a_single_column_of_x(change: Any) -> None:
    """Its stride does not matter, that of its rows does."""
    case = Case("", 2, 16, 1, "int8", leading=(3,))
    x, *rest = case.arguments()
    arguments = (change(x), *rest)
    assert arguments[0].shape == (3, 2, 1)
    with launches.counted() as calls:
        assert_close(op(*arguments), case, arguments, sums=1e-6)
    assert calls == {("dynamic_linear", "decode"): 1}


@pytest.mark.parametrize("format", ["int8", "e4m3"])
def test_nan_shows_and_stays_in_its_row(format: str) -> None:
    case = Case("", 4, 16, 32, format)
    x, *rest = case.arguments()
    x[1, 3] = math.nan
    out = op(x, *rest)
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
@pytest.mark.parametrize("format", ["int8", "e4m3"])
def test_magnitudes(format: str, magnitude: float) -> None:
    case = Case("", 4, 16, 32, format)
    x, *rest = case.arguments()
    arguments = ((x.float() * magnitude).to(x.dtype), *rest)
    assert_close(op(*arguments), case, arguments, sums=1e-6)


OPCHECKED = [SMALL[i] for i in (0, 1, 6, 8)]
OPCHECKED += [c for c in SMALL if c.name in ("int4-one-token", "int4-no-tokens", "mxfp4-typical")]


@pytest.mark.parametrize("case", OPCHECKED, ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(op.default, case.arguments())


@pytest.mark.parametrize("case", SMALL[12:14] + SMALL[-2:], ids=lambda c: c.name)
def test_float8_operator_is_registered_well(case: Case) -> None:
    every = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op.default, case.arguments(), test_utils=every)


def test_compiles_without_a_break() -> None:
    x, codes, scale, *_ = INT8[0].arguments()
    values, by_row, *_ = Case("", 1, 64, 128, "e4m3").arguments()[1:]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x: torch.Tensor) -> torch.Tensor:
        return linear(x, codes, scale) + linear(x, values, by_row)

    linear = dynamic_linear.dynamic_linear
    expected = linear(x, codes, scale) + linear(x, values, by_row)
    assert torch.equal(both(x), expected)


@pytest.mark.parametrize(
    ("change", "raised", "message"),
    [
        ({"codes": torch.zeros(3, 16, dtype=torch.int16)}, TypeError, r"got torch\.int16"),
        (
            {"codes": torch.zeros(3, 8, dtype=torch.uint8)},
            *(ValueError, r"group_size of 1 or more .*got 0 and 8"),
        ),
        (
            {"codes": torch.zeros(3, 9, dtype=torch.uint8), "group_size": 16},
            *(ValueError, r"16 \* groups / 2 bytes a row, got 16 and 9"),
        ),
        (
            {"codes": torch.zeros(3, 8, dtype=torch.uint8), "group_size": 8},
            *(ValueError, r"a scale of shape \(3, 2\), got \(3,\)"),
        ),
        ({"group_size": 16}, ValueError, r"are for uint8 codes, got torch\.int8"),
        ({"codes": torch.zeros(3, 16).to(torch.float8_e5m2)}, TypeError, r"got torch\.float8_e5m2"),
        ({"tensorwise": True}, ValueError, "tensorwise takes float8 codes"),
        (
            {"codes": torch.zeros(3, 32, dtype=torch.int8)},
            ValueError,
            r"codes \[N, K\], here \(3, 16\), got \(3, 32\)",
        ),
        (
            {"x": torch.zeros(1, 131_072), "codes": torch.zeros(3, 131_072, dtype=torch.int8)},
            *(ValueError, r"131071 products .*K = 131072"),
        ),
        ({"x": torch.zeros(2, 16).double()}, TypeError, r"x .*got torch\.float64"),
        ({"scale": torch.ones(1)}, ValueError, r"\(3,\) or \(3, 1\), got \(1,\)"),
        ({"bias": torch.ones(2)}, ValueError, r"bias .*\(3,\), got \(2,\)"),
        ({"residual": torch.ones(2, 3).half()}, TypeError, r"float32; got torch\.float16"),
    ],
)
def test_wrong_arguments(change: dict, raised: type[Exception], message: str) -> None:
    arguments = {
        "x": torch.zeros(2, 16),
        "codes": torch.zeros(3, 16, dtype=torch.int8),
        "scale": torch.ones(3),
    }
    linear = dynamic_linear.dynamic_linear
    assert linear(**arguments).shape == (2, 3)
    wrong = {**arguments, **change}
    with pytest.raises(raised, match=message):
        linear(**wrong)
    meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in wrong.items()}
    with pytest.raises(raised, match=message):  # as torch.compile does
        linear(**meta)


@pytest.mark.parametrize("name", ["codes", "scale", "bias", "residual"])
@pytest.mark.parametrize("format", ["int8", "e4m3"])
def test_tensors_of_two_devices_are_refused(format: str, name: str) -> None:
    case = Case("", 2, 3, 16, format, bias=True, residual=True)
    given = dict(zip(("x", "codes", "scale", "bias", "residual"), case.arguments(), strict=False))
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=f"one device, got x on cpu.*{name} on meta.*move them"):
        op(*given.values())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    if case.large and case.m > 1:
        pytest.skip("for benchmarks: float64 takes too long")
    arguments = case.arguments("cuda")
    is_rounded = case.format == "int4" and (case.group == 16 or case.dtype == torch.float32)
    exact = case in COUNTED and not is_rounded
    assert_close(op(*arguments), case, arguments, sums=0 if exact else 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("format", "m", "scales"),
    [
        *(("int8", m, "by_row") for m in (1, 3, 8, 16, 17, MOST_NUMBERS[torch.int8])),
        *(
            ("e4m3", m, scales)
            for m in (1, 3, 8, 16, MOST_NUMBERS[E4M3])
            for scales in ("by_row", "one_scale", "tensorwise")
        ),
    ],
)
def test_cuda_codes_of_small_batches_are_multiplied_as_floats(
    format: str, m: int, scales: str, dtype: torch.dtype
) -> None:
    options = {"bias": True, "residual": True} | ({} if scales == "by_row" else {scales: True})
    case = Case("", m, 4097, 4096, format, dtype, **options)
    arguments = case.arguments("cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    kernel = "decode" if m <= 16 and scales != "tensorwise" else "large_batch"
    with launches.counted() as calls:
        assert_close(op(*arguments), case, arguments, sums=1e-5)
    assert calls["dynamic_linear", kernel] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("m", [4, 12, 40, 200])
def test_cuda_nan_and_infinity_are_where_the_reference_has_them(m: int) -> None:
    x, codes, *rest = Case("", m, 48, 96, "e4m3", bias=True).arguments("cuda")
    x[1, 3], x[2, 5], x[3, 6] = math.nan, math.inf, -math.inf
    codes.view(torch.uint8)[7, 11] = 255  # NaN
    out, expected = op(x, codes, *rest), reference(x, codes, *rest)
    assert torch.equal(out.isnan(), expected.isnan()) and expected.isnan().sum() == 3 * 48 + m - 3
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "e4m3"])
@pytest.mark.parametrize("m", [8, 20, 200])
def test_cuda_graph(format: str, m: int) -> None:
    case = Case("", m, 512, 1024, format, residual=True)
    arguments = case.arguments("cuda")
    op(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*arguments)
    arguments[0].neg_()
    graph.replay()
    assert_close(out, case, arguments, sums=3e-3)
