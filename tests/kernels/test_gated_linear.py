"""gated_linear: gate, up and their activation in one product, against float64."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cases.gated_linear import CASES, Case
from lowbit_kernels.composed import gated_linear
from lowbit_kernels.runtime import launches
from lowbit_kernels.weight_only.weight_mm_decode_sm90 import DecodeProduct, planned, takes
from lowbit_kernels.weight_only.weight_operands import Gate
from tests.kernels import decode_emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.test_weight_mm_decode_formats import NAMED, Product
from tests.kernels.test_weight_mm_decode_sm90_gpu import operands, operands_of, run_planned
from tests.schemes import relative_error

op: Any = torch.ops.lowbit.gated_linear
small = [case for case in CASES if not case.large]
over_cases = pytest.mark.parametrize("case", small, ids=lambda c: c.name)
BOUND = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 2e-3}
COMPOSED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def exact(arguments: tuple) -> Tensor:
    return gated_linear.reference(arguments[0].double(), *arguments[1:])


@over_cases
def test_the_formula_on_a_cpu(case: Case) -> None:
    arguments = case.arguments()
    with launches.counted() as calls:
        y = op(*arguments)
    assert y.shape == (*case.leading, case.m, case.n // 2) and y.dtype == case.dtype
    assert y.is_contiguous() and ("gated_linear", "composed") in calls
    assert y.numel() == 0 or relative_error(y, exact(arguments)) < COMPOSED[case.dtype]


def test_the_op_is_sound() -> None:
    for case in small[::3]:
        torch.library.opcheck(op.default, case.arguments())


def test_operands_that_do_not_fit() -> None:
    case = Case("", 1, 26, 64, 32)
    arguments = case.arguments()
    with pytest.raises(ValueError, match=r"activation must be one of .*silu.*, got relu"):
        op(*arguments[:8], "relu")
    codes, scale = arguments[1][:25], arguments[2][:25]
    with pytest.raises(ValueError, match="as many rows for the gate as for up, got 25 rows"):
        op(arguments[0], codes, scale, None, 32)


# ---- the kernel, emulated ------------------------------------------------------------------------


def gated(case: dict, gate: Gate, blocks: int = 2) -> tuple[Tensor, Tensor]:
    """The kernel's result, and the formula in float64."""
    own = operands_of(case)._replace(gate=gate)
    chosen = planned(own, blocks, splits=(1,), heights=(1,))
    assert chosen is not None
    with decode_emulator.emulated():
        out = run_planned(case, chosen, own)
    parts = case["x"].double(), case["codes"], case["scale"], case["zero_point"]
    how = gate.activation, gate.eps is not None, gate.eps or 0.0
    return out, gated_linear.reference(*parts, case["group_size"], None, 0, (), *how)


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "bits", "group", "zero", "gate"),
    [
        (1, 160, 4096, 4, 128, False, Gate("silu", 1e-5)),
        (1, 64, 2048, 8, 128, True, Gate("gelu_tanh", 1e-5)),
        (1, 48, 14336, 4, 128, False, Gate("silu", 1e-5)),
        (1, 1056, 4096, 4, 128, False, Gate("silu", 1e-5)),
        (3, 64, 1440, 4, 96, False, Gate("silu")),
        (4, 64, 1024, 4, 32, True, Gate("silu")),
        (16, 96, 2560, 8, 0, False, Gate("gelu_tanh")),
    ],
)
def test_the_kernel(
    m: int, n: int, k: int, bits: int, group: int, zero: bool, gate: Gate, dtype: torch.dtype
) -> None:
    """Also two parts of a row, and blocks beside those of the next launch."""
    case = operands(m, n, k, bits, group, dtype, zero=zero, device="cpu")
    out, expected = gated(case, gate, 33 if n > 1000 else 2)
    assert out.shape == (m, n // 2)
    assert relative_error(out, expected) < BOUND[dtype]


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.cover("values")
@pytest.mark.parametrize(("m", "k"), [(1, 1024), (1, 4096), (5, 768)])
@pytest.mark.parametrize("name", ["int3-value", "uint8", "float8_e4m3fn", "nf4", "mxfp4", "nvfp4"])
def test_the_kernel_in_every_kind_of_format(name: str, m: int, k: int) -> None:
    """Also the scales of parts alone, and teams."""
    given = Product(NAMED[name], m, 48, k)
    given.ends = None, None
    gate = Gate("silu", 1e-5 if m == 1 else None)
    own = given.operands._replace(gate=gate)
    assert takes(own)
    chosen = planned(own, 2, splits=(1,), heights=(1,))
    assert chosen is not None
    with decode_emulator.emulated():
        out = DecodeProduct(own, chosen)(given.tensors)
    codes, scale, zero_point, global_scale = given.weight.values()
    parts = given.x.double(), codes, scale, zero_point, given.group_size, global_scale
    how = given.bits, given.table, gate.activation, m == 1, 1e-5
    assert relative_error(out, gated_linear.reference(*parts, *how)) < 3e-3


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.cover("values")
def test_ends_of_the_range() -> None:
    """NaN and infinity in x reach all outputs; in a scale, their own."""
    case = operands(1, 64, 1024, device="cpu")
    for value in (torch.nan, torch.inf):
        x = case["x"].clone()
        x[0, 5] = value
        assert not gated({**case, "x": x}, Gate("silu", 1e-5))[0].isfinite().any()
    zeros, _ = gated({**case, "x": torch.zeros_like(case["x"])}, Gate("silu", 1e-5))
    assert not zeros.any()
    scale = case["scale"].clone()
    scale[3, 0] = scale[32 + 7, 0] = torch.nan
    found = gated({**case, "scale": scale}, Gate("silu"))[0].isnan()
    assert found[0].nonzero().flatten().tolist() == [3, 7]
    for power in (-60, 50):  # squares are float32
        x = case["x"] * 2.0**power
        out, expected = gated({**case, "x": x}, Gate("silu", 0.0))
        assert relative_error(out, expected) < BOUND[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_formula_on_a_gpu(case: Case) -> None:
    torch.manual_seed(0)
    arguments = case.arguments("cuda")
    torch.cuda.synchronize()
    with launches.counted() as calls:
        y = op(*arguments)
    tokens = case.m * prod(case.leading)
    is_one = 0 < tokens <= gated_linear.MOST_TOKENS and case.n % 16 == 0 < case.n
    is_one &= case.dtype != torch.float32 and not (case.normed and tokens > 1)
    assert ("gated_linear", "decode" if is_one else "composed") in calls
    bound = (BOUND if is_one else COMPOSED)[case.dtype]
    assert y.numel() == 0 or relative_error(y, exact(arguments)) < bound
    assert torch.equal(op(*arguments), y)
