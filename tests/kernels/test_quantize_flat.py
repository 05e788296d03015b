"""quantize_flat and dequantize_flat: the kernels have the bits of the formulas, and the formulas keep their bound."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.quantize_flat import CASES, Case
from lowbit_kernels.quantize.quantize_flat import (
    codes_of,
    dequantize_flat,
    finite_codes_of,
    finite_values_of,
    quantize_flat,
    reference,
    values_of,
)
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]
every_case = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)


def same(case: Case, device: str = "cpu") -> bool:
    """True if codes, scales and values have the bits of the formulas."""
    (x,) = case.arguments(device)
    expected = reference(x)
    found = quantize_flat(x)
    values = dequantize_flat(*found, case.count), dequantize_flat.reference(*expected, case.count)
    equal = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    return all(equal) and torch.equal(*(v.nan_to_num(7.0) for v in values))


@every_case
def test_cpu_and_opcheck(case: Case) -> None:
    torch.manual_seed(0)
    (x,) = case.arguments()
    codes, scale = quantize_flat(x)
    read, exact = dequantize_flat(codes, scale, case.count).double(), x.double()
    assert same(case)
    finite = exact.isfinite()
    largest = torch.where(finite, exact, 0).abs()
    largest = torch.nn.functional.pad(largest, (0, -case.count % 128)).view(-1, 128).amax(1)
    largest = largest.repeat_interleave(128)[: case.count]
    info = torch.finfo(case.dtype)
    bound = largest / 252 * (1 + 1e-5) + exact.abs() * info.eps / 2 + info.smallest_normal
    assert ((read - exact).abs() <= bound)[finite].all()
    torch.testing.assert_close(read[~finite], exact[~finite], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(read[exact.abs() == largest], exact[exact.abs() == largest])
    assert not read[exact == 0].any()
    torch.library.opcheck(torch.ops.lowbit.quantize_flat, (x,))
    if not read.isnan().any():  # opcheck holds no NaN equal
        torch.library.opcheck(torch.ops.lowbit.dequantize_flat, (codes, scale, case.count))


@every_case
def test_codes_of_finite_values(case: Case) -> None:
    torch.manual_seed(0)
    (x,) = case.arguments()
    blocks = torch.nn.functional.pad(x, (0, -case.count % 128)).view(-1, 128)
    codes, scale = finite_codes_of(blocks)
    values, exact = finite_values_of(codes, scale, case.dtype), blocks.double()
    finite = exact.isfinite().all(1)
    assert not values[~finite].isfinite().any()
    assert (scale[finite] >= 0).all()
    info, largest = torch.finfo(case.dtype), exact.abs().amax(1, keepdim=True).clamp(min=2.0**-119)
    bound = largest / 252 * (1 + 1e-5) + exact.abs() * info.eps / 2 + info.smallest_normal
    assert ((values.double() - exact).abs() <= bound)[finite].all()
    alike = finite & (exact < 0).any(1) & (exact.abs().amax(1) >= 2.0**-119)
    for found, expected in zip((codes, scale), codes_of(blocks), strict=True):
        assert torch.equal(found[alike], expected[alike])
    assert torch.equal(values[alike], values_of(codes, scale, case.dtype)[alike])


INTERPRETED = """
import json, torch
from tests.kernels.test_quantize_flat import SMALL, same

torch.manual_seed(0)
print(json.dumps({case.name: same(case) for case in SMALL}))
"""


def test_the_kernels_under_the_interpreter() -> None:
    results = interpreted(INTERPRETED)
    assert all(results.values()), results


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu(case: Case) -> None:
    assert same(case, "cuda")
    assert same(case, "cuda")  # by the launch plan


def test_wrong_arguments() -> None:
    codes, scale = quantize_flat(torch.ones(300))
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        quantize_flat(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\[N\]"):
        quantize_flat(torch.ones(3, 4))
    for count in (256, 385):
        with pytest.raises(ValueError, match=f"3 blocks of 128 do not hold count={count}"):
            dequantize_flat(codes, scale, count)
