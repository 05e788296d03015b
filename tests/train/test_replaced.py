"""Replaced parameters: their hooks, their attributes, and optimizers that hold the old ones."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import lowbit
from lowbit import (
    Int4WeightOnly,
    Int8WeightOnly,
    optim,
    qat,
    train,
)
from lowbit.convert import replaced
from lowbit.optim import CPUOffloadOptimizer
from tests.garbage import only_new
from tests.optim.problems import run
from tests.train.problems import PREPARE

prepared_how = pytest.mark.parametrize("how", PREPARE)
FREEZE = {
    "quantize_": lambda m: lowbit.quantize_(m, Int8WeightOnly()),
    "QAT": lambda m: (PREPARE["QAT"](m), qat.convert_(m))[1],
    "BitNet": lambda m: (PREPARE["BitNet"](m), train.convert_(m))[1],
}
OPTIMIZERS = {
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "torch fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "AdamW8bit": lambda p: optim.AdamW8bit(p, lr=1e-2),
    "eager Lion": lambda p: optim.Lion(p, lr=1e-2, fused=False),
    "Muon": lambda p: optim.Muon(p, lr=1e-2),
    "offloaded": lambda p: CPUOffloadOptimizer(p, torch.optim.AdamW, lr=1e-2),
    "someone's": lambda p: Someones(p, {}),
}
any_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Someones(torch.optim.Optimizer):
    """An optimizer with its own step, as those of bitsandbytes."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=1e-2)


@pytest.fixture(autouse=True)
def nothing_replaced_before():
    replaced._REPLACED.clear()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 96))


