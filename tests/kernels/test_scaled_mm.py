"""scaled_mm: every implementation against exact sums, or sums in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.scaled_mm import CASES, E4M3, E5M2, Case
from lowbit_kernels.matmul import int8_mm_triton, scaled_mm_sm90
from lowbit_kernels.matmul import scaled_mm as module
from lowbit_kernels.matmul.scaled_mm import int8_sums, reference, scaled_mm
from lowbit_kernels.runtime import launcher, launches, nvrtc
from tests.kernels.interpreted import interpreted

OP = torch.ops.lowbit.scaled_mm
SMALL = [case for case in CASES if not case.large]
INT8 = [case for case in SMALL if case.a_dtype == torch.int8]
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def exact(a, b, a_scale, b_scale, bias=None, out_dtype=None) -> torch.Tensor:
    """The formula in float64, by numpy."""
    b_scale = torch.ones(1) if b_scale is None else b_scale
    a, b, a_scale, b_scale = (x.cpu().double().numpy() for x in (a, b, a_scale, b_scale))
    out = (a @ b.T) * a_scale[:, None] * b_scale[None, :]
    return torch.from_numpy(out if bias is None else out + bias.cpu().double().numpy())


def assert_close(out: torch.Tensor, case: Case, arguments: tuple, sums: float = 0.0) -> None:
    """In norm, within two roundings to the output dtype and a relative error `sums` of the sums."""
    expected = exact(*arguments)
    assert out.shape == expected.shape and out.dtype == case.out_dtype and out.is_contiguous()
    error = (out.cpu().double() - expected).norm()
    assert error <= (ROUNDING[case.out_dtype] + sums) * expected.norm()


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_reference_is_the_formula(case: Case) -> None:
    arguments = case.arguments()
    assert_close(reference(*arguments), case, arguments)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    arguments = case.arguments()
    out = OP(*arguments)
    assert_close(out, case, arguments, sums=0.0 if case in INT8 else 1e-5)
    if case in INT8:
        assert torch.equal(out, reference(*arguments))  # to the bit
    alone = (*arguments[:3], None, *arguments[4:])
    ones = (*arguments[:3], torch.ones(1), *arguments[4:])
    assert torch.equal(OP(*alone), OP(*ones))


# In the interpreter a tile has 32 rows, columns and codes of a row, and takes milliseconds. Here are fewer tiles.
# Their numbers stay odd and above those of a group and of the programs; the last tiles are as full as before.
FEW_TILES = {
    "several-tiles": {"m": 76, "n": 136, "k": 80},
    "several-tiles-and-an-odd-one": {"m": 65, "n": 130, "k": 112},
    "long-sums": {"k": 2000},
}
INTERPRETED_CASES = [dataclasses.replace(case, **FEW_TILES.get(case.name, {})) for case in INT8]
INTERPRETED = """
import json, torch
from lowbit_kernels.runtime.launches import counted
from tests.kernels.test_scaled_mm import INTERPRETED_CASES, OP, reference

torch.manual_seed(0)
results = {}
for case in INTERPRETED_CASES:
    arguments = case.arguments()
    with counted() as calls:
        out, expected = OP(*arguments), reference(*arguments)
    results[case.name] = torch.equal(out, expected) and out.dtype == expected.dtype
    implementation = "int8 empty" if 0 in (case.m, case.n, case.k) else "int8 triton"
    results[case.name] &= calls == {("scaled_mm", implementation): 1}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton() -> dict[str, bool]:
    return interpreted(INTERPRETED)


@pytest.mark.parametrize("case", INT8, ids=lambda c: c.name)
def test_interpreted_kernel(under_triton: dict[str, bool], case: Case) -> None:
    assert under_triton[case.name]


OPCHECKED = [INT8[0], INT8[2], INT8[-1], *(c for c in SMALL if c.name.startswith("e5m2"))]


def opcheck(case: Case, device: str = "cpu") -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if case in INT8:  # the check of mutations multiplies, which float8 cannot
        checks.append("test_schema")
    torch.library.opcheck(OP.default, case.arguments(device), test_utils=checks)


