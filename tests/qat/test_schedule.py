"""Schedules: when fake quantization begins, and when observers freeze."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lowbit as lb
from lowbit import qat
from lowbit.numerics.learned_scales import RATE
from tests.train.problems import values

INT4 = lb.Int4WeightOnly(group_size=16)
X, Y = values(16, 32), values(16, 24, seed=1)


def network(schemes: Any = INT4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 24))
    qat.prepare_(model, schemes)
    return model


def train(model: nn.Module, optimizer: Any, steps: int, schedule: Any = None) -> list[torch.Tensor]:
    outputs = []
    for _ in range(steps):
        y = model(X)
        outputs.append(y.detach())
        (y - Y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return outputs


def adam(model: nn.Module) -> Any:
    return lb.optim.AdamW8bit(model.parameters(), lr=1e-2)


def test_start() -> None:
    model = network()
    plain = copy.deepcopy(model)
    qat.undo_(plain)
    schedule = qat.Schedule(model, start=3)
    found = train(model, adam(model), 5, schedule)
    expected = train(plain, adam(plain), 5)
    assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))
    assert not torch.equal(found[3], expected[3])
    assert model[0].weight.off is None and schedule.steps == 5


STATIC = lb.Int8StaticActivationInt8Weight()


def observed(scales: Any = "learned", **settings: Any) -> tuple[nn.Sequential, qat.Schedule]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 24))
    qat.prepare_(model, STATIC, scales=scales)
    return model, qat.Schedule(model, **{"freeze_observers": 3, "method": "minmax", **settings})


@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("start", [0, 2, 4])
def test_observers_count_batches_of_training_and_freeze(scales: Any, start: int) -> None:
    """Also those that pass while fake quantization is off. An evaluation does not count."""
    model, schedule = observed(scales, start=start)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model.eval()  # as a model that was just loaded
    for i in range(3):
        assert model[0].input_scale.isnan().all()
        model(X * 100)
        model.train()
        (model(X * (i + 1)) - Y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        schedule.step()
    least, most = 3 * X.amin() / -128, 3 * X.amax() / 127
    assert torch.allclose(model[0].input_scale.detach() * RATE, torch.maximum(least, most))
    assert not any("observer" in key for key in model.state_dict())
    frozen = model[0].input_scale.detach().clone()
    train(model, optimizer, 3, schedule)
    assert torch.equal(model[0].input_scale, frozen) == (scales == "present")
    qat.convert_(model)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_observers_resume_to_the_bit(at: int) -> None:
    """The state dict of the model has their statistics; later ones, without them, load strictly."""
    model, schedule = observed()
    optimizer = adam(model)
    expected = train(model, optimizer, 6, schedule)
    model, schedule = observed()
    optimizer = adam(model)
    train(model, optimizer, at, schedule)
    states = copy.deepcopy([x.state_dict() for x in (model, optimizer, schedule)])
    model, schedule = observed()
    optimizer = adam(model)
    for part, state in zip((model, optimizer, schedule), states, strict=True):
        part.load_state_dict(state)
    found = train(model, optimizer, 6 - at, schedule)
    assert all(torch.equal(a, b) for a, b in zip(found, expected[at:], strict=True))


def test_a_training_that_ends_while_it_observes() -> None:
    model, schedule = observed()
    train(model, torch.optim.SGD(model.parameters(), lr=1e-2), 1, schedule)
    with pytest.raises(ValueError, match="no static scale yet"):
        qat.convert_(model)
    schedule.finish_observers()
    qat.convert_(model)


def test_observers_that_saw_nothing() -> None:
    _, schedule = observed(freeze_observers=1)
    with pytest.raises(ValueError, match="they saw no batch"):
        schedule.step()
    with pytest.raises(ValueError, match="no prepared weight with a static activation"):
        qat.Schedule(network(), freeze_observers=1)


def test_resumed_to_the_bit() -> None:
    model = network()
    schedule, optimizer = qat.Schedule(model, start=2), adam(model)
    expected = train(model, optimizer, 5, schedule)
    for at in (1, 3):
        first = network()
        schedule, optimizer = qat.Schedule(first, start=2), adam(first)
        train(first, optimizer, at, schedule)
        states = copy.deepcopy([x.state_dict() for x in (schedule, first, optimizer)])
        second = network()
        schedule, optimizer = qat.Schedule(second, start=2), adam(second)
        for part, state in zip((schedule, second, optimizer), states, strict=True):
            part.load_state_dict(state)
        found = train(second, optimizer, 5 - at, schedule)
        assert all(torch.equal(a, b) for a, b in zip(found, expected[at:], strict=True)), at


def test_one_graph_a_stage() -> None:
    torch._dynamo.reset()
    model = network()
    schedule = qat.Schedule(model, start=2)
    counted = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counted, fullgraph=True)
    found, expected = [], []
    for _ in range(4):
        found.append(run(X).detach())
        expected.append(model(X).detach())
        schedule.step()
    assert counted.frame_count == 2  # off, and on
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_choice_of_the_user_survives_a_stage() -> None:
    model, schedule = observed("present", freeze_observers=1)
    qat.enable_(model, activations=False)
    before = schedule.stage(schedule.steps)
    train(model, adam(model), 1, schedule)
    assert schedule.stage(schedule.steps) != before
    assert model[0].weight.off == "activations"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"start": -1}, "start must be a whole number of at least 0, got -1"),
        ({"start": 1.5}, r"got 1\.5"),
        ({"freeze_observers": -2}, "freeze_observers must be"),
        ({"freeze_observers": 3, "method": "max"}, "unknown method 'max'; accepted: 'minmax'"),
        ({"method": "minmax"}, "'minmax'.* without freeze_observers there are none"),
    ],
)
def test_refused(settings, match) -> None:
    with pytest.raises(ValueError, match=match):
        qat.Schedule(network(), **settings)


def test_refused_models_and_states() -> None:
    with pytest.raises(ValueError, match="has no prepared weights"):
        qat.Schedule(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="not a state of a Schedule"):
        qat.Schedule(network()).load_state_dict({"step": 3})
