"""top_experts and weighted_sum: the references, the Triton kernels in the interpreter, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.cases import top_experts as choices
from benchmarks.cases import weighted_sum as sums
from lowbit_kernels.decoding.top_experts import top_experts
from lowbit_kernels.decoding.weighted_sum import weighted_sum
from lowbit_kernels.runtime import launches
from tests.kernels.interpreted import interpreted
from tests.schemes import relative_error

ops: Any = torch.ops.lowbit
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODULES = {"top_experts": choices, "weighted_sum": sums}
CASES = [(name, case) for name, module in MODULES.items() for case in module.CASES]
over = pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.name}" for n, c in CASES])


def check(name: str, case: Any, device: str = "cpu") -> int:
    """Compares a call with float64. Returns how many kernels ran."""
    torch.manual_seed(0)
    arguments = case.arguments(device)
    with launches.counted() as calls:
        found = getattr(ops, name)(*arguments) if name != "top_experts" else chosen(*arguments)
    if name == "top_experts":
        logits, top, normalized, dtype = arguments
        p, ids = logits.double().softmax(-1).topk(top)
        expected = p / p.sum(-1, keepdim=True) if normalized else p
        found, own = found
        assert torch.equal(own, ids) and own.is_contiguous() and found.dtype == dtype
    else:
        y, weights = arguments
        rows = y.double().view(*weights.shape, -1) if len(weights) else y.double().view(0, 1, 16)
        expected = (rows * weights.double().unsqueeze(-1)).sum(1)
        assert found.dtype == y.dtype
    assert found.shape == expected.shape and found.is_contiguous()
    if found.numel():
        bound = 1e-6 if found.dtype == torch.float32 else 3e-3
        assert relative_error(found.double(), expected) < bound
    return calls[name, "triton"]


def chosen(logits: torch.Tensor, top: int, normalized: bool, dtype: torch.dtype) -> Any:
    return top_experts(logits, top, normalized=normalized, dtype=dtype)


@over
@pytest.mark.parametrize("device", DEVICES)
def test_against_float64(device: str, name: str, case: Any) -> None:
    assert check(name, case, device) == int(device == "cuda" and case.tokens > 0)


def test_interpreted_kernels() -> None:
    ran = interpreted("""
import json
from tests.kernels.test_expert_choice import CASES, check
print(json.dumps([[check(*case), case[1].tokens > 0] for case in CASES if not case[1].large]))
""")
    assert all(launched == int(wanted) for launched, wanted in ran)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_passes(device: str) -> None:
    logits = torch.randn(3, 16, device=device)
    logits[1, 5] = torch.nan
    weights, ids = top_experts(logits, 4, normalized=True, dtype=torch.float32)
    assert weights[1].isnan().all() and not weights[[0, 2]].isnan().any()
    assert ids.min() >= 0 and ids.max() < 16
    y = torch.ones(6, 40, device=device)
    y[2, 7] = torch.nan
    out = weighted_sum(y, torch.ones(3, 2, device=device))
    assert out.isnan().nonzero().tolist() == [[1, 7]]


@pytest.mark.parametrize("name", MODULES)
def test_operators_are_registered_well(name: str) -> None:
    torch.library.opcheck(getattr(ops, name).default, MODULES[name].CASES[0].arguments())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="top must be 1 to the 4 experts, got 5"):
        top_experts(torch.randn(2, 4), 5, dtype=torch.float32)
    with pytest.raises(ValueError, match="a row for each of the 3 x 2 weights, got 5"):
        weighted_sum(torch.randn(5, 4), torch.rand(3, 2))
