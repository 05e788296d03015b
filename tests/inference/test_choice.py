"""Which weights patterns take without a filter, in every flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb

INT4 = lb.Int4WeightOnly(8)
FLOWS = {"quantize_": (lb.quantize_, INT4), "qat": (lb.qat.prepare_, INT4)}
FLOWS |= {"train": (lb.train.prepare_, lb.train.Int8Weight())}
flows = pytest.mark.parametrize("flow", FLOWS)


class GatedMLP(nn.Module):
    """Its gate is a projection beside `up`, and no router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 24, 16))
        self.down = nn.Parameter(torch.randn(3, 16, 24))
        self.up_bias = nn.Parameter(torch.zeros(3, 1, 24))
        self.scores = nn.Parameter(torch.randn(3, 16))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()
        self.shared_expert, self.shared_expert_gate = GatedMLP(), nn.Linear(16, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.position = nn.Parameter(torch.randn(1, 10, 16))
        self.conv = nn.Conv1d(16, 16, 3)
        self.dense, self.mixture = GatedMLP(), Mixture()
        self.one_by_one = nn.ModuleDict({"gate": nn.Linear(16, 2)})
        self.one_by_one["experts"] = nn.ModuleList([GatedMLP(), GatedMLP()])


def linears(prefix: str) -> set[str]:
    return {f"{prefix}.{name}.weight" for name in ("gate", "up", "down")}


TAKEN = linears("dense") | linears("mixture.shared_expert")
TAKEN |= linears("one_by_one.experts.0") | linears("one_by_one.experts.1")
STACKS = {"mixture.experts.up", "mixture.experts.down"}
ROUTERS = {"mixture.router.layer.weight", "mixture.shared_expert_gate.weight"}
ROUTERS |= {"one_by_one.gate.weight"}
OTHERS = {"embed.weight", "position", "conv.weight"}
OTHERS |= {"mixture.experts.up_bias", "mixture.experts.scores"}


def converted(flow: str, model: nn.Module, *patterns: str) -> set[str]:
    convert, scheme = FLOWS[flow]
    given: Any = dict.fromkeys(patterns, scheme) if patterns else scheme
    return {*convert(model, given).converted}


@flows
@pytest.mark.parametrize("patterns", [(), ("*",), ("re:.*",), ("*.weight", "*")], ids=str)
def test_a_pattern_for_all_takes_linears_and_experts(flow: str, patterns: tuple[str, ...]) -> None:
    model = Model()
    convert, scheme = FLOWS[flow]
    report = convert(model, dict.fromkeys(patterns, scheme) if patterns else scheme)
    assert {*report.converted} == TAKEN | STACKS
    assert report.left.keys() == ROUTERS | OTHERS
    assert {report.left[n].split(":")[0] for n in ROUTERS} == {"a router"}
    kinds = {report.left[n].split(":")[0] for n in OTHERS - {"conv.weight"}}
    assert kinds == {"an embedding", "a parameter of a Model", "a parameter of a Experts"}
    assert ("no low-bit product" in report.left["conv.weight"]) == (flow == "train")


@flows
def test_a_pattern_takes_what_it_matches_of_these(flow: str) -> None:
    assert converted(flow, Model(), "mixture.*") == linears("mixture.shared_expert") | STACKS
    assert converted(flow, Model(), "*.experts.*") == STACKS | {
        *linears("one_by_one.experts.0"),
        *linears("one_by_one.experts.1"),
    }
    assert converted(flow, Model(), "mixture.experts") == STACKS
    ups = {f"{name.rpartition('.gate')[0]}.up.weight" for name in TAKEN if ".gate" in name}
    assert converted(flow, Model(), "*.up") == {"mixture.experts.up", *ups}


NAMED = {
    "embed": "embed.weight",
    "embed.weight": "embed.weight",
    "conv": "conv.weight",
    "position": "position",
    "re:posi.*ion": "position",
    "*.scores": "mixture.experts.scores",
    "*.router.layer": "mixture.router.layer.weight",
    "*.layer.weight": "mixture.router.layer.weight",
    "*.shared_expert_gate": "mixture.shared_expert_gate.weight",
    "one_by_one.gate": "one_by_one.gate.weight",
}


@pytest.mark.parametrize("pattern", NAMED)
def test_a_pattern_that_names_a_weight_takes_it(pattern: str) -> None:
    for flow in ("quantize_", "qat"):
        assert converted(flow, Model(), pattern) == {NAMED[pattern]}


@flows
@pytest.mark.parametrize(
    "pattern", ["emb*", "*router*", "mixture.router", "pos*", "re:conv.*", "experts", "*.expert.*"]
)
def test_a_pattern_that_names_none_is_refused(flow: str, pattern: str) -> None:
    model = Model()
    before = dict(model.named_parameters())
    convert, scheme = FLOWS[flow]
    for given in ({pattern: scheme}, {pattern: scheme, "*": scheme}):
        with pytest.raises(ValueError, match="chose no weight"):
            convert(model, given)
    assert all(model.get_parameter(name) is p for name, p in before.items())


@pytest.mark.parametrize("pattern", ["emb*", "*router*", "pos*", "re:conv.*"])
def test_the_error_gives_a_pattern_that_names_the_weight(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"converts it \('.*' does\)") as refused:
        lb.quantize_(Model(), {pattern: INT4})
    given = str(refused.value).partition("converts it ('")[2].partition("'")[0]
    assert len(lb.quantize_(Model(), {given: INT4}).converted) == 1


def test_none_leaves_experts_alone() -> None:
    report = lb.quantize_(Model(), {"*.experts.up": None, "*gate": None, "*": INT4})
    assert report.left["mixture.experts.up"] == "no scheme for this name"
    assert "mixture.experts.down" in report.converted


def test_a_static_activation_leaves_experts_alone_with_its_reason() -> None:
    scheme = lb.Int8StaticActivationInt8Weight()
    model = Model()
    with lb.calibrate(model, scheme):
        for x in torch.randn(2, 4, 16):
            for mlp in (model.dense, model.mixture.shared_expert, *model.one_by_one["experts"]):
                mlp(x)
    report = lb.quantize_(model, scheme)
    assert {*report.converted} == TAKEN
    assert all("static activation" in report.left[name] for name in STACKS)
