"""``decode_attention_sm90``: attention of one token in one launch, against float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.decode_attention import Case
from lowbit_kernels.decoding import decode_attention_sm90
from lowbit_kernels.runtime import launches
from tests.covering import usually
from tests.kernels.decode_attention_emulator import emulated
from tests.kernels.test_decoding_ops import check_attention, ops

CASES = [
    Case("the-first-token", 1, 8, 2, 128, 48, 0),
    Case("one-tile", 1, 4, 4, 128, 64, 16),
    Case("an-odd-length", 1, 8, 2, 128, 131, 130),
    Case("all-warps", 2, 4, 1, 64, 700, 650),
    Case("padding", 3, 6, 2, 128, 200, 150, has_start=True),
    Case("a-window", 2, 8, 1, 64, 200, 140, window=37),
    Case("a-window-of-one", 1, 2, 1, 64, 80, 79, window=1),
    Case("a-softcap", 1, 4, 2, 128, 100, 64, softcap=3.0),
    Case("without-angles", 1, 5, 1, 128, 100, 99, is_rotated=False),
    Case("the-norm-of-x", 5, 4, 2, 64, 90, 33, norm_width=72),
    Case("clusters-of-four", 15, 8, 4, 128, 70, 65),
    Case("clusters-of-two", 40, 2, 2, 64, 40, 35, has_start=True, is_rotated=False),
    Case("everything", 34, 14, 2, 64, 96, 95, True, True, False, 4096, 50, 4.0),
]
OPERANDS = (
    "query",
    "key",
    "value",
    "keys",
    "values",
    "position",
    "start",
    "cos",
    "sin",
    "sinks",
    "x",
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


USUAL = ("the-first-token", "an-odd-length", "all-warps", "a-window-of-one", "the-norm-of-x")
USUAL = (*USUAL, "clusters-of-four", "clusters-of-two", "everything")


@pytest.mark.cover("values")
@pytest.mark.parametrize("case", usually(CASES, *USUAL))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_formula(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with emulated(), launches.counted() as calls:
        check_attention(case, "cpu", dtype, 3e-3)
    assert calls == {("decode_attention", "sm90"): 1}


def test_sinks_and_nan() -> None:
    """A NaN that is seen is NaN in its head alone. Slots that are not seen may hold anything."""
    case = Case("sinks", 2, 4, 2, 64, 64, 40, has_start=True)
    arguments = list(case.arguments(dtype=torch.bfloat16))
    arguments[6] = torch.tensor([3, 21])
    arguments[9] = torch.tensor([0.3, -torch.inf, 9.0, 0.0])
    keys, values = arguments[3], arguments[4]
    for cache in (keys, values):
        cache[0, :, :3], cache[1, :, :21], cache[:, :, 41:] = torch.nan, torch.inf, torch.nan
    clean = [t.clone() if isinstance(t, torch.Tensor) else t for t in arguments]
    for cache in clean[3:5]:
        cache.nan_to_num_(0, 0)
    expected = ops.decode_attention(*clean)
    with emulated():
        found = ops.decode_attention(*arguments)
        assert (found - expected).norm() < 3e-3 * expected.norm()
        values[1, 0, 30] = torch.nan
        found = ops.decode_attention(*arguments)
    assert found[1, :2].isnan().all() and not found[0].isnan().any()
    assert not found[1, 2:].isnan().any()


def test_operands_that_it_does_not_take() -> None:
    def taken(case: Case, dtype: torch.dtype = torch.bfloat16) -> bool:
        return decode_attention_sm90.takes(case.arguments(dtype=dtype)[:11])

    plain = Case("", 1, 4, 2, 128, 64, 3)
    assert not taken(plain), "not on a CPU"
    with emulated():
        assert taken(plain) and not taken(plain, torch.float32)
        for wrong in (
            Case("", 1, 4, 2, 96, 64, 3),
            Case("", 1, 9, 1, 64, 64, 3),
            Case("", 1, 4, 2, 128, decode_attention_sm90.MOST_SLOTS + 1, 3),
            Case("", 1, 4, 2, 128, 64, 3, has_sinks=True),
            Case("", 1, 4, 2, 128, 64, 3, norm_width=68),
            Case("", 70, 4, 2, 128, 64, 3),
        ):
            assert not taken(wrong), wrong


@pytest.mark.parametrize("number", [0, 3, 4, 7, 8, 10], ids=lambda i: OPERANDS[i])
def test_operands_of_another_dtype_or_address_are_not_taken(number: int) -> None:
    """The kernel reads 16 bits an element, and vectors of 16 bytes."""
    case = Case("", 1, 4, 2, 128, 64, 3, norm_width=72)
    operands = list(case.arguments(dtype=torch.bfloat16)[:11])
    own = operands[number]
    moved = torch.cat([own.flatten()[:1], own.flatten()])[1:].view_as(own)
    with emulated():
        assert decode_attention_sm90.takes(operands)
        for other in (own.float(), moved):
            operands[number] = other
            assert not decode_attention_sm90.takes(operands), other.dtype


def test_a_cluster_of_eight_has_a_warp_for_each_tile() -> None:
    warps = 8 * decode_attention_sm90.WARPS[8]
    assert warps * decode_attention_sm90.TILE >= decode_attention_sm90.MOST_SLOTS


@pytest.mark.gpu
@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    with launches.counted() as calls:
        check_attention(case, "cuda", dtype, 3e-3)
    assert calls == {("decode_attention", "sm90"): 1}
