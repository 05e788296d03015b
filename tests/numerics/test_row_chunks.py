"""Quantization in chunks of rows gives the same bits as at once, with small temporaries, in order."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit as lb
from lowbit.numerics import row_chunks
from lowbit.tensor.core.checks import check_weight
from tests.schemes import SCHEMES, over

SHAPES = {
    "matrix": lambda: torch.randn(37, 67),
    "bfloat16": lambda: torch.randn(64, 64).bfloat16(),
    "experts": lambda: torch.randn(3, 41, 67),
    "transposed": lambda: torch.randn(67, 37).t(),
    "no rows": lambda: torch.randn(0, 67),
}


@pytest.mark.cover("values")
@over(SCHEMES)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_same_bits(scheme: lb.Scheme, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SHAPES[shape]()
    whole = lb.AffineTensor.from_float(weight, scheme)
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", 300)
    parts = lb.AffineTensor.from_float(weight, scheme)
    assert torch.equal(whole, parts)
    for name, t in whole.inner_tensors().items():
        assert getattr(parts, name).stride() == t.stride()


@pytest.mark.parametrize("limit", [1, 67, 300, 2747, 10**6])
def test_chunks_are_whole_rows_in_order(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", limit)
    for make in SHAPES.values():
        t = make()
        parts = list(row_chunks.row_chunks(t))
        assert torch.equal(
            torch.cat([p.reshape(-1, p.shape[-1]) for p in parts]), t.reshape(-1, t.shape[-1])
        )
        assert all(p.numel() <= max(limit, t.shape[-1]) for p in parts)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an op makes, views of `weight` left out."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.found, self.known = 0, weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self.known:
            self.found = max(self.found, result.nbytes)
        return result


@pytest.mark.parametrize(
    "scheme", [lb.Int4WeightOnly(128), lb.Int8WeightOnly()], ids=["int4", "int8"]
)
def test_no_float32_copy_of_the_weight(scheme: lb.Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", 2**12)
    weight = torch.randn(512, 256).bfloat16()
    with Largest(weight) as largest:
        quantized = lb.AffineTensor.from_float(weight, scheme)
    assert largest.found <= max(quantized.codes.nbytes, 8 * 2**12)


def test_bad_values_are_counted_over_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", 100)
    weight = torch.randn(37, 67)
    weight[0, 0], weight[20, 5], weight[36, 66] = float("nan"), float("inf"), -float("inf")
    with pytest.raises(ValueError, match="w has 3 NaN or infinite values of 2479"):
        check_weight(weight, "w")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 3), (3, 1500, 700)], ids=str)
def test_what_is_not_finite_is_counted(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    t = torch.randn(shape).to(dtype)
    assert row_chunks.count_nonfinite(t) == 0
    for bad in (torch.nan, torch.inf, -torch.inf) if t.numel() else ():
        t.view(-1)[-1] = bad
        assert row_chunks.count_nonfinite(t) == 1
        assert row_chunks.count_nonfinite(torch.stack([t, t])) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nonfinite_elements_are_counted_under_any_autocast(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch stacks no tensors of a 16-bit dtype under autocast to another one."""
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", 20)
    weight = torch.randn(7, 13, dtype=dtype)
    for target in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", target):
            assert row_chunks.count_nonfinite(weight) == 0
            bad = weight.clone()
            bad[2, 3], bad[6, 0] = float("nan"), -float("inf")
            assert row_chunks.count_nonfinite(bad) == 2
