"""ternary_mm: the reference against the formula, every implementation against the reference."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.cases.ternary_mm import CASES, Case
from lowbit_kernels.matmul.ternary_mm import reference, ternary_mm
from lowbit_kernels.runtime import launches
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]
every_case = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to the last bit of the dtype: only the addition of the bias may be fused."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    error = (found.double() - expected.double()).abs()
    return bool(
        (error <= 1.01 * torch.finfo(found.dtype).eps * expected.double().abs() + 1e-6).all()
    )


def launches_kernel(case: Case) -> bool:
    """True if the kernel for few rows runs where Triton does."""
    return case.m <= 64 and 0 not in (case.m, case.n, case.k)


@every_case
def test_reference_is_the_formula(case: Case) -> None:
    a, packed, a_scale, b_scale, bias, dtype = case.arguments()
    y = torch.zeros(case.m, case.n, dtype=torch.float64)
    for k in range(case.k):
        code = ((packed[:, k // 4].int() >> 2 * (k % 4)) & 3) - 2
        y += a[:, k, None].double() * code.double()
    y = y * a_scale.double()[:, None] * b_scale.double()
    y = y if bias is None else y + bias.double()
    assert agree(reference(a, packed, a_scale, b_scale, bias, dtype), y.to(dtype))


@every_case
def test_cpu(case: Case) -> None:
    arguments = case.arguments()
    assert agree(ternary_mm(*arguments), reference(*arguments))


@every_case
def test_cpu_in_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are exact, so tiles change no bit."""
    arguments = case.arguments()
    whole = ternary_mm(*arguments)
    monkeypatch.setattr(sys.modules[ternary_mm.__module__], "BYTES_ON_CPU", 1)
    assert torch.equal(ternary_mm(*arguments), whole)


@every_case
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(torch.ops.lowbit.ternary_mm, case.arguments())


INTERPRETED = """
import json, torch
from lowbit_kernels.runtime.launches import counted
from tests.kernels.test_ternary_mm import SMALL, agree, launches_kernel, reference, ternary_mm

torch.manual_seed(0)
results = {}
for case in SMALL:
    arguments = case.arguments()
    with counted() as calls:
        results[case.name] = agree(ternary_mm(*arguments), reference(*arguments))
    results[case.name] &= calls["ternary_mm", "triton"] == launches_kernel(case)
print(json.dumps(results))
"""


def test_the_kernel_under_the_interpreter() -> None:
    results = interpreted(INTERPRETED)
    assert all(results.values()), results


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu(case: Case) -> None:
    arguments = case.arguments("cuda")
    with launches.counted() as calls:
        assert agree(ternary_mm(*arguments), reference(*arguments))
    assert calls["ternary_mm", "triton"] == launches_kernel(case)


def test_wrong_arguments() -> None:
    a, packed, a_scale, b_scale, bias, _ = CASES[0].arguments()
    for arguments, error, message in (
        (
            (a.float(), packed, a_scale, b_scale),
            TypeError,
            "a of torch.int8, got torch.float32",
        ),
        ((a, packed, a_scale.double(), b_scale), TypeError, "float32, got torch.float64"),
        ((a[:, :16], packed, a_scale, b_scale), ValueError, "pad a with zeros"),
        ((a, packed, a_scale[:1], b_scale), ValueError, r"a_scale \[M\]"),
        ((a, packed, a_scale, b_scale, bias[:3]), ValueError, r"bias \[N\]"),
        (
            (a, packed, a_scale, b_scale, None, torch.int8),
            TypeError,
            "out_dtype of .*, got torch.int8",
        ),
    ):
        with pytest.raises(error, match=message):
            ternary_mm(*arguments)
