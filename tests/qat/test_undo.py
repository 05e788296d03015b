"""undo_: the plain model again, with the trained weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit import IntxWeightOnly, qat
from tests.inference.test_report import BOTH, Model
from tests.qat.lora_layers import LoraLayer

INT4 = lb.Int4WeightOnly(8)
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 19]])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_undone(tied: bool) -> None:
    torch.manual_seed(0)
    model = Model(tied=tied)
    plain = copy.deepcopy(model)
    classes = {name: type(m) for name, m in model.named_modules()}
    qat.prepare_(model, INT4, lambda m, name: isinstance(m, BOTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(TOKENS).square().sum().backward()
    optimizer.step()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    grad, memory = model.head.weight.grad, model.head.weight.master().data_ptr()
    report = qat.undo_(model)
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert (model.head.weight is model.embedding.weight) == tied
    assert type(model.head.weight) is nn.Parameter and model.head.weight.requires_grad
    assert model.head.weight.data_ptr() == memory and model.head.weight.grad is grad
    assert "head.weight" in report.converted and report.prepared == report.low_bits == 0
    assert "plain again" in str(report)
    plain.load_state_dict(trained)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    with pytest.raises(RuntimeError, match="no longer those of their model"):
        model.zero_grad()
        optimizer.step()
    qat.prepare_(model, INT4)


def test_nothing_moved_without_training_also_while_off_and_cast() -> None:
    model = Model()
    plain = copy.deepcopy(model)
    qat.prepare_(model, INT4)
    qat.disable_(model)
    model.layers[0].up.weight.requires_grad_(False)
    qat.undo_(model.bfloat16())
    assert not model.layers[0].up.weight.requires_grad
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model(TOKENS), plain.bfloat16()(TOKENS))


@pytest.mark.parametrize("make", [Model, nn.ReLU])
def test_without_prepare(make) -> None:
    with pytest.raises(ValueError, match="has no prepared weights, none to undo"):
        qat.undo_(make())


def test_of_quantized_weights() -> None:
    model = Model()
    lb.quantize_(model, INT4)
    with pytest.raises(ValueError, match="none to undo"):
        qat.undo_(model)
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        qat.undo_(model.head.weight)


def test_layers_of_adapters_are_theirs_again() -> None:
    model = nn.Sequential(LoraLayer(nn.Linear(32, 8)))
    x, kind = torch.randn(3, 32), type(model[0])
    expected = model(x)
    qat.prepare_(model, IntxWeightOnly(4, 32))
    assert type(model[0]) is not kind
    qat.undo_(model)
    assert type(model[0]) is kind and torch.equal(model(x), expected)
