"""Symmetric products of sm_90, emulated on a CPU; `tests.kernels.test_batched_mm` has them on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.batched_mm import Case
from lowbit_kernels.matmul import symmetric_mm_sm90
from lowbit_kernels.matmul.symmetric_mm_sm90 import symmetric_mm
from lowbit_kernels.runtime import nvrtc
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.symmetric_mm_emulator import emulated
from tests.kernels.test_batched_mm import error

CASES = [
    Case("one-tile", 1, 128, 64, 128, symmetric=True),
    Case("fewer-steps-than-stages", 3, 256, 192, 256, symmetric=True),
    Case("more-steps-than-stages", 1, 384, 448, 384, symmetric=True),
    Case("addend", 2, 256, 128, 256, symmetric=True, has_addend=True),
    Case("commuting", 1, 384, 384, 384, symmetric=True, has_addend=True, commuting=True),
]


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("late", ["", "3,1"], ids=["", "late"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_emulated(case: Case, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks share all tiles. With `late` loads complete in any order; stores complete as late as the kernel
    allows."""
    if late:
        monkeypatch.setenv("EMULATED_DELAY", late)
    a, b, addend, _, *factors, _ = case.arguments()
    assert symmetric_mm_sm90.takes(case.m, case.k, a.dtype, a.dtype)
    with emulated():
        out = symmetric_mm(a, b.mT.contiguous(), addend, *factors)
        first = None if addend is None else addend[:1]
        alone = symmetric_mm(a[:1], b.mT[:1].contiguous(), first, *factors)
    assert torch.equal(out, out.mT) and error(out, case, (a, b, addend)) < 3e-4
    assert torch.equal(alone, out[:1])


def test_the_ring_fits_shared_memory() -> None:
    """The emulator holds the kernel's own size beside `SHARED`."""
    assert symmetric_mm_sm90.SHARED <= nvrtc.SHARED_LIMIT


def test_sizes() -> None:
    half, takes = torch.float16, symmetric_mm_sm90.takes
    assert takes(128, 64, half, half) and takes(2048, 8192, half, half)
    assert not takes(192, 64, half, half) and not takes(128, 96, half, half)
    assert not takes(128, 64, torch.bfloat16, torch.bfloat16)
    assert not takes(128, 64, half, torch.float32)
