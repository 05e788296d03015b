"""int4_to_int8: PyTorch and Triton against `quantize_rowcol` of the values in float32."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.int4_to_int8 import CASES, Case
from lowbit.numerics.packing import unpack
from lowbit_kernels.quantize.int4_to_int8 import int4_to_int8, reference
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from tests.kernels.interpreted import interpreted
from tests.kernels.test_round_rows import same

OP = torch.ops.lowbit.int4_to_int8
SMALL = [case for case in CASES if not case.large]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    codes, scale, group_size, size = case.arguments()
    found, row_scale = int4_to_int8(codes, scale, group_size=group_size, size=size)
    numbers = unpack(codes, 4, 2 * codes.shape[1]).to(torch.int8) - 8
    values = (numbers * scale.repeat_interleave(group_size, 1))[:, :size]
    assert same((found, row_scale), quantize_rowcol(values, "int8", columns=False)[:2])
    assert found.shape == (case.rows, size + -size % 16) and not found[:, size:].any()
    good = row_scale.isfinite()
    if good.any() and size:
        off = found[good, :size].double() - values[good].double() / row_scale[good, None].double()
        assert off.abs().max() < 0.5 + 1e-4
        largest = found[good].int().abs().amax(1)
        assert (largest >= 127).equal(values[good].any(1)), "the largest value has the largest code"
    if case.rows > 2 and size:
        assert row_scale[0] == 1 and row_scale[1] < 1, "groups of zeros count for nothing"
        assert row_scale[2].isnan() and not found[2].any()
    finite = codes, scale.nan_to_num(1.0)  # opcheck holds no NaN equal
    torch.library.opcheck(OP, finite, {"group_size": group_size, "size": size, "after": codes})


INTERPRETED = """
import json, torch
from lowbit_kernels.runtime.launches import counted
from tests.kernels.test_int4_to_int8 import SMALL, int4_to_int8, reference, same

results = {}
for case in SMALL:
    codes, scale, group_size, size = case.arguments()
    with counted() as calls:
        found = int4_to_int8(codes, scale, group_size=group_size, size=size)
    ran = "triton" if codes.numel() * size else "torch"
    results[case.name] = same(found, reference(codes, scale, group_size, size, None))
    results[case.name] &= calls == {("int4_to_int8", ran): 1}
print(json.dumps(results))
"""


def test_interpreted_kernel() -> None:
    found = interpreted(INTERPRETED)
    assert len(found) == len(SMALL) and all(found.values()), found


def test_refusals() -> None:
    codes, scale = torch.zeros(3, 16, dtype=torch.uint8), torch.ones(3, 2)
    with pytest.raises(TypeError, match=r"takes codes of torch\.uint8"):
        int4_to_int8(codes.char(), scale, group_size=16, size=32)
    with pytest.raises(ValueError, match="codes of 32 columns have no 2 groups of 32"):
        int4_to_int8(codes, scale, group_size=32, size=32)
    with pytest.raises(ValueError, match=r"size must be 0\.\.32, the codes of a row; got 33"):
        int4_to_int8(codes, scale, group_size=16, size=33)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    """The first call brings the launcher in, the second teaches it this layout, and the third runs without Python."""
    for step in range(3):
        codes, scale, group_size, size = case.arguments("cuda")
        scale *= step + 1
        after = torch.ones(3, device="cuda")
        found = int4_to_int8(codes, scale, group_size=group_size, size=size, after=after)
        assert same(found, reference(codes, scale, group_size, size, None))
