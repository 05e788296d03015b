"""Quantized embeddings: gather the rows, then dequantize only them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.tensor.frozen import cpu_values
from tests.schemes import WEIGHT_ONLY, over, rounded

PER_ROW = {k: v for k, v in WEIGHT_ONLY.items() if k not in ("int5-blocks", "int4-tensor")}


def embedding(scheme: lb.Scheme, rows: int = 50, size: int = 37, **kwargs) -> nn.Embedding:
    module = nn.Embedding(rows, size, **kwargs)
    lb.quantize_(module, scheme, lambda m, name: True)
    return module


@over(PER_ROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    module = nn.Embedding(50, 37, dtype=dtype)
    table = rounded(module.weight.detach(), scheme.weight).to(dtype)
    lb.quantize_(module, scheme, lambda m, name: True, scales="minmax")
    for indices in [
        torch.tensor([3, 3, 49, 0]),
        torch.tensor(7),
        torch.tensor([[1, 2], [3, 4], [5, 1]]),
        torch.randint(50, (2, 3, 4)),
        torch.empty(0, dtype=torch.long),
        torch.empty(2, 0, dtype=torch.int32),
        torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32).t(),
    ]:
        y = module(indices)
        assert y.dtype is dtype and torch.equal(y, table[indices.long()])


def test_scales_that_rows_share() -> None:
    """A table with one scale is gathered by rows. Scales of tiles of rows are refused before anything is converted."""
    module = nn.Embedding(50, 37)
    with pytest.raises(ValueError, match="rows would share scales"):
        lb.quantize_(module, WEIGHT_ONLY["int5-blocks"], lambda m, n: True)
    scheme = WEIGHT_ONLY["int4-tensor"]
    table = rounded(module.weight.detach(), scheme.weight).float()
    lb.quantize_(module, scheme, lambda m, n: True)
    indices = torch.tensor([3, 49, 0])
    assert torch.equal(module(indices), table[indices])


@over(PER_ROW)
def test_only_the_rows_asked_for_are_dequantized(
    scheme: lb.Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = embedding(scheme, rows=1000)
    counted = []
    real = lb.Spec.dequantize

    def dequantize(self, codes, scale, zero_point, shape, output_dtype):
        counted.append(codes.numel())
        return real(self, codes, scale, zero_point, shape, output_dtype)

    monkeypatch.setattr(lb.Spec, "dequantize", dequantize)
    monkeypatch.setattr(cpu_values, "_layout", lambda spec, shape: None)  # by operations
    module(torch.tensor([[1, 5, 999], [1, 1, 0]]))
    columns = scheme.weight.padded_shape((1, 37))[1]
    assert counted == [6 * columns]
    module(torch.empty(0, dtype=torch.long))
    assert sum(counted[1:]) == 0


@pytest.mark.parametrize("bad", [-1, 50, 10**6])
def test_rows_that_do_not_exist(bad: int) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        embedding(lb.Int4WeightOnly(8))(torch.tensor([0, bad]))


def test_options_of_nn_embedding() -> None:
    plain = nn.Embedding(20, 16, padding_idx=3, scale_grad_by_freq=True)
    module = embedding(lb.Int8WeightOnly(), 20, 16, padding_idx=3, scale_grad_by_freq=True)
    assert torch.equal(module(torch.tensor([3])), torch.zeros(1, 16))
    assert torch.equal(plain(torch.tensor([3])), torch.zeros(1, 16))
    assert torch.equal(F.embedding(torch.tensor([5]), module.weight), module(torch.tensor([5])))


def test_max_norm_is_left_alone() -> None:
    """Its lookup rescales rows in place, which a quantized table does not support."""
    model = nn.ModuleDict({"a": nn.Embedding(8, 8, max_norm=1.0), "b": nn.Embedding(8, 8)})
    report = lb.quantize_(model, lb.Int8WeightOnly(), lambda m, name: isinstance(m, nn.Embedding))
    assert report.converted == ["b.weight"] and "max_norm" in report.left["a.weight"]
    model["a"](torch.tensor([1]))


def test_a_frozen_table_gets_no_gradient() -> None:
    model = nn.Sequential(embedding(lb.Int4WeightOnly(8), 20, 16), nn.Linear(16, 4))
    model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is not None
