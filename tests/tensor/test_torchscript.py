"""TorchScript would save zeros in place of low-bit weights, so it is refused; torch.export is the way out."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit.tensor.core.torchscript import PREPARE
from tests.tensor.cases import every_weight, values

MODES = {
    "script": lambda model, x: torch.jit.script(model),
    "trace": lambda model, x: torch.jit.trace(model, x),
    "trace of a function": lambda model, x: torch.jit.trace(lambda a: model(a), x),
    "onnx": lambda model, x: torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False),
}
over_modes = pytest.mark.parametrize("mode", MODES)
REFUSED = r"torch\.jit\..*torch\.export\.export\(model, inputs\).*dequantize_\(model\)"


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    """torch calls TorchScript deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model_of(case: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(100, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
    model[0].weight = nn.Parameter(case.make((24, 100)), requires_grad=case.is_trainable)
    return model


@pytest.mark.cover("values")
@over_modes
@every_weight
def test_a_linear_is_refused(case: Any, mode: str) -> None:
    model, x = model_of(case), values((5, 100), 1)
    before = model(x)
    for other in (model, copy.deepcopy(model)):
        with pytest.raises(NotImplementedError, match=REFUSED):
            MODES[mode](other, x)
        assert not torch.jit.is_tracing()
    assert torch.equal(model(x), before)


@pytest.mark.cover("values", case=lambda case: case.kind.__name__)
@every_weight
def test_the_way_out_works(case: Any) -> None:
    """A program of torch.export, and TorchScript of the plain model."""
    model, x = model_of(case), values((5, 100), 1)
    file = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(model, (x,)), file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        torch.testing.assert_close(loaded(x), model(x))
    if case.name == "train-int8":  # rounds as it likes
        return
    lowbit.dequantize_(model)
    assert PREPARE not in model[0].__dict__
    assert torch.equal(torch.jit.script(model)(x), model(x))


@over_modes
@pytest.mark.parametrize("kind", ["conv", "embedding", "learned scales", "fused", "calibrated"])
def test_other_layers_are_refused(kind: str, mode: str) -> None:
    x = values((2, 64, 16), 1)
    if kind == "conv":
        model = nn.Sequential(nn.Conv1d(64, 8, 3))
        lowbit.quantize_(model, lowbit.Int8WeightOnly(), lambda module, name: True)
    elif kind == "embedding":
        model, x = nn.Sequential(nn.Embedding(32, 64)), torch.arange(6)
        lowbit.quantize_(model, lowbit.Int8WeightOnly(), lambda module, name: True)
    else:
        model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)), x.transpose(1, 2)
        static = lowbit.Int8StaticActivationInt8Weight()
        if kind == "learned scales":
            lowbit.qat.prepare_(model, lowbit.Int4WeightOnly(32), scales="learned")
        elif kind == "calibrated":
            with lowbit.calibrate(model, static):
                model(x)
            lowbit.quantize_(model, static)
        else:
            lowbit.quantize_(model, lowbit.Int4WeightOnly(32))
            model = nn.Sequential(model)
    with pytest.raises(NotImplementedError, match=REFUSED):
        MODES[mode](model.eval(), x)


@pytest.mark.parametrize("prepare", [lowbit.quantize_, lowbit.qat.prepare_])
@pytest.mark.parametrize("every", [False, True], ids=["linears", "every module"])
def test_a_torchscript_module_is_left_alone(prepare: Any, every: bool) -> None:
    choose = (lambda module, name: True) if every else None
    scripted = torch.jit.script(nn.Sequential(nn.Linear(64, 32)))
    with pytest.raises(ValueError, match=r"nothing to convert.*0\.weight: of a TorchScript module"):
        prepare(scripted, lowbit.Int8WeightOnly(), choose)
    model = nn.ModuleList([scripted, nn.Linear(64, 32)])
    report = prepare(model, lowbit.Int8WeightOnly(), choose)
    assert report.converted == ["1.weight"]
    assert "TorchScript" in report.left["0.0.weight"]
