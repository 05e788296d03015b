"""round_columns: the formula in float64, one element after another, and the kernel against it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cases.round_columns import CASES, Case
from lowbit_kernels.quantize.round_columns import round_columns
from lowbit_kernels.runtime import launches
from tests.kernels.interpreted import interpreted


def formula(
    w: Tensor,
    upper: Tensor,
    group: Tensor,
    scale: Tensor,
    least: Tensor,
    most: Tensor,
    offset: Tensor | None,
    levels: Tensor,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor]:
    left, upper, scale = w.double().clone(), upper.double(), scale.double()
    values, errors = torch.empty_like(left), torch.empty_like(left)
    for j, g in enumerate(group.tolist()):
        zero = 0.0 if offset is None else offset[g].double()
        x = (left[j] - zero) / scale[g]
        if len(levels):
            own = levels.double()
            x = own[(x[:, None] - own).abs().argmin(1)]
        else:
            x = torch.minimum(torch.maximum(x.round(), least[g].double()), most[g].double())
        values[j] = x * scale[g] + zero
        if kept is not None:
            values[j] *= kept[j]
        errors[j] = (left[j] - values[j]) / upper[j, j]
        left[j + 1 :] -= torch.outer(upper[j, j + 1 :], errors[j])
    return values, errors


def check(case: Case, device: str = "cpu") -> None:
    """A value that lies in the middle of two may round otherwise, and so may those of its row after it."""
    arguments = case.arguments(device)
    found = round_columns(*arguments)
    expected = formula(*(t.cpu() if isinstance(t, Tensor) else t for t in arguments))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        far = (a.cpu().double() - b).abs() > 1e-4 * b.abs().clamp(min=1)
        rows = far.any(0).double().mean() if far.numel() else 0.0
        assert float(rows) < (0.05 if b.shape[1] > 20 else 1e-9), case.name


SMALL = [case for case in CASES if not case.large]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_reference(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel(case: Case) -> None:
    with launches.counted() as calls:
        check(case, "cuda")
    assert calls["round_columns", "triton"] == (1 if case.columns and case.rows else 0)


def test_interpreted() -> None:
    code = "import json; from tests.kernels.test_round_columns import launched; print(json.dumps(launched()))"
    assert interpreted(code) == len(INTERPRETED)


INTERPRETED = ("one-element", "whole", "levels-and-zeros", "pruned")
"""The interpreter takes 1 s for 100 columns."""


def launched() -> int:
    """How often the kernel ran, after it was compared in these cases."""
    with launches.counted() as calls:
        for case in SMALL:
            if case.name in INTERPRETED:
                check(case)
    return calls["round_columns", "triton"]


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.lowbit.round_columns, SMALL[3].arguments())


def test_bad_shapes_are_refused() -> None:
    w, upper, *rest = SMALL[2].arguments()
    with pytest.raises(ValueError, match="up to 128 columns, got 129"):
        round_columns(torch.zeros(129, 64), torch.eye(129), torch.zeros(129).long(), *rest[1:])
    with pytest.raises(ValueError, match="upper"):
        round_columns(w, upper[:3], *rest)
