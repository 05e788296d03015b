"""dequantize_int4: the reference against the formula, and every path against the reference, to the bit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lowbit_kernels import dequantize_int4
from lowbit_kernels.dequantize_int4 import CASES, Case, reference

ROOT = Path(__file__).resolve().parents[2]
SMALL = [case for case in CASES if not case.large]
OP = torch.ops.lowbit.dequantize_int4


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same dtype, shape and bits; NaNs, whose payload is nobody's promise, in the same places."""
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(bits(a)[~a.isnan()], bits(b)[~b.isnan()])


def formula(packed, scale, zero_point, group_size, size, dtype) -> torch.Tensor:
    """Element by element, in numpy's float32."""
    rows = packed.shape[0]
    x = np.zeros((rows, size), dtype=np.float32)
    packed = packed.numpy()
    scale = scale.float().numpy()
    for n in range(rows):
        for k in range(size):
            code = (int(packed[n, k // 2]) >> (4 * (k % 2))) % 16 - 8
            zero = 0 if zero_point is None else int(zero_point[n, k // group_size])
            with np.errstate(all="ignore"):
                x[n, k] = np.float32(code - zero) * scale[n, k // group_size]
    return torch.from_numpy(x).to(dtype)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_reference_is_the_formula(case: Case) -> None:
    arguments = case.arguments()
    assert equal_bits(reference(*arguments), formula(*arguments))


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    packed, scale, zero_point, group_size, size, dtype = arguments = case.arguments()
    out = dequantize_int4(packed, scale, zero_point, group_size=group_size, size=size, dtype=dtype)
    assert out.is_contiguous() and equal_bits(out, reference(*arguments))


INTERPRETED = """
import json, torch
from lowbit_kernels import triton_runtime
from lowbit_kernels.dequantize_int4 import CASES, reference

assert triton_runtime.runs_on(torch.device("cpu"))
torch.manual_seed(0)
results = {}
for case in CASES:
    if not case.large:
        arguments = case.arguments()
        out = torch.ops.lowbit.dequantize_int4(*arguments)
        expected = reference(*arguments)
        view = torch.int32 if out.dtype == torch.float32 else torch.int16
        results[case.name] = (
            out.dtype == expected.dtype
            and out.shape == expected.shape
            and torch.equal(out.view(view), expected.view(view))
        )
print(json.dumps(results))
"""


def run_python(code: str, **environment: str) -> str:
    """The output of ``code`` in a fresh process, where Triton has not been imported yet."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def interpreted() -> dict[str, bool]:
    pytest.importorskip("triton")
    return json.loads(run_python(INTERPRETED, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_interpreted_kernel(interpreted: dict[str, bool], case: Case) -> None:
    assert interpreted[case.name]


def test_without_triton() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "triton":
            raise ImportError("no triton here")
sys.meta_path.insert(0, Refuse())
import torch, lowbit_kernels
out = lowbit_kernels.dequantize_int4(
    torch.tensor([[0x80, 0xF7]], dtype=torch.uint8), torch.tensor([[0.5]]),
    group_size=4, size=3, dtype=torch.float32)
print(out.tolist(), "triton" in sys.modules)
"""
    assert run_python(code).strip() == "[[-4.0, 0.0, -0.5]] False"


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments())


def test_compiles_for_any_shape() -> None:
    @torch.compile(fullgraph=True, dynamic=True)
    def half(packed: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        x = dequantize_int4(packed, scale, group_size=16, size=size, dtype=torch.float32)
        return x / 2

    for rows, size in ((3, 32), (5, 48), (8, 47)):
        packed, scale, zero_point, *_ = Case("", rows, size, 16).arguments()
        expected = reference(packed, scale, zero_point, 16, size, torch.float32) / 2
        assert torch.equal(half(packed, scale, size), expected)


EXTREME_SCALES = [0.0, -0.0, 1e-45, 1e-38, -1e-3, 1e4, 3e38, math.inf, -math.inf, math.nan]


def extreme(dtype: torch.dtype) -> tuple:
    scale = torch.tensor(EXTREME_SCALES)[:, None].repeat(1, 4)
    packed = torch.randint(0, 256, (len(EXTREME_SCALES), 32), dtype=torch.uint8)
    packed[:, :8] = torch.arange(8, dtype=torch.uint8) * 0x22 + 0x10
    return packed, scale, None, 16, 64, dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_extreme_scales(dtype: torch.dtype) -> None:
    arguments = extreme(dtype)
    assert equal_bits(OP(*arguments), formula(*arguments))


def test_zero_points_span_int8() -> None:
    packed = torch.tensor([[0xF0]], dtype=torch.uint8)
    for zero in (-128, -8, 0, 7, 127):
        zero_point = torch.tensor([[zero]], dtype=torch.int8)
        out = dequantize_int4(
            packed, torch.ones(1, 1), zero_point, group_size=2, size=2, dtype=torch.float32
        )
        assert out.tolist() == [[-8 - zero, 7 - zero]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"packed": torch.zeros(2, 4, dtype=torch.int8)}, TypeError, r"uint8, got torch\.int8"),
        ({"scale": torch.ones(2, 2, dtype=torch.float64)}, TypeError, r"got torch\.float64"),
        ({"dtype": torch.int32}, TypeError, r"a result of .*; got torch\.int32"),
        ({"zero_point": torch.zeros(2, 2)}, TypeError, r"int8 or None, got torch\.float32"),
        (
            {"zero_point": torch.zeros(2, 1, dtype=torch.int8)},
            ValueError,
            r"\(2, 2\); got \(2, 1\)",
        ),
        ({"group_size": 0}, ValueError, "1 or more elements, got 0"),
        ({"group_size": 5}, ValueError, r"takes packed of shape \(2, 5\), got \(2, 4\)"),
        ({"size": 9}, ValueError, r"0\.\.8, .*; got 9"),
        ({"size": -1}, ValueError, "got -1"),
        ({"packed": torch.zeros(1, 2, 4, dtype=torch.uint8)}, ValueError, "flatten leading"),
        ({"scale": torch.ones(3, 2)}, ValueError, r"shape \(3, 4\), got \(2, 4\)"),
    ],
)
def test_wrong_arguments(change: dict, error: type[Exception], message: str) -> None:
    arguments = {
        "packed": torch.zeros(2, 4, dtype=torch.uint8),
        "scale": torch.ones(2, 2),
        "zero_point": None,
        "group_size": 4,
        "size": 8,
        "dtype": torch.float32,
    }
    assert dequantize_int4(**arguments).shape == (2, 8)
    with pytest.raises(error, match=message):
        dequantize_int4(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    out = OP(*arguments)
    assert out.is_contiguous() and equal_bits(out, reference(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL[:6], ids=lambda c: c.name)
def test_cuda_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_extreme_scales(dtype: torch.dtype) -> None:
    packed, scale, *rest = extreme(dtype)
    out = OP(packed.cuda(), scale.cuda(), *rest).cpu()
    assert equal_bits(out, formula(packed, scale, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 1], ids=["one-long-row", "rows"])
def test_cuda_offsets_of_64_bits(padding: int) -> None:
    case = Case("", 70_001, 32_768 - padding, 128, torch.bfloat16)
    packed, scale, *rest = case.arguments("cuda")
    out = OP(packed, scale, *rest)
    assert out.numel() > 2**31
    for rows in (slice(0, 3), slice(65_530, 65_540), slice(-3, None)):
        assert equal_bits(out[rows], reference(packed[rows], scale[rows], *rest))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    arguments = Case("", 256, 1024, 128, has_zero_point=True).arguments("cuda")
    OP(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*arguments)
    arguments[0].bitwise_not_()
    graph.replay()
    assert equal_bits(out, reference(*arguments))