@pytest.mark.parametrize("case", OPCHECKED, ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    opcheck(case)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(-20, 20), st.data())
def test_sums_are_exact_and_scales_factor_out(m, n, k16, exponent, data) -> None:
    """If scales are powers of two, nothing is rounded: the sums are below 2**24."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    a, b = (
        torch.from_numpy(generator.integers(-128, 128, (rows, 16 * k16), dtype=np.int8))
        for rows in (m, n)
    )
    sums = torch.from_numpy(a.numpy().astype(np.int64) @ b.numpy().T.astype(np.int64))
    scale = torch.tensor([2.0**exponent])
    out = scaled_mm(a, b, scale, torch.ones(n), out_dtype=torch.float32)
    assert torch.equal(out.double(), sums.double() * 2.0**exponent)


@pytest.mark.parametrize("case", [INT8[0], SMALL[len(INT8)]], ids=lambda c: c.name)
def test_extreme_scales(case: Case) -> None:
    a, b, a_scale, b_scale, *_ = case.arguments()
    a_scale[:6] = torch.tensor([float("nan"), float("inf"), 0.0, 1e30, 1e-38, 1e-45])
    b_scale[0] = 1e30
    out = OP(a, b, a_scale, b_scale, None, torch.float32)
    assert out[0].isnan().all() and not out[1].isfinite().any() and not out[2].any()
    assert out[3, 0].isinf() and out[3, 1:].isfinite().all()
    expected = exact(a, b, a_scale, b_scale)
    assert (out[4:].double() - expected[4:]).norm() <= 1e-5 * expected[4:].norm()


def test_compiled_calls_are_reported_too() -> None:
    arguments = INT8[0].arguments()[:4]
    with launches.counted() as calls:
        out = scaled_mm(*arguments)
    assert calls == {("scaled_mm", "int8 torch"): 1}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(a, b, a_scale, b_scale):
        first = scaled_mm(a, b, a_scale, b_scale)
        return first + scaled_mm(a, b, a_scale, b_scale)

    with launches.counted() as calls:
        assert torch.equal(twice(*arguments), out + out)
    assert calls == {("scaled_mm", "int8 torch"): 2}
    with launches.counted() as calls:
        scaled_mm(*SMALL[len(INT8)].arguments()[:4])
    assert calls == {("scaled_mm", "float8 torch"): 1}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": torch.zeros(2, 16)}, TypeError, r"torch\.int8, .*got torch\.float32"),
        ({"b": torch.zeros(3, 16, dtype=E4M3)}, TypeError, r"and torch\.float8_e4m3fn"),
        (
            {"b": torch.zeros(3, 32, dtype=torch.int8)},
            ValueError,
            r"b \[N, K\], here \(3, 16\), got \(3, 32\)",
        ),
        ({"a_scale": torch.ones(3)}, ValueError, r"a_scale .* \(2,\) or \(1,\), got \(3,\)"),
        ({"a_scale": torch.ones(2, 1)}, ValueError, r"got \(2, 1\)"),
        ({"b_scale": torch.ones(3).double()}, TypeError, r"b_scale .* got torch\.float64"),
        ({"bias": torch.ones(2)}, ValueError, r"\(3,\), got \(2,\)"),
        *(
            (
                {name: torch.zeros(size, dtype=dtype, device="meta")},
                ValueError,
                "device, got .*meta",
            )
            for name, size, dtype in (
                ("a", (2, 16), torch.int8),
                ("b", (3, 16), torch.int8),
                ("a_scale", (2,), torch.float32),
                ("b_scale", (1,), torch.float32),
                ("bias", (3,), torch.float32),
            )
        ),
        ({"bias": torch.ones(3, dtype=torch.int32)}, TypeError, r"bias .* got torch\.int32"),
        ({"out_dtype": torch.float64}, TypeError, r"out_dtype .* got torch\.float64"),
    ],
)
def test_wrong_arguments(change: dict, error: type[Exception], message: str) -> None:
    arguments = {
        "a": torch.zeros(2, 16, dtype=torch.int8),
        "b": torch.zeros(3, 16, dtype=torch.int8),
        "a_scale": torch.ones(2),
        "b_scale": torch.ones(3),
    }
    assert scaled_mm(**arguments).shape == (2, 3)
    with pytest.raises(error, match=message):
        scaled_mm(**{**arguments, **change})


def test_refuses_operands_that_no_gpu_multiplies() -> None:
    codes, scale = torch.zeros(4, 24, dtype=torch.int8), torch.ones(1)
    with pytest.raises(ValueError, match="multiple of 16, got 24; pad"):
        scaled_mm(codes, codes, scale, scale)
    codes = torch.zeros(4, 16).to(E5M2)
    with pytest.raises(
        TypeError, match=r"e4m3fn, one of them possibly .* got torch\.float8_e5m2 and"
    ):
        scaled_mm(codes, codes, scale, scale)


@pytest.mark.parametrize("k", [1, 16, 33])
@pytest.mark.parametrize(("m", "n"), [(1, 5), (5, 1), (1, 1), (17, 3)])
def test_sums_do_not_depend_on_the_stride_of_a_single_row(m: int, n: int, k: int) -> None:
    a, b = (torch.randint(-128, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
    expected = a.int() @ b.int().T
    for stride in (0, 1, 7, k):
        x, y = (t.as_strided(t.shape, (stride, 1)) if len(t) == 1 else t for t in (a, b))
        assert torch.equal(int8_sums(x, y), expected), stride


def accepting(a, b, a_scale, b_scale, *, bias=None, out_dtype, use_fast_accum, out=None):
    """``torch._scaled_mm`` with a GPU's checks of its arguments, multiplied exactly."""
    (m, k), n = a.shape, b.shape[1]
    assert {a.dtype, b.dtype} <= {E4M3, E5M2} and a.stride(1) == b.stride(0) == 1
    assert k % 16 == 0 and n % 16 == 0
    shapes = (a_scale.shape, b_scale.shape)
    assert shapes == ((m, 1), (1, n)) or shapes == ((), ())
    assert a_scale.is_contiguous() and b_scale.is_contiguous()
    assert out_dtype == torch.bfloat16 or shapes == ((), ())
    assert bias is None or bias.dtype == out_dtype != torch.float32
    found = a.double() @ b.double() * a_scale * b_scale
    found = (found if bias is None else found + bias.double()).to(out_dtype)
    return found if out is None else out.copy_(found)


