"""weight_linear: every implementation against float64, and which one runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.cases.weight_linear import CASES, Case
from lowbit_kernels.runtime import host_compiler, launches
from lowbit_kernels.weight_only import (
    codes_format,
    weight_linear,
    weight_mm_dequantized,
    weight_mm_triton,
    weight_operands,
)
from lowbit_kernels.weight_only.weight_linear import (
    IMPLEMENTATIONS,
    ON_CUDA,
    reference,
    run,
)
from lowbit_kernels.weight_only.weight_lookup_sm90 import ROUNDED_FROM
from lowbit_kernels.weight_only.weight_operands import WeightOperands
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]
RUNNING = [case for case in SMALL if case.m * case.n * case.k]
MORE_ROUNDINGS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


def limit(out: torch.Tensor, one_rounding: bool = True) -> float:
    """A bound on `error`: the mean over many elements, or the largest rounding where there are few."""
    if not one_rounding or out.numel() < 1000:
        return MORE_ROUNDINGS[out.dtype] / (2 if one_rounding else 1)
    return {torch.float32: 2.0**-20, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}[out.dtype]


op = torch.ops.lowbit.weight_linear


def wide(x, codes, scale, zero_point, bias, residual, group_size) -> torch.Tensor:
    """The formula in float64, without a rounding at the end."""
    k = x.shape[-1]
    if codes.dtype == torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).to(torch.int8) - 8
    zero = 0 if zero_point is None else zero_point.double().repeat_interleave(group_size, 1)[:, :k]
    scales = scale.double().repeat_interleave(group_size, 1)[:, :k]
    out = x.double() @ ((codes[:, :k].double() - zero) * scales).T
    for part in (bias, residual):
        out = out if part is None else out + part.double()
    return out


def error(out: torch.Tensor, arguments: tuple, dtype: torch.dtype | None = None) -> float:
    """The relative error against float64, in norms."""
    expected = wide(*arguments)
    assert out.shape == expected.shape and out.dtype == (dtype or arguments[0].dtype)
    assert out.is_contiguous()
    norm = expected.norm().item()
    return (out.double() - expected).norm().item() / norm if norm else float(out.any())


def formula(x, codes, scale, zero_point, bias, residual, group_size) -> torch.Tensor:
    """The formula, with each weight computed by itself in float64."""
    n, k = scale.shape[0], x.shape[-1]
    weight = np.zeros((n, k))
    given, scales = codes.numpy(), scale.double().numpy()
    for row in range(n):
        for column in range(k):
            code = int(given[row, column]) if given.dtype == np.int8 else None
            if code is None:
                code = (int(given[row, column // 2]) >> (4 * (column % 2))) % 16 - 8
            zero = 0 if zero_point is None else int(zero_point[row, column // group_size])
            weight[row, column] = (code - zero) * scales[row, column // group_size]
    out = x.double() @ torch.from_numpy(weight).T
    for part in (bias, residual):
        out = out if part is None else out + part.double()
    return out.to(x.dtype)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_reference_is_the_formula(case: Case) -> None:
    arguments = case.arguments()
    if case.bits == 8 and case.k == 331:
        arguments[3].copy_(torch.randint(-128, 128, arguments[3].shape))
    torch.testing.assert_close(reference(*arguments), formula(*arguments))


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    arguments = case.arguments()
    with launches.counted() as calls:
        first = op(*arguments)
        exact = case.m <= 8 and not (case.bias or case.residual)
        assert error(first, arguments) <= limit(first, exact)
        assert torch.equal(first, op(*arguments))
    ((name, implementation),) = calls
    assert name == "weight_linear" and calls.total() == 2
    assert (implementation == "empty") == (case.m * case.n * case.k == 0)


INTERPRETED = """
import json, torch
from benchmarks.cases.weight_linear import CASES
from lowbit_kernels.runtime import launches
from lowbit_kernels.weight_only import weight_mm_triton
from lowbit_kernels.weight_only.weight_operands import WeightOperands
from tests.kernels.test_weight_linear import error, limit

torch.manual_seed(0)
results = {}
for case in CASES:
    if not case.large:
        arguments = case.arguments()
        with launches.counted() as calls:
            out = torch.ops.lowbit.weight_linear(*arguments)
        ((_, implementation),) = calls
        more = error(out, arguments) / limit(out, implementation == "triton")
        results[case.name] = more, implementation
for slices in (1, 2, 3):
    x, codes, scale, zero_point, bias, residual, group = CASES[3].arguments()
    residual = torch.zeros(len(x), len(codes), dtype=x.dtype)
    parts = (x, codes, scale, zero_point, None, residual)
    out = weight_mm_triton.product(WeightOperands.of(*parts, group_size=group), slices)(parts)
    wanted = (x, codes, scale, zero_point, None, None, group)
    results[f"{slices} slices"] = error(out, wanted, torch.bfloat16) / limit(out)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton() -> dict:
    return interpreted(INTERPRETED)


