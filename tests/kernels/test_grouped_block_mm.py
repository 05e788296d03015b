"""grouped_block_mm: every implementation against float64, expert by expert."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.grouped_block_mm import CASES, Case
from lowbit_kernels.matmul import block_scaled_mm, grouped_columns, grouped_mm_sm90
from lowbit_kernels.matmul.grouped_block_mm import grouped_block_mm, reference
from lowbit_kernels.runtime import launches, nvrtc
from tests.kernels import grouped_mm_emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.test_scaled_mm import ROUNDING

OP = torch.ops.lowbit.grouped_block_mm
PRODUCTS = ("output", "grad_input", "grad_weight")
each = pytest.mark.parametrize("product", PRODUCTS)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
FULL = [case for case in CASES if case.n and sum(case.tokens) + case.beyond]
each_full_case = pytest.mark.parametrize("case", FULL, ids=lambda c: c.name)


def exact(case: Case, a, b, a_scale, b_scale, offsets, out_dtype) -> torch.Tensor:
    """The formulas in float64, group by group."""
    a, b, a_scale, b_scale = (t.cpu().double() for t in (a, b, a_scale, b_scale))
    ragged, place, start = b.dim() == 2, 0, 0
    experts = len(case.tokens)
    out = a.new_zeros((experts, len(a), len(b)) if ragged else (len(a), b.shape[1]))
    for e, count in enumerate(case.tokens):
        own = slice(start, start + count)
        if ragged:
            for g in range(place // 128, -(-(place + count) // 128)):
                group = slice(g * 128, g * 128 + 128)
                out[e] += a[:, group] @ b[:, group].T * a_scale[g][:, None] * b_scale[g]
        else:
            for g in range(a.shape[1] // 128):
                group = slice(g * 128, g * 128 + 128)
                of_tiles = b_scale[e, :, g].repeat_interleave(128)[: b.shape[1]]
                out[own] += a[own, group] @ b[e][:, group].T * a_scale[g, own][:, None] * of_tiles
        start, place = own.stop, place + -(-count // 128) * 128
    return out


def assert_close(out: torch.Tensor, case: Case, arguments: tuple, sums: float = 1e-6) -> None:
    """In norm, within two roundings to the output dtype and a relative error `sums` of the sums; zeros exactly."""
    expected = exact(case, *arguments)
    assert out.shape == expected.shape and out.dtype == case.out_dtype and out.is_contiguous()
    error = (out.cpu().double() - expected).norm()
    assert error <= (ROUNDING[case.out_dtype] + sums) * expected.norm()
    if out.dim() == 3:
        assert not out[[e for e, count in enumerate(case.tokens) if count == 0]].any()
    else:
        assert not out[sum(case.tokens) :].any()


@each
@each_case
def test_reference_and_cpu(case: Case, product: str) -> None:
    arguments = case.arguments(product=product)
    assert_close(reference(*arguments), case, arguments)
    with launches.counted() as calls:
        out = OP(*arguments)
    empty = 0 in (*out.shape, *arguments[0].shape)
    assert calls == {("grouped_block_mm", "empty" if empty else "torch"): 1}
    assert_close(out, case, arguments)


EMULATED = {"blocks": 1, "empty-experts": 2, "beyond": 1, "nothing-but-beyond": 2, "wide": 2}
"""Cases, and the tiles of a cluster that lie beside each other."""


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", [c for c in CASES if c.name in EMULATED], ids=lambda c: c.name)
@each
def test_emulated(case: Case, product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks share all tiles, so that each takes several."""
    monkeypatch.setattr(grouped_mm_sm90, "beside", lambda *shape: EMULATED[case.name])
    arguments = case.arguments(product=product)
    with grouped_mm_emulator.emulated():
        out = grouped_mm_sm90.grouped_mm(*arguments, blocks=True)
    assert_close(out, case, arguments)


@each
def test_one_expert_is_the_dense_product(product: str) -> None:
    case = Case("one", (200,), 150, 260, out_dtype=torch.float32)
    a, b, a_scale, b_scale, offsets, dtype = case.arguments(product=product)
    if product == "grad_weight":
        (a, b), groups = (t[:, :256].contiguous() for t in (a, b)), 2
        a_scale, b_scale = a_scale[:groups], b_scale[:groups]
        dense = block_scaled_mm.reference(a, b, a_scale, b_scale, None, dtype)
        assert torch.equal(reference(a, b, a_scale, b_scale, offsets, dtype)[0], dense)
    else:
        dense = block_scaled_mm.reference(a, b[0], a_scale, b_scale[0], None, dtype)
        assert torch.equal(reference(a, b, a_scale, b_scale, offsets, dtype), dense)


