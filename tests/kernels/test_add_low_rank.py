"""add_low_rank and low_rank_gradients against float64; chunks, autocast, empty shapes, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cases.add_low_rank import CASES, Case
from lowbit_kernels.composed import add_low_rank as module
from lowbit_kernels.composed.add_low_rank import add_low_rank, low_rank_gradients, reference
from tests.schemes import relative_error

SMALL = [c for c in CASES if not c.large]
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 3e-7, torch.float64: 1e-15}
each_case = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)


def check(case: Case, device: str = "cpu") -> None:
    w, a, b, scales = case.arguments(device)
    found = add_low_rank(w, a, b, scales)
    assert found.shape == w.shape and found.dtype is w.dtype and found.is_contiguous()
    assert relative_error(found, reference(w, a, b, scales)) < ROUNDING[case.dtype]
    if not a:
        assert torch.equal(found, w)


def check_gradients(case: Case, device: str = "cpu") -> None:
    grad, downs, ups, scales = case.arguments(device)
    for a, b, scale in zip(downs, ups, scales, strict=True):
        grad_a, grad_b = low_rank_gradients(grad, a, b, scale)
        assert (grad_a.dtype, grad_b.dtype) == (a.dtype, b.dtype)
        bound = max(ROUNDING[case.factors], 1e-15 if case.dtype is torch.float64 else 1e-5)
        assert relative_error(grad_a, scale * b.double().t() @ grad.double()) < bound
        assert relative_error(grad_b, scale * grad.double() @ a.double().t()) < bound


@each_case
def test_sum(case: Case) -> None:
    check(case)


@each_case
def test_gradients(case: Case) -> None:
    check_gradients(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_on_a_gpu(case: Case) -> None:
    check(case, "cuda")
    check_gradients(case, "cuda")


@pytest.mark.cover(
    "values", case=lambda c: (c.name == "two-chunks", len(c.arguments()[1]), c.dtype)
)
@each_case
def test_op(case: Case) -> None:
    w, a, b, scales = case.arguments()
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if w.numel() < 2**20:
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.lowbit.add_low_rank.default, (w, a, b, scales), test_utils=checks
    )
    for down, up, scale in zip(a, b, scales, strict=True):
        op = torch.ops.lowbit.low_rank_gradients.default
        torch.library.opcheck(op, (w, down, up, scale), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_give_the_whole_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    w, a, b, scales = Case("", 37, 24, (3, 4), dtype).arguments()
    whole = add_low_rank(w, a, b, scales), low_rank_gradients(w, a[0], b[0], 0.5)
    monkeypatch.setattr(module, "CHUNK", 5 * 24)
    parts = add_low_rank(w, a, b, scales), low_rank_gradients(w, a[0], b[0], 0.5)
    flat = [(whole[0], parts[0]), *zip(whole[1], parts[1], strict=True)]
    assert all(relative_error(x, y) < ROUNDING[dtype] for x, y in flat)


def test_autocast_changes_no_bit() -> None:
    w, a, b, scales = Case("", 37, 24, (3,), torch.float32).arguments()
    expected = add_low_rank(w, a, b, scales), *low_rank_gradients(w, a[0], b[0], 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        found = add_low_rank(w, a, b, scales), *low_rank_gradients(w, a[0], b[0], 0.5)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_transposed_operands() -> None:
    w, (a,), (b,), _ = Case("", 37, 24, (3,)).arguments()
    expected = add_low_rank(w, [a], [b], [0.5])
    turned = [t.t().contiguous().t() for t in (w, a, b)]
    assert relative_error(add_low_rank(turned[0], [turned[1]], [turned[2]], [0.5]), expected) < 4e-3


def test_nan_stays_where_it_is() -> None:
    w, a, b, scales = Case("", 6, 8, (2,), torch.float32).arguments()
    b[0][3, 1] = torch.nan
    bad = add_low_rank(w, a, b, scales).isnan()
    assert bad[3].all() and bad.sum() == 8


def refused(w: Tensor, a: Tensor, b: Tensor) -> None:
    add_low_rank(w, [a], [b], [1.0])


def test_refusals() -> None:
    w, a, b = torch.ones(4, 6), torch.ones(2, 6), torch.ones(4, 2)
    for misfit in [(w, a, b.t()), (w, a[:, :5], b), (w[:3], a, b), (w[0], a, b), (w, a[:1], b)]:
        with pytest.raises(ValueError, match=r"w \[N, K\], a \[R, K\] and b \[N, R\], got"):
            refused(*misfit)
    with pytest.raises(TypeError, match=r"takes a in .* got torch.int8"):
        refused(w, a.to(torch.int8), b)
    with pytest.raises(ValueError, match="as many a, b and scales"):
        add_low_rank(w, [a], [b], [])
