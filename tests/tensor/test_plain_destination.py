"""Loading low-bit tensors into a float model, without assign=True: it stays a float model, and says so."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import lowbit as lb
from tests.inference.test_report import BOTH, Model
from tests.tensor.cases import every_weight

INT4 = lb.Int4WeightOnly(8)


def told(load):
    """What `load` warns of, and its outcome."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        outcome = load()
    return [w for w in found if "low-bit" in str(w.message)], outcome


@every_weight
def test_what_happened_and_what_to_do_is_said(case):
    linear = nn.Linear(96, 24, bias=False)
    weight = case.make((24, 96))
    found, outcome = told(lambda: linear.load_state_dict({"weight": weight}))
    (warning,) = found
    text = str(warning.message)
    assert outcome.missing_keys == [] and warning.category is UserWarning
    assert f"weight is a {case.kind.__name__} in the state dict and torch.float32 in the" in text
    assert "assign=True" in text and ".dequantize()" in text
    assert warning.filename == __file__, "where the user calls it"
    assert type(linear.weight) is nn.Parameter and torch.equal(linear.weight, weight.master())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("tied", [False, True])
def test_once_a_load_whatever_the_number_of_weights(tmp_path, suffix, tied):
    quantized = Model(tied=tied)
    lb.quantize_(quantized, INT4, lambda module, name: isinstance(module, BOTH))
    path = tmp_path / f"m{suffix}"
    lb.save(quantized, path)
    model = Model(tied=tied)
    for _ in range(2):
        found, _ = told(lambda: model.load_state_dict(lb.load(path)))
        assert len(found) == 1
    assert not any(isinstance(p, lb.LowbitTensor) for p in model.parameters())
    found, _ = told(lambda: model.load_state_dict(lb.load(path), assign=True))
    assert not found and isinstance(model.head.weight, lb.LowbitTensor)
    found, _ = told(lambda: model.load_state_dict(lb.load(path)))
    assert not found, "codes into codes"


def test_of_values_that_were_dequantized_nothing_is_said():
    linear, weight = nn.Linear(16, 8), lb.AffineTensor.from_float(torch.randn(8, 16), INT4)
    state = {**linear.state_dict(), "weight": weight.dequantize()}
    assert told(lambda: linear.load_state_dict(state))[0] == []


def test_of_buffers_and_of_swapped_parameters_it_is_said_too():
    module = nn.Module()
    module.register_buffer("table", torch.zeros(8, 16))
    weight = lb.AffineTensor.from_float(torch.randn(8, 16), INT4)
    assert len(told(lambda: module.load_state_dict({"table": weight}))[0]) == 1
    linear = nn.Linear(16, 8, bias=False)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert len(told(lambda: linear.load_state_dict({"weight": weight}))[0]) == 1
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_other_copies_say_nothing():
    """A user's own, an average's, an optimizer's, and those of an optimizer's load_state_dict."""
    weight = lb.AffineTensor.from_float(torch.randn(64, 128), lb.Int4WeightOnly(32))
    target = nn.Parameter(torch.zeros(64, 128))

    def copy_into():
        with torch.no_grad():
            target.copy_(weight)
            torch.empty(64, 128).copy_(weight)

    assert told(copy_into)[0] == []

    model = nn.Linear(128, 64)
    lb.train.prepare_(model, lb.Int8Weight())
    optimizer = lb.optim.AdamW8bit(model.parameters())

    def train():
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        model(torch.randn(4, 128)).sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        state = copy.deepcopy(optimizer.state_dict())
        plain = lb.optim.AdamW(model.parameters(), state="fp32")
        plain.load_state_dict(state)
        model.load_state_dict(copy.deepcopy(model.state_dict()))

    assert told(train)[0] == []
