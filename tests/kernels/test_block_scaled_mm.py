"""block_scaled_mm: every implementation against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.cases.block_scaled_mm import CASES, Case
from lowbit_kernels.matmul import block_scaled_mm as module
from lowbit_kernels.matmul.block_scaled_mm import block_scaled_mm, reference
from lowbit_kernels.runtime import launches

OP = torch.ops.lowbit.block_scaled_mm
SMALL = [case for case in CASES if not case.large]
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
E4M3 = torch.float8_e4m3fn


def by_name(cases: list[Case]):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def exact(a, b, a_scale, b_scale, bias=None, out_dtype=None) -> torch.Tensor:
    """The formula group by group in float64, by numpy."""
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    a, b, a_scale, b_scale = (x.cpu().double().numpy() for x in (a, b, a_scale, b_scale))
    out = np.zeros((m, n))
    for g in range(k // 128):
        own = slice(128 * g, 128 * g + 128)
        by_column = b_scale[g] if b_scale.shape == (k // 128, n) else b_scale[:, g].repeat(128)[:n]
        out += (a[:, own] @ b[:, own].T) * a_scale[g][:, None] * by_column
    return torch.from_numpy(out if bias is None else out + bias.cpu().double().numpy())


def assert_close(out: torch.Tensor, case: Case, arguments: tuple, sums: float = 0.0) -> None:
    """In norm, within two roundings to the output dtype and a relative error `sums` of the sums."""
    expected = exact(*arguments)
    assert out.shape == expected.shape and out.dtype == case.out_dtype and out.is_contiguous()
    error = (out.cpu().double() - expected).norm()
    assert error <= (ROUNDING[case.out_dtype] + sums) * expected.norm()


@by_name(SMALL)
def test_reference_is_the_formula(case: Case) -> None:
    arguments = case.arguments()
    assert_close(reference(*arguments), case, arguments)


@by_name(SMALL)
def test_cpu(case: Case) -> None:
    arguments = case.arguments()
    with launches.counted() as calls:
        out = OP(*arguments)
    implementation = "empty" if 0 in (case.m, case.n, case.k) else "torch"
    assert calls == {("block_scaled_mm", implementation): 1}
    assert_close(out, case, arguments, sums=1e-6)


def test_a_row_of_padding_changes_nothing() -> None:
    """Rows of b that are cut from a longer matrix, as a stored weight has them, take their own tiles' scales."""
    a, b, a_scale, b_scale, *_ = Case("", 20, 300, 256).arguments()
    longer = torch.cat([b.view(torch.uint8), torch.zeros(84, 256, dtype=torch.uint8)]).view(E4M3)
    assert torch.equal(OP(a, longer[:300], a_scale, b_scale), OP(a, b, a_scale, b_scale))


@pytest.mark.parametrize("tiles", [True, False])
def test_extreme_scales(tiles: bool) -> None:
    a, b, a_scale, b_scale, *_ = Case("", 8, 130, 256, tiles).arguments()
    a_scale[1, :4] = torch.tensor([float("nan"), float("inf"), 0.0, 1e30])
    out = OP(a, b, a_scale, b_scale, None, torch.float32)
    assert out[0].isnan().all() and not out[1].isfinite().any()
    expected = exact(a, b, a_scale, b_scale)
    for row in range(2, 8):
        assert (out[row].double() - expected[row]).norm() <= 1e-5 * expected[row].norm()


