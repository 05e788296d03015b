"""The output of a linear in one op: its parts against float64, its launch plan against its parts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from benchmarks.cases.linear_output import CASES, Case
from lowbit_kernels.composed import linear_output
from lowbit_kernels.composed.linear_output import reference
from lowbit_kernels.matmul import scaled_mm
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from lowbit_kernels.runtime import launch_plan, launcher, nvrtc
from lowbit_kernels.runtime.launches import counted
from lowbit_kernels.weight_only.weight_operands import layout
from tests.covering import usually
from tests.kernels import emulator, scaled_mm_emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.test_linear_gradients import relative, same_bits

OP = torch.ops.lowbit.linear_output


SMALL = [case for case in CASES if not case.large]
EMPTY = ("no-rows", "no-columns", "no-sum")
IN_PARTS = ("prime", "one-column", *EMPTY)
"""On Hopper: results that rows of 16 bytes do not fill, and empty ones."""


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_op_is_its_parts(case: Case) -> None:
    torch.manual_seed(1)
    arguments = case.arguments()
    torch.manual_seed(1)
    x, weight, bias = case.operands()  # those of the arguments
    with counted() as calls:
        y = linear_output.linear_output(
            *arguments[:4], tensorwise=arguments[4], bias=arguments[5], out_dtype=arguments[6]
        )
    fmt, one = case.format, case.tensorwise
    codes, scale = quantize_rowcol(weight, fmt, columns=False, tensorwise=one)[:2]
    a, a_scale = arguments[:2]
    parts = scaled_mm.scaled_mm(a, codes, a_scale, scale, bias=bias, out_dtype=case.out_dtype)
    assert same_bits(y, parts)
    assert y.shape == (case.m, case.n) and y.dtype == case.out_dtype
    assert calls["quantize_rowcol", "torch"] == 1
    assert sum(n for (op, _), n in calls.items() if op == "scaled_mm") == 1
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert not exact.any() or relative(y, exact) < (0.06 if case.format == "e4m3" else 0.02)


@pytest.mark.parametrize("case", usually(SMALL, "several-tiles", "fp32", "no-rows", "e4m3"))
def test_operator_is_registered_well(case: Case) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if case.format == "int8":  # the check of mutations multiplies, which float8 cannot
        checks.append("test_schema")
    torch.library.opcheck(OP.default, case.arguments(), test_utils=checks)


def plan_of(case: Case, arguments: tuple):
    operands = *arguments[:3], arguments[5]
    linear_output.planned.cache_clear()
    with mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True):
        found = linear_output.planned(*map(layout, operands), *arguments[3:5], arguments[6])
    linear_output.planned.cache_clear()
    return found, operands


@pytest.mark.cover(
    "values",
    case=lambda c: (
        c.dtype,
        c.out_dtype,
        c.bias is None,
        c.strided,
        c.k % 2,
        c.m == 1,
        c.n == 1,
        c.m * c.n * c.k == 0,
    ),
)
@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", [c for c in SMALL if c.format == "int8"], ids=lambda c: c.name)
def test_the_plan_emulated(case: Case) -> None:
    arguments = case.arguments()
    with emulator.quantization(), scaled_mm_emulator.emulated():
        found, operands = plan_of(case, arguments)
        assert (found is None) == (case.name in IN_PARTS)
        if found is None:
            return
        assert len(found.plan.scratch) == 1 and found.products == ("int8 sm90",)
        (y,) = launch_plan.run(found.plan, operands)
    assert same_bits(y, reference(*arguments))


@pytest.mark.parametrize("name", ["e4m3", "tensorwise"])
def test_cublas_gets_parts_of_the_plan(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    with (
        mock.patch.object(
            scaled_mm, "_implementation", lambda a, b: ("float8 cublas", scaled_mm._empty_sum)
        ),
        emulator.uncompiled(),
    ):
        found, _ = plan_of(case, case.arguments())
    assert found is not None
    tensors = [None] * 4 + [*found.plan.results, *found.plan.scratch]
    product = found.plan.launches[-1]
    assert (product.a.tensor, product.a_scale.tensor, product.out.tensor) == (0, 1, 4)
    assert product.bias is None if case.bias is None else product.bias.tensor == 3
    assert tensors[product.b.tensor].dtype == torch.float8_e4m3fn
    assert tensors[product.b_scale.tensor].dtype == torch.float32
    assert product.b_scale.shape == (() if case.tensorwise else (1, case.n))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": torch.zeros(64, 48, dtype=torch.int8)}, TypeError, "torch.int8"),
        ({"weight": torch.zeros(64, 24)}, ValueError, r"\[M, 32\].*\(128, 48\)"),
        ({"weight": torch.zeros(64, 4, 8)}, ValueError, r"\(64, 4, 8\)"),
        ({"format": "int4"}, ValueError, "'int4'"),
        ({"tensorwise": True}, ValueError, "tensorwise"),
        ({"format": "e4m3"}, TypeError, "torch.int8.*e4m3"),
        ({"x_scale": torch.ones(7)}, ValueError, r"\(128,\) or \(1,\), got \(7,\)"),
        ({"bias": torch.zeros(3)}, ValueError, r"\(64,\)"),
        ({"out_dtype": torch.float64}, TypeError, "torch.float64"),
        ({"bias": torch.zeros(64, device="meta")}, ValueError, "one device"),
    ],
)
def test_wrong_arguments(changes, error, message) -> None:
    names = ("x", "x_scale", "weight", "format", "tensorwise", "bias", "out_dtype")
    given = dict(zip(names, CASES[0].arguments(), strict=True)) | changes
    with pytest.raises(error, match=message):
        launcher.called(OP.default, *given.values())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan gives the bits of the parts: in Python, and by the launcher with other values than it learned from."""
    for _ in range(3):
        arguments = case.arguments("cuda")
        expected = reference(*arguments)
        assert same_bits(OP(*arguments), expected)
    if not nvrtc.runs_on_hopper(arguments[0].device) or case.name in IN_PARTS:
        return
    for name in ("planned", "reference"):
        monkeypatch.setattr(linear_output, name, None)
    assert same_bits(OP(*arguments), expected)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    arguments = next(c for c in CASES if c.name == "several-tiles").arguments("cuda")
    for _ in range(2):
        OP(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*arguments)
    arguments[2].mul_(-0.3)
    graph.replay()
    assert same_bits(out, reference(*arguments))
    torch.library.opcheck(OP.default, arguments)
