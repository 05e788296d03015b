"""The large-batch kernel on float8 weights, as float16: emulated on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from lowbit_kernels.weight_only.weight_mm_large_batch_sm90 import LargeBatchDivision, takes
from lowbit_kernels.weight_only.weight_operands import WeightOperands
from tests.kernels import sm90_emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.test_weight_mm_large_batch_sm90 import BF16, FP16, FP32, Operands, planned


class Float8(Operands):
    """e4m3 by e4m3 with one scale a row; results of dtype `out`."""

    def __init__(self, m, n, k, *, out=BF16, pitch=0, device="cuda"):
        super().__init__(m, n, k, 8, 0, dtype=out, scale=FP32, pitch=pitch, device=device)
        wide = self.codes if not pitch else self.codes._base
        nan = wide.bitwise_and(127) == 127
        wide.masked_fill_(nan, 0)
        if pitch:
            wide[:, k:] = 127  # the memory after a row may hold NaN
        self.codes = self.codes.view(torch.float8_e4m3fn)
        self.scale /= 4096  # results within float16
        self.x = (self.x.float() * 112).clamp(-448, 448).to(torch.float8_e4m3fn).half()
        self.out = out


def test_float8_that_is_taken() -> None:
    """float8 needs rows that end at k, since the padding may hold NaN."""
    codes = torch.zeros(16, 64, dtype=torch.float8_e4m3fn)
    for dtype, k, groups, fits in (
        (FP16, 64, 1, True),
        (BF16, 64, 1, True),
        (FP16, 60, 1, False),
        (FP16, 64, 2, True),
        (FP16, 60, 2, False),
    ):
        x, scale = torch.zeros(20, k, dtype=dtype), torch.ones(16, groups)
        group, int8 = 64 // groups, codes.view(torch.int8)
        assert takes(WeightOperands.of(x, codes, scale, group_size=group)) == fits
        assert takes(WeightOperands.of(x, int8, scale, group_size=group))


@pytest.mark.cover("values")
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("out", [BF16, FP16])
@pytest.mark.parametrize(
    ("chosen", "m", "n", "k"),
    [
        (planned(16, 128, 4, 1, 2, 1), 20, 200, 608),
        (planned(32, 64, 4, 1, 1, 2), 30, 100, 1056),
        (planned(64, 128, 2, 2, 1, 1), 40, 300, 160),
    ],
    ids=str,
)
def test_emulated_float8(
    chosen: LargeBatchDivision, m: int, n: int, k: int, out: torch.dtype
) -> None:
    """x is float16, results may have another dtype, and a row may end within a chunk."""
    with sm90_emulator.emulated():
        operands = Float8(m, n, k, out=out, pitch=32, device="cpu")
        operands.more().check(chosen)
        clean = operands.product(chosen)
        operands.codes.view(torch.uint8)[7, 5] = 255
        found = operands.product(chosen)
        clean[:, 7] = float("nan")
        assert torch.equal(found.nan_to_num(), clean.nan_to_num())
        assert torch.equal(found.isnan(), clean.isnan())


@pytest.mark.cover("pairs")
@pytest.mark.gpu
@pytest.mark.parametrize("out", [BF16, FP16])
@pytest.mark.parametrize("m", [1, 17, 31, 64, 200, 1000])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (272, 1440), (65, 96), (1, 32), (4096, 14336)])
def test_float8(n: int, k: int, m: int, out: torch.dtype) -> None:
    Float8(m, n, k, out=out).more().check()
    Float8(m, n, k, out=out, pitch=32).check()