FEW = [SMALL[0], SMALL[2], SMALL[-1], SMALL[len(SMALL) // 2 + 1]]


def opcheck(case: Case, device: str = "cpu") -> None:
    # the check of mutations multiplies, which float8 cannot
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(OP.default, case.arguments(device), test_utils=checks)


@by_name(FEW)
def test_operator_is_registered_well(case: Case) -> None:
    opcheck(case)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": torch.zeros(2, 256)}, TypeError, r"float8_e4m3fn, got torch\.float32"),
        ({"b": torch.zeros(3, 128).to(E4M3)}, ValueError, r"here \(3, 256\), got \(3, 128\)"),
        ({"a_scale": torch.ones(2)}, ValueError, r"a_scale .* \(2, 2\), got \(2,\)"),
        ({"a_scale": torch.ones(2, 2).double()}, TypeError, r"a_scale .* got torch\.float64"),
        ({"b_scale": torch.ones(3, 2)}, ValueError, r"\(2, 3\) or \(1, 2\), got \(3, 2\)"),
        ({"b_scale": torch.ones(1, 2, device="meta")}, ValueError, "device, got .*meta"),
        ({"bias": torch.ones(2)}, ValueError, r"\(3,\), got \(2,\)"),
        ({"bias": torch.ones(3, dtype=torch.int32)}, TypeError, r"bias .* got torch\.int32"),
        ({"out_dtype": torch.float64}, TypeError, r"out_dtype .* got torch\.float64"),
    ],
)
def test_wrong_arguments(change: dict, error: type[Exception], message: str) -> None:
    arguments = {
        "a": torch.zeros(2, 256).to(E4M3),
        "b": torch.zeros(3, 256).to(E4M3),
        "a_scale": torch.ones(2, 2),
        "b_scale": torch.ones(1, 2),
    }
    assert block_scaled_mm(**arguments).shape == (2, 3)
    with pytest.raises(error, match=message):
        block_scaled_mm(**{**arguments, **change})


def test_refuses_k_that_is_no_multiple_of_a_group() -> None:
    codes = torch.zeros(4, 64).to(E4M3)
    with pytest.raises(ValueError, match="multiple of 128, got 64; pad"):
        block_scaled_mm(codes, codes, torch.ones(1, 4), torch.ones(1, 1))


# ---- cuBLAS ----------------------------------------------------------------------------------------------------------


def accepting(a, b, a_scale, a_recipe, b_scale, b_recipe, *swizzles, output_dtype):
    """``F.scaled_mm`` with a GPU's checks of its arguments, multiplied exactly."""
    (m, k), n = a.shape, b.shape[1]
    kind, steps = F.ScalingType, k // 128
    assert a.dtype == b.dtype == E4M3 and a.stride() == (k, 1) and b.stride() == (1, k)
    assert m % 16 == 0 and n % 16 == 0 and k % 128 == 0
    assert set(swizzles) == {F.SwizzleType.NO_SWIZZLE}
    assert a_recipe == kind.BlockWise1x128
    assert a_scale.shape == (m, steps) and a_scale.stride() == (1, m)
    if b_recipe == kind.BlockWise128x128:
        four = -(-steps // 4) * 4
        assert n % 128 == 0
        assert b_scale.shape == (four, n // 128) and b_scale.stride() == (1, four)
        b_scale = b_scale.t()[:, :steps]
    else:
        assert b_recipe == kind.BlockWise1x128
        assert b_scale.shape == (n, steps) and b_scale.stride() == (1, n)
        b_scale = b_scale.t()
    assert output_dtype in (torch.bfloat16, torch.float32)
    return exact(a, b.t(), a_scale.t(), b_scale).to(output_dtype)


@by_name([case for case in SMALL if case.m * case.n * case.k])
def test_cublas_gets_operands_that_it_takes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", accepting)
    arguments = case.arguments()
    assert_close(module._by_cublas(*arguments), case, arguments, sums=2.0**-24)


def test_cublas_gets_the_strides_of_full_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dimension of size 1 may have any stride."""
    monkeypatch.setattr(F, "scaled_mm", accepting)
    case = Case("", 16, 128, 128)
    a, b, a_scale, b_scale, *rest = case.arguments()
    a_scale = a_scale.as_strided(a_scale.shape, (1, 1))
    arguments = (a, b, a_scale, b_scale, *rest)
    assert_close(module._by_cublas(*arguments), case, arguments)


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@by_name(CASES)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    out, expected = OP(*arguments).double(), reference(*arguments).double()
    # Hopper sums a group with about 14 bits
    assert (out - expected).norm() <= (ROUNDING[case.out_dtype] + 1e-3) * expected.norm()


@pytest.mark.gpu
@by_name(FEW)
def test_cuda_operator_is_registered_well(case: Case) -> None:
    opcheck(case, "cuda")
