"""The product of sm_90: its plan, the operands that it reads, and the kernel emulated on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cases.scaled_mm import E4M3, E5M2, Case
from lowbit_kernels.matmul import mm_tiles_sm90, scaled_mm_sm90
from lowbit_kernels.weight_only.weight_operands import TensorLayout, described, layout
from tests.kernels import scaled_mm_emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.test_scaled_mm import assert_close

INT8 = torch.int8, torch.int8


def test_k_is_sliced_for_products_with_few_tiles() -> None:
    plans = {
        (8192, 8192, 8192): (256, 8, 1),
        (8192, 4096, 4096): (256, 4, 1),
        (2048, 2048, 8192): (256, 4, 1),  # 64 clusters of 66
        (512, 2048, 16384): (256, 4, 4),
        (16, 4096, 4096): (64, 8, 1),  # few rows: narrow tiles
        (256, 4096, 4096): (64, 8, 1),  # 64 clusters
        (64, 14336, 4096): (128, 8, 1),
        (64, 4096, 14336): (256, 4, 4),
    }
    assert {shape: scaled_mm_sm90.plan(*shape, 132) for shape in plans} == plans


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 5000), st.integers(2, 200))
def test_no_slice_is_empty(m: int, n: int, k16: int, multiprocessors: int) -> None:
    width, _, slices = scaled_mm_sm90.plan(m, n, 16 * k16, multiprocessors)
    assert 1 <= slices <= -(-16 * k16 // 128)
    assert slices == 1 or width == 256


@pytest.mark.parametrize("width", scaled_mm_sm90.WIDTHS)
def test_the_ring_fits_shared_memory(width: int) -> None:
    stages, shared = mm_tiles_sm90.ring(width)
    assert 4 <= stages <= mm_tiles_sm90.MAX_STAGES and shared <= 227 * 1024
    source = scaled_mm_sm90.source(INT8, torch.bfloat16, None, width)
    assert f"#define STAGES {stages}\n" in source and f"#define TILE_N {width}\n" in source


@given(st.integers(1, 2000), st.sampled_from(scaled_mm_sm90.WIDTHS))
def test_copies_cover_all_rows_and_few_others(m: int, width: int) -> None:
    plan = scaled_mm_sm90.ScaledMmDivision(width, 8, 1)
    rows = plan.a_rows(m)
    assert rows % 8 == 0 and rows <= 128 // plan.beside
    for first in range(0, m, 128):
        height = min(m - first, 128)
        copied = -(-height // rows) * rows
        assert height <= copied <= 128
        assert copied - height < 32 or width == 256


def test_a_single_row_has_a_stride_that_the_tma_takes() -> None:
    row = torch.zeros(32, 1, dtype=torch.int8).T
    assert row.stride() == (1, 1) and row.contiguous().stride() == (1, 1)
    assert scaled_mm_sm90._stride(TensorLayout(*described(row))) == 32
    assert scaled_mm_sm90.is_readable(layout(row)) is (row.data_ptr() % 16 == 0)
    assert not scaled_mm_sm90.is_readable(layout(torch.zeros(33, dtype=torch.int8)[1:].view(1, 32)))


def test_the_tma_does_not_read_rows_that_overlap() -> None:
    codes = torch.zeros(4, 64, dtype=torch.int8)
    assert scaled_mm_sm90.is_readable(layout(codes)) and scaled_mm_sm90.is_readable(
        layout(codes[0].expand(1, 64))
    )
    assert not scaled_mm_sm90.is_readable(layout(codes[0].expand(4, 64)))
    assert not scaled_mm_sm90.is_readable(layout(codes.view(-1).unfold(0, 64, 16)))


FEW_STEPS = Case("few-steps", 300, 130, 144, bias=torch.float16)
ODD = Case("odd", 129, 33, 272, bias=torch.float32, out_dtype=torch.float32)
ONE_BOX = Case("one-box", 8, 100, 144)
ONE_COLUMN = Case("one-column", 70, 1, 400, out_dtype=torch.float16)
FLOAT8 = Case("float8", 129, 33, 272, E4M3, bias=torch.bfloat16)
GRADIENT = Case("gradient", 70, 40, 272, E5M2, E4M3, out_dtype=torch.float32)


@pytest.mark.cover(
    "values", case=lambda c: (c.a_dtype, c.b_dtype, c.n == 1), width=str, slices=lambda n: n > 1
)
@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("case", "width", "slices"),
    [
        (FEW_STEPS, 256, 1),
        (FEW_STEPS, 128, 1),
        (FEW_STEPS, 64, 1),
        (ODD, 256, 2),
        (ODD, 64, 1),
        (ONE_BOX, 128, 1),
        (ONE_BOX, 64, 1),
        (ONE_COLUMN, 256, 4),
        (FLOAT8, 256, 1),
        (FLOAT8, 64, 1),
        (GRADIENT, 128, 1),
        (GRADIENT, 256, 3),
    ],
    ids=lambda part: part.name if isinstance(part, Case) else str(part),
)
def test_emulated(case: Case, width: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks share all tiles, so that each takes several. Stores are as late as the kernel allows."""
    plan = scaled_mm_sm90.ScaledMmDivision(width, 2, slices)
    monkeypatch.setattr(scaled_mm_sm90, "plan", lambda *shape: plan)
    arguments = case.arguments()
    with scaled_mm_emulator.emulated():
        out = scaled_mm_sm90.multiply(*arguments)
        alone = scaled_mm_sm90.multiply(*arguments[:3], None, *arguments[4:])
    sums = 0 if case.a_dtype == torch.int8 else 1e-6
    assert_close(out, case, arguments, sums)
    assert_close(alone, case, (*arguments[:3], torch.ones(1), *arguments[4:]), sums)