def backward(m, seed=0):
    m(torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


# ---- hooks and attributes ------------------------------------------------------------------------------------


@prepared_how
def test_hooks_go_on(how):
    """Both kinds run in their order with the right arguments, until their handles remove them."""
    m = model()
    seen = []

    def doubled(grad):
        seen.append(("hook", type(grad), grad.shape))
        return 2 * grad

    def after(param):
        seen.append(("after", type(param.grad), param is m[0].weight))

    handles = [m[0].weight.register_hook(doubled)]
    handles += [m[0].weight.register_post_accumulate_grad_hook(after)]
    twin = copy.deepcopy(model())
    PREPARE[how](m), PREPARE[how](twin)
    torch.manual_seed(1), backward(m)
    torch.manual_seed(1), backward(twin)
    assert seen == [("hook", torch.Tensor, (64, 128)), ("after", torch.Tensor, True)]
    assert torch.equal(m[0].weight.grad, 2 * twin[0].weight.grad)
    for handle in handles:
        handle.remove()
    backward(m)
    assert len(seen) == 2


@prepared_how
def test_hooks_that_were_removed_do_not_come_back(how):
    m = model()
    seen = []
    m[0].weight.register_hook(lambda _: seen.append("removed")).remove()
    m[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("removed")).remove()
    PREPARE[how](m)
    added = m[0].weight.register_hook(lambda _: seen.append("new"))
    m[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("newer"))
    backward(m)
    added.remove()
    backward(m)
    assert seen == ["new", "newer", "newer"]


@pytest.mark.parametrize("how", ["int8 products", "int8 weights", "BitNet"])
def test_hooks_and_attributes_go_there_and_back(how):
    m = model()
    seen = []
    m[0].weight.register_hook(lambda grad: seen.append(type(grad)))
    m[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    m[0].weight.tensor_model_parallel = True
    PREPARE[how](m)
    m[0].weight.note = ["mine"]
    train.restore_(m)
    backward(m)
    assert seen == [torch.Tensor, torch.Tensor]
    assert type(m[0].weight) is nn.Parameter
    assert m[0].weight.__dict__ == {"tensor_model_parallel": True, "note": ["mine"]}


@prepared_how
def test_attributes_go_on(how):
    m = model()
    m[0].weight._no_weight_decay = True
    m[0].weight.is_embedding = buffer = torch.ones(2)
    PREPARE[how](m)
    assert m[0].weight._no_weight_decay is True and m[0].weight.is_embedding is buffer
    assert not hasattr(m[2].weight, "_no_weight_decay")
    assert copy.deepcopy(m)[0].weight._no_weight_decay is True


def test_an_attribute_that_the_representation_has_stays_behind_and_is_reported():
    m = model()
    m[0].weight.scheme = "mine"
    report = PREPARE["QAT"](m)
    assert m[0].weight.scheme == Int4WeightOnly(group_size=32)
    notes = {e.fqn: e.note for e in report.entries}
    assert "left behind: the attribute 'scheme', which FakeQuantizedTensor has" in notes["0.weight"]
    assert "left behind" not in notes["2.weight"]


@pytest.mark.parametrize("how", FREEZE)
def test_hooks_of_a_frozen_weight_are_reported(how):
    m = model()
    m[0].weight.register_hook(lambda grad: None)
    m[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    m[2].weight.register_hook(lambda grad: None).remove()
    m[2].weight.tag = "kept"
    report = FREEZE[how](m)
    notes = {e.fqn: e.note for e in report.entries}
    assert "left behind: 2 gradient hooks, as it gets no gradients" in notes["0.weight"]
    assert "left behind" not in notes["2.weight"] and m[2].weight.tag == "kept"


def test_a_tied_weight_keeps_its_hooks_once():
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    m[1].weight = m[0].weight
    seen = []
    m[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    PREPARE["QAT"](m)
    m(torch.randn(2, 64)).sum().backward()
    assert len(seen) == 1 and seen[0] is m[0].weight is m[1].weight


# ---- optimizers that were made before --------------------------------------------------------------------------


@pytest.mark.cover("pairs")
@any_optimizer
@prepared_how
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped before"])
def test_an_optimizer_made_before_raises(make, how, stepped):
    m = model()
    optimizer = make(m.parameters())
    if stepped:
        backward(m)
        optimizer.step()
    PREPARE[how](m)
    optimizer.zero_grad()
    backward(m)
    before = [p.detach().clone() for p in (m[0].bias, m[2].bias)]
    with pytest.raises(RuntimeError, match=r"holds 2 parameters \(of 4\).*0\.weight, 2\.weight"):
        optimizer.step()
    assert torch.equal(before[0], m[0].bias) and torch.equal(before[1], m[2].bias)


@any_optimizer
def test_an_optimizer_made_afterwards_steps(make):
    m = model()
    PREPARE["QAT" if make is not OPTIMIZERS["offloaded"] else "int8 products"](m)
    trained = m.parameters()
    if make is OPTIMIZERS["offloaded"]:
        trained = [m[0].bias, m[2].bias]
    optimizer = make(trained)
    for seed in range(2):
        before = m[0].bias.detach().clone()
        optimizer.zero_grad()
        backward(m, seed)
        optimizer.step()
        assert not torch.equal(before, m[0].bias)


def test_the_old_optimizers_states_go_to_the_new_one():
    """The way out that the message names works."""
    m = model()
    optimizer = optim.AdamW8bit(m.parameters())
    backward(m)
    optimizer.step()
    PREPARE["int8 products"](m)
    new = optim.AdamW8bit(m.parameters())
    new.load_state_dict(optimizer.state_dict())
    backward(m)
    new.step()
    assert new.state[m[0].weight]["step"] == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_old_gradients_do_not_hide_a_stale_optimizer(set_to_none):
    """They go to the new parameter: accumulation goes on, and nothing keeps the old optimizer going."""
    m = model()
    optimizer = torch.optim.AdamW(m.parameters())
    backward(m)
    old, grad = m[0].weight, m[0].weight.grad.clone()
    PREPARE["int8 products"](m)
    assert old.grad is m[0].weight.grad and torch.equal(old.grad, grad)
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(m)
    with pytest.raises(RuntimeError, match="Make the optimizer after"):
        optimizer.step()


def test_restored_weights_take_a_new_optimizer_too():
    m = model()
    PREPARE["int8 weights"](m)
    optimizer = optim.AdamW8bit(m.parameters())
    backward(m)
    optimizer.step()
    train.restore_(m)
    backward(m)
    with pytest.raises(RuntimeError, match=r"0\.weight, 2\.weight.*\(by Parameter\)"):
        optimizer.step()
    new = optim.AdamW8bit(m.parameters())
    backward(m)
    new.step()


@pytest.mark.parametrize("how", FREEZE)
def test_weights_frozen_for_inference_raise_too(how):
    m = model()
    optimizer = torch.optim.AdamW(m.parameters())
    FREEZE[how](m)
    backward(m)
    with pytest.raises(RuntimeError, match=r"holds 2 parameters"):
        optimizer.step()


def test_frozen_parameters_in_an_optimizer_are_no_mistake():
    """All parameters given to the optimizer, of which only some train, as with LoRA over a quantized model."""
    m = model()
    m[0].weight.requires_grad_(False)
    m[2].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(m.parameters())
    lowbit.quantize_(m, Int8WeightOnly())
    backward(m)
    before = m[0].bias.detach().clone()
    optimizer.step()
    assert not torch.equal(before, m[0].bias)


def test_a_parameter_that_another_model_uses_is_accepted():
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    PREPARE["int8 weights"](nn.Sequential(first))
    second(torch.randn(2, 64)).sum().backward()
    before = second.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, second.weight)


@pytest.mark.parametrize("made_first", [True, False], ids=["before", "after"])
def test_a_closure_makes_the_gradients(made_first):
    """Gradients exist only after the step, so the check runs afterwards."""
    m = model()
    if not made_first:
        PREPARE["QAT"](m)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    if made_first:
        PREPARE["QAT"](m)

    def closure():
        optimizer.zero_grad()
        loss = m(torch.ones(2, 128)).sum()
        loss.backward()
        return loss

    for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        if made_first:
            with pytest.raises(RuntimeError, match="holds 2 parameters"):
                step()
        else:
            step()


def test_a_closure_over_a_parameter_that_another_model_uses():
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    PREPARE["int8 weights"](nn.Sequential(first))

    def closure():
        second(torch.ones(2, 64)).sum().backward()

    before = second.weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(before, second.weight)


@only_new()
def test_an_optimizer_without_steps_gets_no_error_and_is_freed():
    m = model()
    optimizer = torch.optim.AdamW(m.parameters())
    old = weakref.ref(m[0].weight)
    PREPARE["QAT"](m)
    assert len(replaced._REPLACED) == 2
    new = torch.optim.AdamW(m.parameters())
    backward(m)
    new.step()
    assert old() is not None
    optimizer.param_groups.clear()
    gc.collect(0)
    assert old() is None and not replaced._REPLACED


@only_new()
def test_replaced_parameters_are_freed():
    m = model()
    PREPARE["int8 weights"](m)
    gc.collect(0)
    assert not replaced._REPLACED


def test_steps_by_a_scheduler_and_a_grad_scaler_raise():
    m = model()
    optimizer = optim.AdamW8bit(m.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    PREPARE["QAT"](m)
    scaler.scale(m(torch.ones(2, 128)).sum()).backward()
    with pytest.raises(RuntimeError, match="holds 2 parameters"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="holds 2 parameters"):
        optimizer.step()
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("made_first", [True, False], ids=["before", "after"])
def test_compiled_steps(made_first):
    m = model()
    old = m[0].weight  # alive in any case
    if not made_first:
        PREPARE["int8 weights"](m)
    optimizer = torch.optim.SGD([m[0].bias, *(p for p in m.parameters() if p is not m[0].bias)])
    if made_first:
        PREPARE["int8 weights"](m)
    trained = [m[0].bias] if not made_first else None
    if trained:
        optimizer = torch.optim.SGD(trained, lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    backward(m)
    if made_first:
        with pytest.raises(RuntimeError, match="holds 2 parameters"):
            step()
    else:
        before = m[0].bias.detach().clone()
        step()
        assert not torch.equal(before, m[0].bias) and old is not m[0].weight


def test_optimizers_of_other_models_are_left_alone():
    m, other = model(), model()
    held = list(m.parameters())
    optimizer = optim.AdamW8bit(other.parameters())
    PREPARE["QAT"](m)
    run(optimizer, list(other.parameters()), 2)
    optimizer.zero_grad()
    optimizer.step()  # without any gradient
    assert len(held) == 4 and optimizer.state[other[0].weight]["step"] == 2


def test_a_gradient_that_another_model_has_stays():
    """A layer that two models share: one is quantized between the other's backward and step."""
    shared = nn.Linear(64, 32)
    model, other = nn.Sequential(shared), nn.Sequential(copy.copy(shared))
    other[0]._parameters = dict(shared._parameters)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    lowbit.quantize_(model, Int8WeightOnly())
    other(torch.randn(3, 64)).sum().backward()
    assert other[0].weight.grad is not None
    optimizer.step()

    model = nn.Sequential(nn.Linear(64, 32))
    weight = model[0].weight
    model(torch.randn(3, 64)).sum().backward()
    gradient = weight.grad
    PREPARE["QAT"](model)
    assert weight.grad is gradient and model[0].weight.grad is gradient
    with pytest.raises(RuntimeError, match="no longer those of their model"):
        torch.optim.SGD([weight], lr=0.1).step()
