"""top_experts and weighted_sum: the references, the Triton kernels in the interpreter, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit_kernels.decoding.top_experts import top_experts
from lowbit_kernels.decoding.weighted_sum import weighted_sum
from lowbit_kernels.runtime import launches
from tests.kernels.interpreted import interpreted
from tests.schemes import relative_error

BF16, FP32 = torch.bfloat16, torch.float32
ROUTERS = [(3, 128, 8, True), (1, 4, 2, True), (2, 60, 4, False), (5, 1, 1, True), (0, 8, 2, False)]
SUMS = [(3, 8, 300), (1, 2, 64), (70, 4, 1030), (2, 1, 7), (0, 2, 16)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def choice(case: tuple, device: str = "cpu", dtype: torch.dtype = BF16) -> tuple:
    """The arguments, and what is expected in float64: no two logits are equal."""
    tokens, experts, top, normalized = case
    order = torch.rand(tokens, experts).argsort(-1)
    logits = (order.float() / 16 - 2).to(device, dtype)
    p, ids = logits.double().softmax(-1).topk(top)
    return (logits, top, normalized), p / p.sum(-1, keepdim=True) if normalized else p, ids


def check_choice(case: tuple, device: str = "cpu") -> int:
    """How many kernels ran."""
    (logits, top, normalized), expected, ids = choice(case, device)
    with launches.counted() as calls:
        found, chosen = top_experts(logits, top, normalized=normalized, dtype=FP32)
        rounded, _ = top_experts(logits, top, normalized=normalized, dtype=BF16)
    assert torch.equal(chosen, ids) and chosen.is_contiguous()
    assert found.dtype == FP32 and rounded.dtype == BF16
    if found.numel():
        assert relative_error(found.double(), expected) < 1e-6
        assert relative_error(rounded.double(), expected) < 2**-8
    return calls["top_experts", "triton"]


def check_sum(case: tuple, device: str = "cpu") -> int:
    tokens, k, width = case
    y = torch.randn(tokens * k, width + 3, device=device, dtype=BF16)[:, :width]
    weights = torch.rand(tokens, k, device=device)
    expected = (y.double().view(tokens, k, width) * weights.double()[..., None]).sum(1)
    with launches.counted() as calls:
        found = weighted_sum(y, weights)
    assert found.dtype == BF16 and found.shape == (tokens, width)
    if found.numel():
        assert relative_error(found.double(), expected) < 2e-3
    return calls["weighted_sum", "triton"]


@pytest.mark.parametrize("case", ROUTERS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_most_probable_experts(device: str, case: tuple) -> None:
    assert check_choice(case, device) == (2 if device == "cuda" and case[0] else 0)


@pytest.mark.parametrize("case", SUMS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_sums_by_weight(device: str, case: tuple) -> None:
    assert check_sum(case, device) == (1 if device == "cuda" and case[0] else 0)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_passes(device: str) -> None:
    logits = torch.randn(3, 16, device=device)
    logits[1, 5] = torch.nan
    weights, ids = top_experts(logits, 4, normalized=True, dtype=FP32)
    assert weights[1].isnan().all() and not weights[[0, 2]].isnan().any()
    assert ids.min() >= 0 and ids.max() < 16
    y = torch.ones(6, 40, device=device)
    y[2, 7] = torch.nan
    out = weighted_sum(y, torch.ones(3, 2, device=device))
    assert out.isnan().nonzero().tolist() == [[1, 7]]


def test_interpreted_kernels() -> None:
    ran = interpreted("""
import json
from tests.kernels.test_expert_choice import ROUTERS, SUMS, check_choice, check_sum
found = [[check_choice(case) for case in ROUTERS], [check_sum(case) for case in SUMS]]
print(json.dumps(found))
""")
    assert ran == [[2, 2, 2, 2, 0], [1, 1, 1, 1, 0]]


def test_operators_are_registered_well() -> None:
    ops: Any = torch.ops.lowbit
    torch.library.opcheck(ops.top_experts.default, (torch.randn(3, 8), 2, True), {"dtype": FP32})
    torch.library.opcheck(ops.weighted_sum.default, (torch.randn(6, 8), torch.rand(3, 2)))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="top must be 1 to the 4 experts, got 5"):
        top_experts(torch.randn(2, 4), 5, dtype=FP32)
    with pytest.raises(ValueError, match="a row for each of the 3 x 2 weights, got 5"):
        weighted_sum(torch.randn(5, 4), torch.rand(3, 2))
