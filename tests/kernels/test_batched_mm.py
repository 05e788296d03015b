"""batched_mm and normalize_matrices: against float64, symmetric halves, and bits that no other matrix changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cases.batched_mm import CASES, Case
from benchmarks.cases.normalize_matrices import CASES as MATRICES
from lowbit_kernels.elementwise.normalize_matrices import normalize_matrices
from lowbit_kernels.matmul import batched_mm as module
from lowbit_kernels.matmul.batched_mm import batched_mm
from lowbit_kernels.runtime.launches import counted
from tests.covering import usually
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]


def error(found: Tensor, case: Case, operands: tuple[Tensor, Tensor, Tensor | None]) -> float:
    """Relative error against float64."""
    a, b, addend = operands
    expected = a.double() @ b.double()
    if addend is not None:
        eye = torch.eye(case.m, case.n, dtype=torch.float64, device=a.device)
        expected = 2.03 * expected - 4.8 * addend.double() + 3.4 * eye
    size = float(expected.norm()) or 1.0
    return float((found.double() - expected).norm()) / size


def is_right(case: Case, device: str = "cpu") -> bool:
    a, b, addend, *_ = case.arguments(device)
    out = batched_mm(a, b, symmetric=case.symmetric, addend=addend, **case.factors())
    alone = [
        batched_mm(
            a[i : i + 1],
            b[i : i + 1],
            symmetric=case.symmetric,
            addend=None if addend is None else addend[i : i + 1],
            **case.factors(),
        )
        for i in range(case.count)
    ]
    bound = 3e-4 if case.dtype == torch.float16 else 3e-3
    is_same = not alone or torch.equal(torch.cat(alone), out)
    is_symmetric = not case.symmetric or torch.allclose(out, out.mT, rtol=1e-2, atol=1e-2)
    return is_same and is_symmetric and error(out, case, (a, b, addend)) < bound


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    assert is_right(case)


@pytest.mark.parametrize("case", usually(SMALL, "a-turned", "polynomial", "bfloat16", "no-columns"))
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(torch.ops.lowbit.batched_mm, case.arguments())


INTERPRETED = """
import json, torch
from tests.kernels.test_batched_mm import SMALL, is_right, normalized

torch.manual_seed(0)
# the interpreter (triton 3.7) multiplies the bits of bfloat16 as integers
cases = [case for case in SMALL if case.dtype == torch.float16]
print(json.dumps({**{case.name: is_right(case) for case in cases}, **normalized("cpu")}))
"""


def normalized(device: str) -> dict[str, bool]:
    """True if `normalize_matrices` is right, by case."""
    found = {}
    for case in MATRICES:
        if case.large and device == "cpu":
            continue
        x, eps, dtype = case.arguments(device)
        out = normalize_matrices(x, eps, dtype)
        norms = torch.linalg.vector_norm(x.double(), dim=(1, 2), keepdim=True)
        expected = x.double() / norms.clamp_min(eps)
        alone = [normalize_matrices(x[i : i + 1], eps, dtype) for i in range(case.count)]
        is_same = not alone or torch.equal(torch.cat(alone), out)
        off = float((out.double() - expected).norm()) / (float(expected.norm()) or 1.0)
        found[case.name] = is_same and out.dtype == dtype and off < 3e-4
    x = torch.ones(3, 20, 40, device=device)
    x[1, 5, 5] = float("nan")
    out = normalize_matrices(x, 1e-7)
    found["nan"] = bool(
        out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()
    )
    return found


def test_normalize_on_the_cpu() -> None:
    results = normalized("cpu")
    assert all(results.values()), results
    for case in MATRICES:
        if not case.large:
            torch.library.opcheck(torch.ops.lowbit.normalize_matrices, case.arguments())


def test_the_kernels_under_the_interpreter() -> None:
    results = interpreted(INTERPRETED)
    assert all(results.values()), results


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu(case: Case) -> None:
    with counted() as calls:
        assert is_right(case, "cuda")
    if case.large:
        has_maps = torch.cuda.get_device_capability()[0] >= 9 and case.m % 64 == 0
        assert {name for _, name in calls} == {"maps" if has_maps else "triton"}


@pytest.mark.gpu
def test_normalize_on_a_gpu() -> None:
    results = normalized("cuda")
    assert all(results.values()), results


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"a": torch.randn(2, 3, 4)},
            TypeError,
            "a of torch.float16, torch.bfloat16, got torch.float32",
        ),
        (
            {"b": torch.ones(2, 5, 3).half()},
            ValueError,
            r"b \[B, K, N\], here \(2, 4, 3\), got \(2, 5, 3\)",
        ),
        ({"symmetric": True}, ValueError, "symmetric product is square, got m=3 and n=5"),
        ({"addend": torch.ones(2, 3, 3).half()}, ValueError, r"here \(2, 3, 5\), got \(2, 3, 3\)"),
        ({"gamma": 1.0}, ValueError, "without addend, alpha, beta and gamma must be"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype of .*, got torch.int8"),
    ],
    ids=["dtype", "shapes", "symmetric", "addend", "factors", "out-dtype"],
)
def test_refused(change: dict, error: type, message: str) -> None:
    arguments = {"a": torch.ones(2, 3, 4).half(), "b": torch.ones(2, 4, 5).half(), **change}
    with pytest.raises(error, match=message):
        batched_mm(**arguments)


def test_refused_normalization() -> None:
    with pytest.raises(TypeError, match=r"x of torch\.float32"):
        normalize_matrices(torch.ones(1, 2, 2, dtype=torch.int8), 1e-7)
    with pytest.raises(ValueError, match=r"\[count, rows, columns\], got \(2, 2\)"):
        normalize_matrices(torch.ones(2, 2), 1e-7)


def test_tiles_of_a_triangle() -> None:
    """Every tile on and below the diagonal has one number."""
    tile = torch.arange(2_000_000)
    row = ((torch.sqrt(8.0 * tile.float() + 1.0) - 1.0) * 0.5).int()
    row = torch.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = torch.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    column = tile - row * (row + 1) // 2
    assert (column >= 0).all() and (column <= row).all()
    assert module.GRANULE == 64