@each
def test_nan_stays_in_its_expert_and_rows(product: str) -> None:
    arguments = list(
        Case("nan", (130, 0, 200), 40, 256, out_dtype=torch.float32).arguments(product=product)
    )
    a_scale = arguments[2].clone()
    a_scale[0, 3] = torch.nan
    arguments[2] = a_scale
    for out in (OP(*arguments), reference(*arguments)):
        found = out.isnan()
        if product == "grad_weight":
            assert found[0, 3].all() and found.sum() == found[0, 3].numel()
        else:
            assert found[3].all() and found.sum() == found[3].numel()


@each
def test_offsets_that_fall_or_exceed_the_rows_stay_inside(product: str) -> None:
    a, b, a_scale, b_scale, _, dtype = CASES[0].arguments(product=product)
    offsets = torch.tensor([9, 4, 1000, 7], dtype=torch.int32)
    counts = grouped_columns.counts(offsets, a.shape[1] if product == "grad_weight" else len(a))
    ascending = counts.cumsum(0).int()
    found = OP(a, b, a_scale, b_scale, offsets, dtype)
    assert torch.equal(found, OP(a, b, a_scale, b_scale, ascending, dtype))


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("ends", [(9, 4, 1000, 7), (639, 640, 640, 640)])
def test_emulated_columns_beyond_the_operands_are_not_read(ends: tuple[int, ...]) -> None:
    """The columns of experts do not fit into the operands, which have 640; NaN follows the scales."""
    case = Case("exceeding", (5, 17, 1, 9), 48, 64, out_dtype=torch.float32)
    a, b, *scales, _, dtype = case.arguments(product="grad_weight")
    longer = (torch.cat([t, torch.full((8, t.shape[1]), torch.nan)]) for t in scales)
    scales = [t[: a.shape[1] // 128] for t in longer]
    operands = a, b, *scales, torch.tensor(ends, dtype=torch.int32), dtype
    with grouped_mm_emulator.emulated():
        found = grouped_mm_sm90.grouped_mm(*operands, blocks=True)
    expected = reference(*operands)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@each
@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case, product: str) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(OP.default, case.arguments(product=product), test_utils=checks)


ROWS = CASES[0].arguments()
COLUMNS = CASES[0].arguments(product="grad_weight")
REFUSED = {
    "b as [E, K, N]": (ROWS, {1: ROWS[1].mT}, ValueError, "pass b transposed"),
    "K": (ROWS, {0: ROWS[0][:, :64], 1: ROWS[1][..., :64]}, ValueError, "multiple of 128, got 64"),
    "int8": (ROWS, {0: ROWS[0].view(torch.int8)}, TypeError, "got torch.int8"),
    "offsets of others": (ROWS, {4: ROWS[4][1:]}, ValueError, r"shape \(4,\)"),
    "a scale a row": (ROWS, {2: ROWS[2][0]}, ValueError, r"a_scale .* got \(32,\)"),
    "scales of rows of b": (ROWS, {3: ROWS[3][..., 0]}, ValueError, r"b_scale must .* \(4, 1, 1\)"),
    "of other columns": (COLUMNS, {3: COLUMNS[3][1:]}, ValueError, r"b_scale must .* \(5, 64\)"),
    "out": (ROWS, {5: torch.float64}, TypeError, "out_dtype of .*, got torch.float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    given, changes, error, message = REFUSED[name]
    *tensors, dtype = (changes.get(i, part) for i, part in enumerate(given))
    with pytest.raises(error, match=message):
        grouped_block_mm(*tensors, out_dtype=dtype)


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("across", [1, 2])
@each
@each_full_case
def test_cuda(case: Case, product: str, across: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm_sm90, "beside", lambda *shape: across)
    arguments = case.arguments("cuda", product)
    for _ in range(2):  # the launcher's plan runs the second call
        assert_close(OP(*arguments), case, arguments, 2.0**-9)
    if nvrtc.runs_on_hopper(arguments[0].device):  # the launcher knows one plan
        out = grouped_mm_sm90.grouped_mm(*arguments, blocks=True)
        assert_close(out, case, arguments, 2.0**-9)