@pytest.mark.parametrize("case", [c for c in SMALL if c not in INT8], ids=lambda c: c.name)
def test_cublas_gets_operands_that_it_takes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", accepting)
    monkeypatch.setattr(
        module,
        "_cublas_scales",
        lambda by_row, dtype, device: not by_row or dtype is torch.bfloat16,
    )
    monkeypatch.setattr(launcher, "take_over", lambda *arguments: None)
    arguments = case.arguments()
    if 0 in (case.m, case.n, case.k):
        pytest.skip("the op answers without a product")
    assert_close(module._float8_by_cublas(*arguments), case, arguments, sums=2.0**-24)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    out = OP(*arguments)
    if case.a_dtype == torch.int8 and case.bias is None:
        assert torch.equal(out, reference(*arguments))  # to the bit
    else:
        expected = reference(*arguments)
        error = (out.double() - expected.double()).norm()
        assert (
            error
            <= (2.0**-8 + (0 if case.a_dtype == torch.int8 else 2e-3)) * expected.double().norm()
        )


@pytest.mark.cover(
    "pairs", case=lambda c: (c.a_dtype, c.name.removeprefix("e4m3-")), width=str, slices=str
)
@pytest.mark.gpu
@pytest.mark.parametrize(("width", "slices"), [(256, 1), (256, 2), (256, 5), (128, 1), (64, 1)])
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_sm90(case: Case, width: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = -(-case.k // scaled_mm_sm90.TILE_K)
    plan = scaled_mm_sm90.ScaledMmDivision(width, 2, min(slices, steps))
    monkeypatch.setattr(scaled_mm_sm90, "plan", lambda *shape: plan)
    arguments = case.arguments("cuda")
    if not nvrtc.runs_on_hopper(arguments[0].device):
        pytest.skip("needs a GPU of compute capability 9.0")
    if 0 in (case.m, case.n, case.k):
        pytest.skip("the op answers without a launch")
    scaled_mm_sm90.planned.cache_clear()  # it knows no other plan
    try:
        sums = (
            0 if case in INT8 else 6e-3
        )  # float8 sums have 14 bits, and lose some in each of many additions
        assert_close(scaled_mm_sm90.multiply(*arguments), case, arguments, sums)
        alone = (*arguments[:3], None, *arguments[4:])
        ones = (*arguments[:3], torch.ones(1), *arguments[4:])
        assert_close(scaled_mm_sm90.multiply(*alone), case, ones, sums)
    finally:
        scaled_mm_sm90.planned.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in INT8 if c.m * c.n * c.k], ids=lambda c: c.name)
def test_cuda_triton(case: Case) -> None:
    arguments = case.arguments("cuda")
    assert_close(int8_mm_triton.int8_mm(*arguments), case, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", OPCHECKED, ids=lambda c: c.name)
def test_cuda_operator_is_registered_well(case: Case) -> None:
    opcheck(case, "cuda")


@pytest.mark.gpu
def test_cuda_graph() -> None:
    arguments = Case("", 300, 520, 256).arguments("cuda")
    OP(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*arguments)
    arguments[0].neg_()
    graph.replay()
    assert torch.equal(out, reference(*arguments))
