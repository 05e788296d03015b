"""Learned scales whose weights come later: from state dicts, in place, or after a search on data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowbit import IntxWeightOnly, qat
from lowbit.numerics.granularity import (
    PerGroup,
    PerTensor,
)
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from tests.qat.test_learned_scales import CHOSEN, model, tokens

ZEROS = Scheme(Spec(Int(4), PerGroup(32), "asymmetric"))


def test_a_plain_state_dict_brings_starting_scales():
    """Strictly, also of a model that was made on the meta device, and by assignment."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 97), nn.Conv1d(1, 4, 3))
    chosen = lambda module, name: isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d)  # noqa: E731
    expected = copy.deepcopy(plain)
    qat.prepare_(expected, ZEROS, chosen, scales="learned")
    state = expected.state_dict()
    assert "2.weight_zero" in state

    def later(device):
        with torch.device(device):
            made = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 97), nn.Conv1d(1, 4, 3))
        qat.prepare_(made, ZEROS, chosen, scales="learned")
        return made

    for device, assign in (("cpu", False), ("meta", False), ("cpu", True), ("meta", True)):
        found = later(device)
        if device == "meta" and not assign:
            found.to_empty(device="cpu")
        found.load_state_dict(plain.state_dict(), assign=assign)
        own = found.state_dict()
        assert own.keys() == state.keys()
        assert all(torch.equal(own[key], state[key]) for key in state), (device, assign)
    found = later("cpu")
    found.load_state_dict(plain.bfloat16().state_dict(), assign=True)
    assert found[1].weight_scale.dtype is found[1].weight.dtype is torch.bfloat16


def test_a_state_dict_with_some_scales_is_incomplete():
    found = model()
    qat.prepare_(found, ZEROS, CHOSEN, scales="learned")
    state = found.state_dict()
    del state["1.weight_zero"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"1\.weight_zero"'):
        found.load_state_dict(state)
    other = model()
    qat.prepare_(other, IntxWeightOnly(3, 32, "asymmetric"), CHOSEN, scales="learned")
    with pytest.raises(RuntimeError, match=r"has learned scales of .*bits=4.*and of .*bits=3"):
        other.load_state_dict(found.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
        found[1].load_state_dict({"weight": torch.ones(3, 64), "bias": torch.ones(97)})


def test_scales_of_weights_that_were_written_in_place():
    expected, found = model(tied=True), model(tied=True)
    with torch.no_grad():
        for p in expected.parameters():
            p.mul_(3)
    for each in (expected, found):
        qat.prepare_(each, ZEROS, CHOSEN, scales="learned")
    assert qat.search_scales_(expected)
    with torch.no_grad():
        for name, p in found.named_parameters():
            p.copy_(expected.get_parameter(name) if "_scale" not in name else p)
    assert not torch.equal(found(tokens()), expected(tokens()))
    parameters = [*found.parameters()]
    qat.search_scales_(found)
    assert torch.equal(found(tokens()), expected(tokens()))
    assert all(a is b for a, b in zip(parameters, found.parameters(), strict=True))
    with pytest.raises(ValueError, match="no learned scales"):
        qat.search_scales_(model())
    with torch.device("meta"):
        empty = model()
    qat.prepare_(empty, ZEROS, CHOSEN, scales="learned")
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        qat.search_scales_(empty)


@pytest.mark.parametrize("bits", [4, 3])
def test_searched_scales_stay_only_if_they_are_better_on_data(bits):
    """By the error of the outputs, and by losses that prefer either."""
    scheme, batches = IntxWeightOnly(bits, 32, "symmetric"), [tokens() for _ in range(3)]

    def prepared():
        torch.manual_seed(5)
        made = model()
        qat.prepare_(made, scheme, CHOSEN, scales="learned")
        return made.eval()

    states = {}
    for searched in (False, True):
        each = prepared()
        if searched:
            qat.search_scales_(each)
        states[searched] = each.state_dict()
    for wanted in (False, True):

        def loss(found, batch, wanted=wanted):
            own = found.state_dict()["1.weight_scale"]
            return torch.tensor(float(torch.equal(own, states[not wanted]["1.weight_scale"])))

        found = prepared()
        assert qat.search_scales_(found, iter(batches), loss=loss) is wanted
        assert all(torch.equal(v, states[wanted][k]) for k, v in found.state_dict().items())
    found = prepared()
    qat.search_scales_(found, batches)
    with pytest.raises(ValueError, match="given no batches"):
        qat.search_scales_(found, [])


def test_other_data_keep_the_module_of_the_scales():
    """The line `p.data = p.data.to(float32)` of PEFT: the module reads its weight, also by other operations."""

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.weight.norm()

    model, x = nn.Sequential(Reads(64, 32)), torch.randn(3, 64)
    qat.prepare_(model, IntxWeightOnly(4, 32), lambda module, name: True, scales="learned")
    expected = model(x)
    for p in model.parameters():
        p.data = p.data.to(torch.float32)
    assert torch.equal(model(x), expected)


def test_a_group_without_weight_decay():
    """Scales of a frozen weight do not shrink, and the norm of weights leaves them out."""
    found = model(tied=True)
    static = Scheme(ZEROS.weight, Spec(Int(8), PerTensor(), "asymmetric", static=True))
    qat.prepare_(found, {"1": static, "*": ZEROS}, CHOSEN, scales="learned")
    found[3].weight.requires_grad_(False)
    weights, scales = qat.parameter_groups(found, weight_decay=0.5)
    assert (weights["weight_decay"], scales["weight_decay"]) == (0.5, 0.0)
    names = {id(p): name for name, p in found.named_parameters()}
    learned = {names[id(p)] for p in scales["params"]}
    assert learned == {n for n in names.values() if n.endswith(("_scale", "_zero"))}
    assert {"1.input_scale", "3.weight_zero"} < learned and "4.weight_scale" not in learned
    others = {n for n in names.values() if n not in learned and n != "3.weight"}
    assert {names[id(p)] for p in weights["params"]} == others
    optimizer = torch.optim.SGD([weights, scales], lr=0.1)
    before = {n: p.detach().clone() for n, p in found.named_parameters()}
    for p in found.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in found.named_parameters():
        assert torch.equal(p, before[name]) == (name not in others) or p.isnan().all(), name
    plain = model()
    (only,) = qat.parameter_groups(plain)
    assert only["weight_decay"] == 0.01 and len(only["params"]) == len([*plain.parameters()])
    with pytest.raises(ValueError, match="no parameter of Sequential requires a gradient"):
        qat.parameter_groups(plain.requires_grad_(False))
