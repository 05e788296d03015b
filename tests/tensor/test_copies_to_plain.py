"""A low-bit tensor that is copied into a plain parameter: the model stays in high precision, and a warning says so."""

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


def warnings_of(call, filter="always"):
    """The warnings of `call` about high precision, and its result."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(filter)
        result = call()
    return [w for w in found if "stays in high precision" in str(w.message)], result


@every_weight
def test_loading_into_a_plain_parameter_warns(case):
    linear = nn.Linear(96, 24, bias=False)
    weight = case.make((24, 96))
    found, outcome = warnings_of(lambda: linear.load_state_dict({"weight": weight}))
    (warning,) = found
    text = str(warning.message)
    assert outcome.missing_keys == [] and warning.category is UserWarning
    assert "assign=True" in text and ".dequantize()" in text
    assert type(linear.weight) is nn.Parameter and torch.equal(linear.weight, weight.master())


@pytest.mark.parametrize("tied", [False, True])
def test_one_warning_for_all_weights(tmp_path, tied):
    quantized = Model(tied=tied)
    lb.quantize_(quantized, INT4, lambda module, name: isinstance(module, BOTH))
    path = tmp_path / "m.safetensors"
    lb.save(quantized, path)
    model = Model(tied=tied)
    found, _ = warnings_of(lambda: model.load_state_dict(lb.load(path)), "default")
    assert len(found) == 1
    assert not any(isinstance(p, lb.LowbitTensor) for p in model.parameters())
    found, _ = warnings_of(lambda: model.load_state_dict(lb.load(path), assign=True))
    assert not found and isinstance(model.head.weight, lb.LowbitTensor)
    found, _ = warnings_of(lambda: model.load_state_dict(lb.load(path)))
    assert not found, "codes into codes"


def test_dequantized_values_load_without_a_warning():
    linear, weight = nn.Linear(16, 8), lb.AffineTensor.from_float(torch.randn(8, 16), INT4)
    state = {**linear.state_dict(), "weight": weight.dequantize()}
    assert warnings_of(lambda: linear.load_state_dict(state))[0] == []


def test_swapped_parameters_warn_too():
    weight = lb.AffineTensor.from_float(torch.randn(8, 16), INT4)
    linear = nn.Linear(16, 8, bias=False)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert len(warnings_of(lambda: linear.load_state_dict({"weight": weight}))[0]) == 1
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_other_copies_do_not_warn():
    """A copy into a tensor that is not a parameter, an average's, an optimizer's, and those of its load_state_dict."""
    weight = lb.AffineTensor.from_float(torch.randn(64, 128), lb.Int4WeightOnly(32))
    assert warnings_of(lambda: torch.empty(64, 128).copy_(weight))[0] == []

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

    assert warnings_of(train)[0] == []
