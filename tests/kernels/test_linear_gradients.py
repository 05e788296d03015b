"""The gradients of a linear in one op: its parts against float64, its launch plan against its parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.cases.linear_gradients import CASES, Case
from lowbit_kernels.composed import linear_gradients
from lowbit_kernels.composed.linear_gradients import reference
from lowbit_kernels.matmul import scaled_mm
from lowbit_kernels.matmul.scaled_mm import Planned
from lowbit_kernels.quantize.quantize_rowcol import FORMATS, quantize_rowcol
from lowbit_kernels.runtime import launch_plan, launcher, nvrtc
from lowbit_kernels.runtime.launches import counted
from lowbit_kernels.runtime.seeds import seed_of, seed_start, seed_step
from lowbit_kernels.weight_only.weight_operands import TensorLayout, layout
from tests.covering import usually
from tests.kernels import emulator, scaled_mm_emulator
from tests.kernels.compiled_on_cpu import COMPILER

OP = torch.ops.lowbit.linear_gradients


SMALL = [case for case in CASES if not case.large]
EMPTY = ("no-rows", "no-columns")
IN_PARTS = ("prime", "rounds-prime", *EMPTY)
"""On Hopper: results that rows of 16 bytes do not fill, and empty ones."""
every_case = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@every_case
def test_gradients_are_those_of_the_formula(case: Case) -> None:
    torch.manual_seed(1)
    arguments = case.arguments()
    grad_x, grad_weight = OP(*arguments)
    torch.manual_seed(1)
    grad, weight, x = case.operands()
    assert grad_x.dtype == case.dtype and grad_weight.dtype == case.weight_dtype
    bound = {"int8": 0.02, "e4m3": 0.06, "e5m2": 0.1}[case.format] * (2 if case.stochastic else 1)
    for wanted, got, exact in (
        (case.grad_x, grad_x, grad.double() @ weight.double()),
        (case.grad_weight, grad_weight, grad.double().T @ x.double()),
    ):
        if not wanted:
            assert got.shape == (0, 0)
            continue
        assert got.shape == exact.shape
        assert exact.numel() == 0 or not exact.any() or relative(got, exact) < bound
        if case.name in EMPTY:
            assert not got.any()


def by_three_ops(case: Case, arguments: tuple) -> list[Tensor]:
    """The gradients that are wanted, by one op after the other."""
    grad, fmt, weight, w_scale, x, x_scale, *_ = arguments
    one = case.tensorwise
    if case.rounds:
        own = "int8" if fmt == "int8" else "e4m3"
        weight, w_scale = quantize_rowcol(weight, own, rows=False, tensorwise=one, row_scales=True)[
            2:
        ]
    seed = seed_of(grad, case.seed) if case.stochastic else None
    factor = w_scale if case.grad_x and len(w_scale) != 1 else None
    options = {"tensorwise": one and factor is None, "seed": seed}
    found = []
    if case.grad_x:
        codes, scale, _, _ = quantize_rowcol(grad, fmt, columns=False, row_factor=factor, **options)
        scales = scale, None if factor is not None else w_scale
        found.append(scaled_mm.scaled_mm(codes, weight, *scales, out_dtype=grad.dtype))
    if case.grad_weight:
        _, _, codes, scale = quantize_rowcol(grad, fmt, rows=False, **options)
        found.append(scaled_mm.scaled_mm(codes, x, scale, x_scale, out_dtype=case.weight_dtype))
    return found


@every_case
def test_the_op_is_its_parts_and_tells_of_them(case: Case) -> None:
    arguments = case.arguments()
    with counted() as calls:
        found = as_called(arguments)
    for got, expected in zip(found, by_three_ops(case, arguments), strict=True):
        assert same_bits(got, expected)
    products = sum(n for (op, _), n in calls.items() if op == "scaled_mm")
    assert products == case.grad_x + case.grad_weight
    assert calls["quantize_rowcol", "torch"] == 1 + case.rounds


OPCHECKED = ("stochastic", "of-x-only", "of-the-weight-only", "rounds-prime", "e4m3", "no-rows")


@pytest.mark.parametrize("case", usually(SMALL, *OPCHECKED))
def test_operator_is_registered_well(case: Case) -> None:
    opcheck(case, case.arguments())


def scratch_bytes(found: Planned) -> int:
    return sum(buffer.nbytes for buffer in found.plan.scratch)


def as_called(arguments: tuple) -> list[Tensor]:
    """The results of the function of these arguments of the op that are wanted."""
    *operands, stochastic, seed, tensorwise, dtype = arguments
    options = {"stochastic": stochastic, "seed": seed, "tensorwise": tensorwise, "dtype": dtype}
    found = linear_gradients.linear_gradients(*operands, **options)
    wanted = operands[2] is not None, operands[4] is not None
    return [t for t, is_wanted in zip(found, wanted, strict=True) if is_wanted]


def opcheck(case: Case, arguments: tuple) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if case.format == "int8":  # the check of mutations multiplies, which float8 cannot
        checks.append("test_schema")
    torch.library.opcheck(OP.default, arguments, test_utils=checks)


IN_INT8 = [c for c in SMALL if c.format == "int8"]


def options_of(case: Case) -> tuple:
    """What the plan and its kernels distinguish."""
    flags = case.grad_x, case.grad_weight, case.stochastic, case.strided, case.rounds, case.seed > 0
    sizes = case.m % 2, case.m == 1, case.n == 1, case.m * case.n == 0
    return case.dtype, case.weight_dtype, *flags, *sizes


EMULATED = [
    *(pytest.param(c, False, id=c.name) for c in IN_INT8),
    *(
        pytest.param(c, True, id=f"{c.name}-apart")
        for c in IN_INT8
        if c.name in ("typical", "stochastic", "rounds", "rounds-prime", "fp32")
    ),
]
"""`apart`: with one copy of the codes after the other."""


@pytest.mark.cover("values", case=options_of, apart=str)
@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize(("case", "apart"), EMULATED)
def test_the_plan_emulated(case: Case, apart: bool) -> None:
    """Quantization, the seed and both products by CUDA's sources, in one allocation that is not zero."""
    arguments = case.arguments()
    operands = arguments[0], *arguments[2:6]
    with (
        emulator.quantization(),
        scaled_mm_emulator.emulated(),
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
    ):
        linear_gradients.planned.cache_clear()
        together = linear_gradients.planned(*map(layout, operands), case.format, *arguments[6:])
        linear_gradients.planned.cache_clear()
        found = together
        if apart:
            with mock.patch.object(linear_gradients, "APART", 1):
                found = linear_gradients.planned(
                    *map(layout, operands), case.format, *arguments[6:]
                )
            linear_gradients.planned.cache_clear()
        assert (found is None) == (case.name in IN_PARTS)
        if found is None:
            return
        assert len(found.plan.scratch) == 1
        if apart:
            assert scratch_bytes(found) < scratch_bytes(together)
        assert found.products == ("int8 sm90",) * (case.grad_x + case.grad_weight)
        results = launch_plan.run(found.plan, operands)
    for got, expected in zip(results, reference(*arguments), strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize(
    "name", ["e4m3", "e4m3-fp32", "e5m2", "tensorwise", "rounds-e5m2", "rounds-tensorwise"]
)
def test_cublas_gets_parts_of_the_plan(name: str) -> None:
    """Its operands and scales are parts of tensors of their dtypes, and other scratch memory is among the scales."""
    case = next(c for c in CASES if c.name == name)
    arguments = case.arguments()
    operands = arguments[0], *arguments[2:6]
    with (
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
        mock.patch.object(nvrtc, "capability", lambda device: (9, 0)),
        mock.patch.object(nvrtc, "cuda_version", lambda: (13, 0)),
        mock.patch.object(
            scaled_mm, "_implementation", lambda a, b: ("float8 cublas", scaled_mm._empty_sum)
        ),
        emulator.uncompiled(),
    ):
        linear_gradients.planned.cache_clear()
        found = linear_gradients.planned(*map(layout, operands), case.format, *arguments[6:])
        linear_gradients.planned.cache_clear()
    assert found is not None and found.products == ("float8 cublas",) * 2
    tensors = [None] * 5 + [*found.plan.results, *found.plan.scratch]
    made = [buffer.dtype for buffer in found.plan.scratch if buffer.fill != 1]
    assert len(set(made)) == len(made) and torch.uint8 not in made
    scales = found.plan.scratch[made.index(torch.float32)]
    assert 0 < scales.filled_bytes <= scales.nbytes
    products = found.plan.launches[-2:]
    for product in products:
        assert tensors[product.a.tensor].dtype == FORMATS[case.format][0]
        assert tensors[product.a_scale.tensor] is scales
        assert tensors[product.b_scale.tensor] in (None, scales, *found.plan.scratch[len(made) :])
        assert product.a.shape[1] == product.b.shape[1]
        assert (product.a.shape[0], product.b.shape[0]) == product.out.shape
        for part in (product.a, product.a_scale, product.b, product.b_scale):
            if part.tensor > 6:
                buffer = tensors[part.tensor]
                end = part.offset + math.prod(part.shape) * buffer.dtype.itemsize
                assert part.offset % launch_plan.PART == 0 and end <= buffer.nbytes
    assert [p.out.tensor for p in products] == [5, 6]


@pytest.mark.parametrize("names", [("sm90", "cublas"), ("cublas", "sm90"), ("cublas",) * 2])
def test_float8_codes_apart_share_memory(names: tuple[str, str]) -> None:
    """Whichever kernels multiply: long sums are those of our own."""
    m, n, k = 1024, 2048, 128
    grad, weight, x = torch.zeros(m, n), torch.zeros(k, n), torch.zeros(k, m)
    e4m3 = torch.float8_e4m3fn
    operands = grad.bfloat16(), weight.to(e4m3), torch.ones(n), x.to(e4m3), torch.ones(k)
    described = *map(layout, operands), "e4m3", False, 0, False, torch.bfloat16
    order = {n: names[0], m: names[1]}

    def chosen(a: TensorLayout, b: TensorLayout) -> tuple[str, Any]:
        return f"float8 {order[a.shape[1]]}", scaled_mm._empty_sum

    found = []
    with (
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
        mock.patch.object(nvrtc, "capability", lambda device: (9, 0)),
        mock.patch.object(nvrtc, "cuda_version", lambda: (13, 0)),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 132),
        mock.patch.object(scaled_mm, "_implementation", chosen),
        emulator.uncompiled(),
        scaled_mm_emulator.emulated(),
    ):
        for least in (1 << 40, 1):
            with mock.patch.object(linear_gradients, "APART", least):
                linear_gradients.planned.cache_clear()
                found.append(linear_gradients.planned(*described))
    linear_gradients.planned.cache_clear()
    together, apart = found
    assert apart.products == tuple(f"float8 {name}" for name in names)
    assert scratch_bytes(together) - scratch_bytes(apart) >= m * n - 4 * launch_plan.PART


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 127, 128, 200, 1000])
def test_the_seed_is_the_sum_of_the_bits(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 9).to(dtype)
    width = 32 if dtype == torch.float32 else 16
    step = seed_step(rows)
    assert step >= 2 and (rows < 128 or rows / step >= 64)
    for seed in (0, 1, -3, 2**70):
        bits = x[::step].reshape(-1).view(torch.int32 if width == 32 else torch.int16).tolist()
        expected = (sum(bits) + seed * 0x9E3779B1 + 2**63) % 2**64 - 2**63
        assert seed_of(x, seed).item() == expected
        assert -(2**63) <= seed_start(seed) < 2**63