@pytest.mark.parametrize("case", RUNNING, ids=lambda c: c.name)
def test_interpreted_kernel(under_triton: dict[str, tuple], case: Case) -> None:
    found, implementation = under_triton[case.name]
    takes = case.m <= weight_mm_triton.MOST_TOKENS and "odd-group" not in case.name
    otherwise = "cpu" if host_compiler.compiler() else "dequantize"
    if not takes or "prime" in case.name:
        # PyTorch multiplies many tokens by decoded tiles on some processors.
        assert implementation in (otherwise, "dequantize")
    else:
        assert implementation == "triton"
    assert found <= 1


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_interpreted_slices(under_triton: dict[str, tuple], slices: int) -> None:
    assert under_triton[f"{slices} slices"] <= 1


OPCHECKED = [SMALL[i] for i in (1, 5, 13, 16, 21, 26)]


@pytest.mark.parametrize("case", OPCHECKED, ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(op.default, case.arguments())


def test_compiles_without_a_break() -> None:
    x, packed, scale, _, bias, *_ = Case("", 4, 32, 64, 32, bias=True).arguments()
    codes = torch.randint(-128, 128, (32, 64), dtype=torch.int8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, packed, scale, bias=bias, group_size=32)
        return linear(x, codes, scale[:, :1], residual=y, group_size=64)

    linear = weight_linear.weight_linear
    y = linear(x, packed, scale, bias=bias, group_size=32)
    assert torch.equal(both(x), linear(x, codes, scale[:, :1], residual=y, group_size=64))


def test_compiles_for_any_number_of_tokens() -> None:
    compiled = torch.compile(
        lambda *a: op(*a) * 2, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for m in (3, 5, 40):
        arguments = Case("", m, 32, 64, 32, leading=(2,), bias=True, residual=True).arguments()
        assert torch.equal(compiled(*arguments), op(*arguments) * 2)


LAYOUTS = {  # of x [2, 3, 64], and whether its rows have one distance, so that no copy is made
    "contiguous": (lambda x: x, True),
    "last-token": (lambda x: torch.cat([x] * 4, 1)[:, -3:, :], False),
    "one-of-many": (lambda x: torch.stack([x] * 2, 2)[:, :, 1], True),
    "gaps-in-k": (lambda x: torch.stack([x] * 2, -1)[..., 0], False),
    "transposed": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), False),
    "expanded": (lambda x: x[:1].expand(2, 3, 64), False),
    "unaligned": (lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), True),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("change", "in_place"), list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_layouts_of_x_and_residual(change, in_place: bool, bits: int) -> None:
    case = Case("", 3, 16, 64, 32, bits, leading=(2,), residual=True)
    x, codes, scale, zero_point, bias, residual, group = case.arguments()
    x, residual = change(x), residual.transpose(0, 1).contiguous().transpose(0, 1)
    arguments = (x, codes, scale, zero_point, bias, residual, group)
    out = op(*arguments)
    assert error(out, arguments) <= limit(out, one_rounding=False)
    given = tuple(None if t is None else weight_operands.described(t) for t in arguments[:-1])
    given = (*given, None)
    assert weight_linear.planned(given, group).copies_x != in_place
    rows = weight_operands.TensorLayout(*given[0]).rows()
    if in_place:
        flat = x.view(-1, 64)
        assert rows[:2] == (flat.shape, flat.stride())


def test_a_plan_is_made_once_for_equal_layouts() -> None:
    weight_linear.planned.cache_clear()
    for _ in range(3):
        op(*Case("", 2, 16, 64, 32).arguments())
    assert weight_linear.planned.cache_info().misses == 1
    x, codes, *rest = Case("", 2, 16, 64, 32).arguments()
    unaligned = torch.empty(codes.numel() + 1, dtype=torch.uint8)[1:].view(codes.shape)
    op(x, unaligned.copy_(codes), *rest)
    op(x.half(), codes, *rest)
    assert weight_linear.planned.cache_info().misses == 3


def test_an_error_is_raised_at_every_call() -> None:
    x, codes, scale, *rest = Case("", 2, 16, 64, 32).arguments()
    for _ in range(2):
        with pytest.raises(ValueError, match="K = 32"):
            op(x[:, :32], codes, scale, *rest)


