"""trace_linears: every product once, by name, size and what served it; the JSON that the benchmark reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.inference import TracedLinear, linear, trace_linears
from lowbit.inference.trace import scheme_name
from lowbit.products import _watchers
from tests.inference.weight_ops import counted
from tests.schemes import SCHEMES


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.head, self.w = nn.Linear(64, 10), nn.Parameter(torch.randn(7, 10))

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        for _ in range(1 + twice):
            x = linear(F.relu(self.up(x)), self.down.weight, residual=x)
        return F.linear(self.head(x[0]), self.w) @ torch.eye(7)


def test_every_linear_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted(monkeypatch)
    model = Model().bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        schemes = {"up": lb.Int4WeightOnly(32), "down": lb.Int8DynamicActivationInt8Weight()}
        lb.quantize_(model, {**schemes, "head": None})
        report = trace_linears(model, torch.randn(2, 3, 64), twice=True)
    finally:
        torch.set_default_dtype(torch.float32)
    up, down, *plain = report.linears
    assert up == TracedLinear("up", 6, 96, 64, "int4-g32", "int4_linear", 2)
    assert plain == [
        TracedLinear("head", 3, 10, 64, "bfloat16", "torch", 1),
        TracedLinear("w", 3, 7, 10, "bfloat16", "torch", 1),
    ]
    assert (down.name, down.m, down.n, down.k, down.calls) == ("down", 6, 64, 96, 2)
    assert (down.scheme, down.implementation) == ("int8-row-int8-token", "int8_dynamic_linear")
    report.write(tmp_path / "shapes.json")
    first = json.loads((tmp_path / "shapes.json").read_text())["linears"][0]
    assert first == {
        **{"name": "up", "m": 6, "n": 96, "k": 64},
        **{"scheme": "int4-g32", "implementation": "int4_linear", "calls": 2},
    }


def test_as_a_table() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8))
    lb.quantize_(model[0], lb.Int4WeightOnly(32))
    assert str(trace_linears(model, torch.randn(5, 64))).splitlines() == [
        "name  M   N   K  weight    implementation  calls",
        "0     5  96  64  int4-g32  cpu_linear          1",
        "1     5   8  96  float32   torch               1",
    ]


def test_compiled_models_are_traced_and_work_afterwards() -> None:
    torch._dynamo.reset()
    model, x = nn.Linear(64, 96), torch.randn(5, 64)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    model.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        y = model(x)
    assert [t.implementation for t in trace_linears(model, x).linears] == ["cpu_linear"]
    with torch.no_grad():
        assert torch.equal(model(x), y)
    torch._dynamo.reset()


def test_a_model_that_raises_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="K differs"):
        model = nn.Linear(64, 96)
        lb.quantize_(model, lb.Int4WeightOnly(32))
        trace_linears(model, torch.randn(5, 63))
    assert not _watchers


def test_experts_and_training_weights() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 24, 32))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.w[1])

    model = nn.ModuleDict({"e": Experts(), "l": nn.Linear(32, 24)})
    model.forward = lambda x: (model["e"](x), model["l"](x))
    lb.quantize_(model, lb.Int4WeightOnly(32), lambda m, name: name == "e")
    lb.qat.prepare_(model, {"l": lb.Int4WeightOnly(32)})
    expert, layer = trace_linears(model, torch.randn(5, 32)).linears
    assert (expert.name, expert.scheme, expert.n) == ("", "int4-g32", 24)
    assert (layer.name, layer.implementation) == ("l", "FakeQuantizedTensor")


def test_names_of_schemes() -> None:
    names = {
        key: scheme_name(lb.AffineTensor.from_float(torch.randn(8, 32), s))
        for key, s in SCHEMES.items()
    }
    assert names["int4-g32-asymmetric"] == "int4-g32-asymmetric"
    assert names["int8"] == "int8-row" and names["float8"] == "float8_e4m3fn-row"
    assert names["int5-blocks"] == "uint5-block4x8"
    assert names["int8xint4"] == "int4-g16-int8-token"
    assert len(set(names.values())) == len(names)


def test_only_modules_are_traced() -> None:
    with pytest.raises(TypeError, match=r"takes an nn\.Module and its inputs, got Tensor"):
        trace_linears(torch.zeros(1))  # type: ignore[arg-type]
