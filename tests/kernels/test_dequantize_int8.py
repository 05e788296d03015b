"""dequantize_int8: every path against the formula, to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit_kernels import dequantize_int8
from lowbit_kernels.dequantize_int8 import CASES, Case, reference
from tests.kernels.interpreted import interpreted
from tests.kernels.test_dequantize_int4 import equal_bits

SMALL = [case for case in CASES if not case.large]
OP = torch.ops.lowbit.dequantize_int8


def formula(codes, scale, zero_point, group_size, size, dtype) -> torch.Tensor:
    """With every parameter written out for each element; products of float32, which float64 gives exactly."""
    wide = codes.double()
    if zero_point is not None:
        wide = wide - zero_point.double().repeat_interleave(group_size, 1)
    x = wide * scale.double().repeat_interleave(group_size, 1)
    return x[:, :size].float().to(dtype)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu_and_reference_are_the_formula(case: Case) -> None:
    arguments = case.arguments()
    codes, scale, zero_point, group_size, size, dtype = arguments
    out = dequantize_int8(codes, scale, zero_point, group_size=group_size, size=size, dtype=dtype)
    assert out.is_contiguous() and equal_bits(out, formula(*arguments))
    assert equal_bits(reference(*arguments), formula(*arguments))


INTERPRETED = """
import json, torch
from lowbit_kernels.dequantize_int8 import CASES
from tests.kernels.test_dequantize_int8 import OP, equal_bits, formula

torch.manual_seed(0)
results = {}
for case in CASES:
    if not case.large:
        arguments = case.arguments()
        results[case.name] = equal_bits(OP(*arguments), formula(*arguments))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton() -> dict[str, bool]:
    return interpreted(INTERPRETED)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_interpreted_kernel(under_triton: dict[str, bool], case: Case) -> None:
    assert under_triton[case.name]


@pytest.mark.parametrize("case", SMALL[::3], ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_extreme_scales(dtype: torch.dtype) -> None:
    scales = [0.0, -0.0, 1e-45, 1e-38, -1e-3, 1e4, 3e38, math.inf, -math.inf, math.nan]
    codes = torch.randint(-128, 128, (len(scales), 64), dtype=torch.int8)
    arguments = (codes, torch.tensor(scales)[:, None].repeat(1, 4), None, 16, 64, dtype)
    assert equal_bits(OP(*arguments), reference(*arguments))


@pytest.mark.parametrize(
    ("change", "raised", "message"),
    [
        ({"codes": torch.zeros(2, 8, dtype=torch.uint8)}, TypeError, r"int8, got torch\.uint8"),
        ({"scale": torch.ones(2, 2).double()}, TypeError, r"got torch\.float64"),
        ({"dtype": torch.int32}, TypeError, r"a result of .*; got torch\.int32"),
        ({"zero_point": torch.zeros(2, 2)}, TypeError, r"int8 or None, got torch\.float32"),
        ({"zero_point": torch.zeros(2, 1, dtype=torch.int8)}, ValueError, r"\(2, 2\); got \(2, 1"),
        ({"group_size": 0}, ValueError, "1 or more elements, got 0"),
        ({"group_size": 5}, ValueError, r"codes of shape \(2, 10\), got \(2, 8\)"),
        ({"size": 9}, ValueError, r"0\.\.8, .*; got 9"),
        ({"codes": torch.zeros(1, 2, 8, dtype=torch.int8)}, ValueError, "flatten leading"),
    ],
)
def test_wrong_arguments(change: dict, raised: type[Exception], message: str) -> None:
    arguments = {
        "codes": torch.zeros(2, 8, dtype=torch.int8),
        "scale": torch.ones(2, 2),
        "group_size": 4,
        "size": 8,
        "dtype": torch.float32,
    }
    assert dequantize_int8(**arguments).shape == (2, 8)
    with pytest.raises(raised, match=message):
        dequantize_int8(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    assert equal_bits(OP(*arguments), reference(*arguments))


@pytest.mark.gpu
def test_cuda_offsets_of_64_bits() -> None:
    codes, scale, *rest = Case("", 70_001, 32_768, 128, torch.bfloat16).arguments("cuda")
    out = OP(codes, scale, *rest)
    assert out.numel() > 2**31
    for rows in (slice(0, 3), slice(65_530, 65_540), slice(-3, None)):
        assert equal_bits(out[rows], reference(codes[rows], scale[rows], *rest))