def wrong(**changes) -> tuple:
    names = ("grad", "format", "weight", "weight_scale", "x", "x_scale", "stochastic", "seed")
    names = (*names, "tensorwise", "dtype")
    given = dict(zip(names, CASES[0].arguments(), strict=True))
    return tuple((given | changes).values())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"grad": torch.zeros(4, 4, dtype=torch.int8)}, TypeError, "torch.int8"),
        ({"dtype": torch.float64}, TypeError, "torch.float64"),
        ({"format": "int4"}, ValueError, "'int4'"),
        ({"grad": torch.zeros(2, 128, 64)}, ValueError, r"\(2, 128, 64\)"),
        (dict.fromkeys(("weight", "weight_scale", "x", "x_scale")), ValueError, "neither"),
        (
            {"x": torch.zeros(48, 112, dtype=torch.int8)},
            ValueError,
            r"x .*\(48, 128\), got \(48, 112\)",
        ),
        ({"weight": torch.zeros(48, 64, dtype=torch.float8_e4m3fn)}, TypeError, "float8_e4m3fn"),
        (
            {"weight_scale": torch.ones(7)},
            ValueError,
            r"weight_scale .*\(64,\) or \(1,\), got \(7,\)",
        ),
        ({"x_scale": torch.ones(48, dtype=torch.float64)}, TypeError, "float64"),
        ({"x_scale": None}, ValueError, "x and x_scale are"),
        ({"tensorwise": True}, ValueError, "tensorwise"),
        ({"weight": None}, ValueError, "scales of weight came without"),
        ({"weight_scale": None}, ValueError, "int8 .*without weight_scale"),
        (
            {"weight": torch.zeros(64, 48, dtype=torch.int8), "weight_scale": None},
            *(TypeError, "int8 without weight_scale"),
        ),
        ({"weight": torch.zeros(7, 48), "weight_scale": None}, ValueError, r"\[64, K\].*\(7, 48\)"),
        ({"x_scale": torch.ones(48, device="meta")}, ValueError, "one device"),
    ],
)
def test_wrong_arguments(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        launcher.called(OP.default, *wrong(**changes))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda(case: Case) -> None:
    """The plan, in Python and by the launcher, gives the bits of the parts; with other values than it learned from."""
    for _ in range(3):
        arguments = case.arguments("cuda")
        expected = reference(*arguments)
        for got, wanted in zip(OP(*arguments), expected, strict=True):
            assert same_bits(got, wanted)
    if nvrtc.runs_on_hopper(arguments[0].device):
        operands = arguments[0], *arguments[2:6]
        found = linear_gradients.planned(*map(layout, operands), case.format, *arguments[6:])
        assert (found is None) == (case.name in IN_PARTS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.grad_x and c.grad_weight], ids=lambda c: c.name
)
def test_cuda_apart(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes along columns in the memory of those along rows, which the first product has read."""
    arguments = case.arguments("cuda")
    if not nvrtc.runs_on_hopper(arguments[0].device):
        pytest.skip("needs a GPU of compute capability 9.0")
    operands = arguments[0], *arguments[2:6]
    described = *map(layout, operands), case.format, *arguments[6:]
    together = linear_gradients.planned(*described)
    linear_gradients.planned.cache_clear()
    monkeypatch.setattr(linear_gradients, "APART", 1)
    found = linear_gradients.planned(*described)
    linear_gradients.planned.cache_clear()
    assert (found is None) == (case.name in IN_PARTS)
    if found is None or together is None:
        return
    assert len(found.plan.launches) == len(together.plan.launches) + 1
    assert scratch_bytes(found) <= scratch_bytes(together)
    results = launch_plan.run(found.plan, operands)
    for got, wanted in zip(results, reference(*arguments), strict=True):
        assert same_bits(got, wanted)


@pytest.mark.gpu
def test_the_launcher_runs_it_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in CASES if c.name == "several-tiles")
    for _ in range(2):
        arguments = case.arguments("cuda")
        OP(*arguments)
    if not nvrtc.runs_on_hopper(arguments[0].device):
        pytest.skip("needs a GPU of compute capability 9.0")
    arguments = replace(case, name="again").arguments("cuda")
    expected = reference(*arguments)
    for name in ("planned", "reference"):
        monkeypatch.setattr(linear_gradients, name, None)
    for got, wanted in zip(OP(*arguments), expected, strict=True):
        assert same_bits(got, wanted)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    arguments = next(c for c in CASES if c.name == "stochastic").arguments("cuda")
    for _ in range(2):
        OP(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*arguments)
    for factor in (2.5, -0.3):
        arguments[0].mul_(factor)  # another seed, too
        graph.replay()
        for got, wanted in zip(out, reference(*arguments), strict=True):
            assert same_bits(got, wanted)


@pytest.mark.gpu
def test_cuda_operator_is_registered_well() -> None:
    for case in CASES[:4]:
        opcheck(case, case.arguments("cuda"))