@pytest.mark.cover("values")
@pytest.mark.parametrize("most", [1, 2**30], ids=["slices", "whole"])
@pytest.mark.parametrize("case", RUNNING, ids=lambda c: c.name)
def test_products_into_columns(case: Case, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of GPUs, on the CPU: slices of at most 16 columns of the result, or all columns at once."""
    monkeypatch.setattr(weight_mm_dequantized, "MOST_BYTES", most)
    monkeypatch.setattr(weight_mm_dequantized, "ROWS_OF_A_TILE", 16)
    x, *parts, residual, group = arguments = case.arguments()
    if residual is not None:
        residual = residual.reshape(-1, case.n)
    flat = (x.reshape(-1, case.k), *parts, residual, None, None)
    format = codes_format.format_of(parts[0].dtype, parts[1].dtype)
    out = weight_mm_dequantized._in_place(group, format, flat).view(*x.shape[:-1], case.n)
    assert error(out, arguments) <= limit(out, one_rounding=False)


@pytest.mark.parametrize("implementation", ["dequantize", "cpu"])
@pytest.mark.parametrize("bits", [4, 8])
def test_nan_and_infinity_pass(bits: int, implementation: str) -> None:
    case = Case("", 4, 16, 64, 32 if bits == 4 else 64, bits)
    x, codes, scale, *_, group = case.arguments()
    codes.fill_(0x99 if bits == 4 else 1)  # code 1
    x[0, 3], x[1, 5] = math.nan, math.inf
    scale[2, 0], scale[3, 0] = math.nan, math.inf
    out = run(x, codes, scale, None, None, None, group, implementation=implementation)
    assert out[0].isnan().all() and out[:, 2].isnan().all()
    assert not out[:, 3].isfinite().any() and not out[1].isfinite().any()
    assert out[2:, :2].isfinite().all() and out[2:, 4:].isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e30])
def test_magnitudes(bits: int, magnitude: float) -> None:
    x, codes, scale, *rest = Case("", 7, 48, 256, 256, bits).arguments()
    arguments = (x, codes, (scale.float() * magnitude).to(scale.dtype), *rest)
    out = op(*arguments)
    assert error(out, arguments) <= limit(out)


@pytest.mark.parametrize("zero", [-128, -8, 0, 7, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_extreme_zero_points_and_equal_rows(zero: int, dtype: torch.dtype) -> None:
    for bits, m in ((4, 3), (4, 20), (8, 3), (8, 20)):
        x, codes, scale, zero_point, *rest = Case(
            "", m, 24, 128, 64, bits, dtype, dtype, zero_point=True
        ).arguments()
        zero_point.fill_(zero)
        codes.fill_(0x37)
        arguments = (x, codes, scale, zero_point, *rest)
        out = op(*arguments)
        assert error(out, arguments) <= limit(out, one_rounding=False)


def test_padding_does_not_count() -> None:
    x, codes, scale, *rest = Case("", 3, 8, 100, 64).arguments()
    out = op(x, codes, scale, *rest)
    codes[:, 50:] ^= 0xFF
    assert torch.equal(op(x, codes, scale, *rest), out)


def test_autocast_changes_nothing() -> None:
    arguments = Case("", 9, 24, 64, 32, dtype=torch.float32).arguments()
    out = op(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(*arguments), out)


@pytest.mark.parametrize(
    ("change", "raised", "message"),
    [
        ({"codes": torch.zeros(3, 32, dtype=torch.int16)}, TypeError, r"int8, .*got torch\.int16"),
        ({"codes": torch.zeros(3, 32, dtype=torch.int8)}, ValueError, r"\(3, 64\), got \(3, 32"),
        ({"x": torch.zeros(2, 64).double()}, TypeError, r"x of .*got torch\.float64"),
        ({"scale": torch.ones(3, 2).double()}, TypeError, r"scale of .*got torch\.float64"),
        (
            {"zero_point": torch.zeros(3, 2).double()},
            TypeError,
            r"zero_point of torch\.int8.*got torch\.float64",
        ),
        ({"bias": torch.zeros(3).bfloat16()}, TypeError, r"bias .*torch\.float32; got torch\.bf"),
        ({"residual": torch.zeros(3)}, ValueError, r"residual .*\(2, 3\), got \(3,\)"),
        ({"bias": torch.zeros(2)}, ValueError, r"bias .*\(3,\), got \(2,\)"),
        ({"zero_point": torch.zeros(3, 1, dtype=torch.int8)}, ValueError, r"\(3, 2\), got \(3, 1"),
        ({"group_size": 0}, ValueError, "1 or more elements, got 0"),
        ({"group_size": 16}, ValueError, r"codes of shape \(3, 16\), got \(3, 32\)"),
        ({"x": torch.zeros(2, 32)}, ValueError, r"K = 32, but 2 groups of 32 hold a K of 33 to 64"),
        ({"x": torch.zeros(2, 65)}, ValueError, r"K = 65"),
        ({"scale": torch.ones(1, 3, 2)}, ValueError, r"scale \[N, groups\], got \(1, 3, 2\)"),
        *(
            (
                {name: torch.ones(shape, dtype=dtype, device="meta")},
                *(ValueError, f"device, got .*{name} on meta"),
            )
            for name, shape, dtype in (
                ("x", (2, 64), torch.float32),
                ("codes", (3, 32), torch.uint8),
                ("scale", (3, 2), torch.float32),
                ("zero_point", (3, 2), torch.int8),
                ("bias", (3,), torch.float32),
                ("residual", (2, 3), torch.float32),
            )
        ),
    ],
)
def test_wrong_arguments(change: dict, raised: type[Exception], message: str) -> None:
    arguments = {
        "x": torch.zeros(2, 64),
        "codes": torch.zeros(3, 32, dtype=torch.uint8),
        "scale": torch.ones(3, 2),
        "group_size": 32,
    }
    assert weight_linear.weight_linear(**arguments).shape == (2, 3)
    with pytest.raises(raised, match=message):
        weight_linear.weight_linear(**{**arguments, **change})


def test_an_implementation_that_does_not_take_the_operands() -> None:
    with pytest.raises(ValueError, match="decode does not take"):
        run(*Case("", 2, 16, 64, 32).arguments(), implementation="decode")


def can(implementation: str, arguments: tuple, case: Case) -> bool:
    x, *parts, residual, group = arguments
    if case.dtype == torch.float32:
        return implementation == "dequantize"
    residual = None if residual is None else residual.reshape(-1, case.n)
    operands = (x.reshape(-1, case.k), *parts, residual)
    operands = WeightOperands.of(*operands, group_size=group)
    return IMPLEMENTATIONS[implementation].product(operands) is not None


LAYERS = [
    Case(f"{bits}-bits-{m}-tokens", m, n, k, group if bits == 4 else k, bits, bias=m == 3)
    for m in (1, 3, 16, 64, 300)
    for n, k, group in ((4097, 4096, 128), (1024, 4224, 32))
    for bits in (4, 8)
]


@pytest.mark.cover("pairs", case=lambda c: (c.bits, c.name.removeprefix("int8-")))
@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ON_CUDA)
@pytest.mark.parametrize("case", [*RUNNING, *LAYERS], ids=lambda c: c.name)
def test_cuda_implementations(case: Case, implementation: str) -> None:
    arguments = case.arguments("cuda")
    if not can(implementation, arguments, case):
        pytest.skip(f"{implementation} doesn't take it")
    out = run(*arguments, implementation=implementation)
    rounds = implementation == "dequantize" or (
        implementation == "large_batch" and case.m >= ROUNDED_FROM
    )
    assert error(out, arguments) <= limit(out, one_rounding=not rounds)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    out = op(*arguments)
    assert error(out, arguments) <= limit(out, one_rounding=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", OPCHECKED, ids=lambda c: c.name)
def test_cuda_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(op.default, case.arguments("cuda"))


@pytest.mark.gpu
def test_cuda_product_into_columns_copies_nothing() -> None:
    """A large product allocates only its result and one chunk of the weight."""
    x, codes, scale, *_ = Case("", 2048, 16384, 4096, 128).arguments("cuda")
    run(x, codes, scale, None, None, None, 128, implementation="dequantize")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(x, codes, scale, None, None, None, 128, implementation="dequantize")
    most = 2 * 2048 * 16384 + weight_mm_dequantized.MOST_BYTES + 2**21
    assert torch.cuda.max_memory_allocated() - before <= most


@pytest.mark.gpu
def test_cuda_offsets_of_64_bits() -> None:
    x, codes, scale, *rest = Case("", 65_536, 40_000, 128, 128).arguments("cuda")
    out = op(x, codes, scale, *rest)
    assert out.numel() > 2**31
    for rows in (slice(0, 3), slice(-3, None)):
        arguments = (x[rows], codes, scale, *rest)
        assert error(out[rows], arguments) <= limit(out, one_rounding=False)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ON_CUDA)
@pytest.mark.parametrize("bits", [4, 8])
def test_cuda_graph(bits: int, implementation: str) -> None:
    case = Case("", 8, 512, 1024, 128, bits, residual=True)
    arguments = case.arguments("cuda")
    if not can(implementation, arguments, case):
        pytest.skip(f"{implementation} doesn't take it")
    run(*arguments, implementation=implementation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*arguments, implementation=implementation)
    arguments[0].neg_()
    graph.replay()
    assert error(out, arguments) <= limit(out, one_rounding=False)


@pytest.mark.gpu
def test_cuda_compiles_without_a_break() -> None:
    arguments = Case("", 4, 64, 128, 32).arguments("cuda")
    compiled = torch.compile(lambda *a: op(*a) * 2, fullgraph=True)
    assert torch.equal(compiled(*arguments), op(*arguments) * 2)
