"""batched_mm, scale_matrices and row_norms: against float64, halves, and bits that no other matrix changes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.cases.batched_mm import CASES, Case
from benchmarks.cases.scale_matrices import CASES as MATRICES
from lowbit_kernels.elementwise.scale_matrices import row_norms, scale_matrices
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


def is_right(case: Case, device: str = "cpu", interpreted: bool = False) -> bool:
    """True if a product has its bits alone too, is symmetric where it has to be, and is near that in float64."""
    a, b, addend, *_, out_dtype = case.arguments(device)
    options = {**case.factors(), "symmetric": case.symmetric, "out_dtype": out_dtype}
    out = batched_mm(a, b, addend=addend, **options)
    alone = [
        batched_mm(
            a[i : i + 1],
            b[i : i + 1],
            addend=None if addend is None else addend[i : i + 1],
            **options,
        )
        for i in range(case.count)
    ]
    bound = 3e-4 if case.dtype == torch.float16 else 3e-3
    is_same = not alone or torch.equal(torch.cat(alone), out)
    # numpy's product of a tile and its transpose is symmetric to the last bit with some kernels of its BLAS only
    slack = 0.0
    if interpreted and out.numel():
        slack = 4 * torch.finfo(out.dtype).eps * float(out.abs().max())
    is_symmetric = not case.symmetric or torch.allclose(out, out.mT, rtol=0, atol=slack)
    return is_same and is_symmetric and error(out, case, (a, b, addend)) < bound


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    assert is_right(case)


@pytest.mark.parametrize("case", usually(SMALL, "a-turned", "polynomial", "bfloat16", "no-columns"))
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(torch.ops.lowbit.batched_mm, case.arguments())


INTERPRETED = """
import json, torch
from tests.kernels.test_batched_mm import SMALL, is_right, scaled, with_maps

torch.manual_seed(0)
# the interpreter (triton 3.7) multiplies the bits of bfloat16 as integers
cases = [case for case in SMALL if case.dtype == torch.float16]
print(json.dumps({**{case.name: is_right(case, interpreted=True) for case in cases}, **scaled("cpu"), **with_maps()}))
"""


def with_maps() -> dict[str, bool]:
    """True if results by tensor maps are right, with an addend that begins where tensor maps may, and where not."""
    found = {}
    for start in (0, 1):
        a, b = torch.randn(2, 64, 64).half(), torch.randn(2, 64, 128).half()
        addend = torch.randn(2 * 64 * 128 + 1).half()[start:][: 2 * 64 * 128].view(2, 64, 128)
        with mock.patch.object(module, "has_large_tiles", lambda device: True), counted() as calls:
            out = batched_mm(a, b, addend=addend, alpha=0.5, beta=2.0)
        exact = 0.5 * (a.double() @ b.double()) + 2 * addend.double()
        assert calls == {("batched_mm", "maps"): 1}
        found[f"maps, addend from {start}"] = off(out, exact) < 3e-4
    return found


def scaled(device: str) -> dict[str, bool]:
    """True if `scale_matrices` and `row_norms` are right, by case."""
    found = {}
    for case in MATRICES:
        if case.large and device == "cpu":
            continue
        x, rows, columns, dtype = case.arguments(device)
        expected = x.double()
        expected = expected if rows is None else expected * rows.double().unsqueeze(2)
        expected = expected if columns is None else expected * columns.double().unsqueeze(1)
        out = scale_matrices(x, rows, columns, dtype)
        found[case.name] = out.dtype == dtype and off(out, expected) < 5e-4
        for order in (1, 2):
            norms = row_norms(x, order)
            alone = [row_norms(matrix[:1].unsqueeze(0), order) for matrix in x[:, :1]]
            is_same = not alone or torch.equal(torch.cat(alone), norms[:, :1])
            exact = torch.linalg.vector_norm(x.double(), order, dim=2)
            is_right = norms.dtype == torch.float32 and off(norms, exact) < 1e-6
            found[f"{case.name}, order {order}"] = is_same and is_right
    x = torch.ones(3, 20, 40, device=device)
    x[1, 5, 5] = float("nan")
    norms = row_norms(x, 2)
    found["nan"] = bool(norms[1, 5].isnan()) and int(norms.isfinite().sum()) == 59
    return found


def off(found: Tensor, expected: Tensor) -> float:
    """Relative error of a result."""
    return float((found.double() - expected).norm()) / (float(expected.norm()) or 1.0)


def test_scaling_on_the_cpu() -> None:
    results = scaled("cpu")
    assert all(results.values()), results
    for case in MATRICES:
        if not case.large:
            torch.library.opcheck(torch.ops.lowbit.scale_matrices, case.arguments())
    torch.library.opcheck(torch.ops.lowbit.row_norms, (torch.randn(2, 3, 5), 1))


def test_the_kernels_under_the_interpreter() -> None:
    results = interpreted(INTERPRETED)
    assert all(results.values()), results


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu(case: Case) -> None:
    with counted() as calls:
        assert is_right(case, "cuda")
    if case.large:
        capability = torch.cuda.get_device_capability()
        has_maps = capability[0] >= 9 and case.m % 64 == 0
        is_half = case.dtype is torch.float16 and case.out_dtype in (None, torch.float16)
        is_kept = case.symmetric and not case.a_turned and is_half and case.m % 128 == 0
        name = "sm90" if is_kept and capability == (9, 0) else "maps" if has_maps else "triton"
        assert {name for _, name in calls} == {name}


@pytest.mark.gpu
def test_scaling_on_a_gpu() -> None:
    with counted() as calls:
        results = scaled("cuda")
    assert calls["row_norms", "triton"] and calls["scale_matrices", "triton"]
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


def test_refused_scaling() -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(TypeError, match=r"x of torch\.float32"):
        row_norms(x.to(torch.int8), 2)
    with pytest.raises(ValueError, match="order must be 1 or 2, got 3"):
        row_norms(x, 3)
    with pytest.raises(ValueError, match=r"\[B, R, C\], got \(3, 4\)"):
        scale_matrices(x[0])
    with pytest.raises(ValueError, match=r"rows \[B, R\], here \(2, 3\), got \(2, 4\)"):
        scale_matrices(x, x[:, 0])


def test_tiles_of_a_triangle() -> None:
    """Every tile on and below the diagonal has one number."""
    tile = torch.arange(2_000_000)
    row = ((torch.sqrt(8.0 * tile.float() + 1.0) - 1.0) * 0.5).int()
    row = torch.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = torch.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    column = tile - row * (row + 1) // 2
    assert (column >= 0).all() and (column <= row).all()
    assert module.GRANULE == 64
