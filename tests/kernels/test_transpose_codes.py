"""transpose_codes: PyTorch and Triton against a transposed copy."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.transpose_codes import CASES, Case
from lowbit_kernels.quantize.transpose_codes import reference, transpose_codes
from tests.kernels.interpreted import interpreted

OP = torch.ops.lowbit.transpose_codes


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    codes, k = case.arguments()
    experts, n, _ = case.shape
    out = transpose_codes(codes, k)
    assert out.shape == (experts, k, n + -n % 16) and out.dtype == case.dtype
    as_bytes = out.view(torch.uint8)
    assert torch.equal(as_bytes[..., :n], codes.view(torch.uint8)[..., :k].mT)
    assert out.is_contiguous() and not as_bytes[..., n:].any()
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(OP.default, (codes, k), test_utils=checks)


INTERPRETED = """
import json, torch
from lowbit_kernels.runtime.launches import counted
from tests.kernels.test_transpose_codes import CASES, OP, reference

results = []
for case in CASES:
    codes, k = case.arguments()
    with counted() as calls:
        found, expected = OP(codes, k), reference(codes, k)
    same = torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    empty = codes.numel() * k == 0
    same &= calls == {("transpose_codes", "torch" if empty else "triton"): 1}
    results.append(same)
print(json.dumps(results))
"""


def test_interpreted_kernel() -> None:
    assert all(interpreted(INTERPRETED))


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"takes codes of torch\.int8"):
        transpose_codes(torch.zeros(1, 2, 3), 3)
    with pytest.raises(ValueError, match="k must be 0 to K, here 16, got 17"):
        transpose_codes(torch.zeros(2, 3, 16, dtype=torch.int8), 17)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, Case("many", (5, 1000, 1536), 1530)], ids=lambda c: c.name
)
def test_cuda(case: Case) -> None:
    """The first call brings the launcher in, the second teaches it this layout, and the third runs without Python."""
    for step in range(3):
        codes, k = case.arguments("cuda")
        codes.view(torch.uint8).add_(step)
        after = torch.ones(3, device="cuda")
        found, expected = (f(codes, k, after).view(torch.uint8) for f in (OP, reference))
        assert torch.equal(found, expected)
