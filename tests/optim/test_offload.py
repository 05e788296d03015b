"""CPUOffloadOptimizer gives the results of its base optimizer, bit for bit, in every kind of training loop.

On the CPU the copies are made at once, or, by `Late`, as late as a GPU could make them: what is read too early is NaN,
and what is overwritten too early is wrong.
"""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer
from lowbit.optim.offload import offload, transfers
from tests.optim.offloading import BASES, Late, Model, assert_same, backward, pair, train
from tests.optim.problems import rand

bases = pytest.mark.parametrize("base", BASES)
gradients = pytest.mark.parametrize("offload_gradients", [False, True], ids=["", "gradients"])


@pytest.fixture(params=[transfers.Transfers, Late], ids=["at-once", "late"], autouse=True)
def kind(request, monkeypatch):
    """The kind of copies, and small buckets, so that a step takes several."""
    made = []
    monkeypatch.setattr(
        offload, "transfers_for", lambda _: made.append(request.param()) or made[-1]
    )
    monkeypatch.setattr(offload, "BUCKET", 5000)
    return made


@pytest.mark.cover("values")
@bases
@gradients
@pytest.mark.parametrize("passes", [1, 3])
def test_equals_the_base_optimizer(base, offload_gradients, passes):
    both = pair(base, offload_gradients)
    for model, optimizer in both:
        train(model, optimizer, 3, passes=passes)
    assert_same(*both)
    assert isinstance(both[1][1], torch.optim.Optimizer)


@gradients
def test_bfloat16_weights_with_stochastic_rounding(offload_gradients):
    """Random bits depend on a parameter's index in the optimizer, which offload keeps."""
    both = pair("AdamW8bit", offload_gradients, torch.bfloat16, bf16_stochastic_round=True, seed=3)
    for model, optimizer in both:
        train(model, optimizer, 3, passes=2)
    assert_same(*both)


@gradients
@pytest.mark.parametrize("kind", [Late], ids=["late"], indirect=True)
def test_backward_starts_the_copies_and_the_step_none(offload_gradients, kind):
    (_, _), (model, optimizer) = pair("torch-AdamW", offload_gradients)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    before = kind[0].started
    backward(model, 5)
    assert kind[0].started == before + 5
    assert all((p.grad is None) == offload_gradients for p in [*model.first.parameters()])
    optimizer.step()
    assert kind[0].started == before + 5  # and no weight, because only the step itself changed them


@bases
def test_clipping_by_torch(base):
    both = pair(base)
    norms = []
    for model, optimizer in both:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, 2 * step)
            backward(model, 2 * step + 1)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
    assert_same(*both)
    assert norms[0] > 0.01


@gradients
def test_clipping_by_the_optimizer(offload_gradients):
    (direct, reference), (model, optimizer) = pair("torch-SGD", offload_gradients)
    for step in range(3):
        for m, o in ((direct, reference), (model, optimizer)):
            o.zero_grad()
            backward(m, 2 * step)
            backward(m, 2 * step + 1)
        expected = nn.utils.clip_grad_norm_(direct.parameters(), 0.01)
        assert expected > 0.01
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.01), expected)
        reference.step()
        optimizer.step()
    for p, q in zip(direct.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@gradients
@pytest.mark.parametrize("option", [{"max_grad_norm": 0.01}, {"skip_nonfinite": True}], ids=str)
def test_clipping_and_skipping_inside_the_base_optimizers_step(offload_gradients, option):
    both = pair("AdamW8bit", offload_gradients, **option)
    for model, optimizer in both:
        train(model, optimizer, 2)
    assert_same(*both)
    assert not both[1][1]._is_separable()  # it takes all gradients at once
    assert pair("AdamW8bit")[1][1]._is_separable()


def test_an_unknown_base_optimizer_gets_all_gradients_at_once():
    calls = []

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            grads = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
            calls.append(len(grads))
            for group in self.param_groups:
                group["calls"] = group.get("calls", 0) + 1
            return super().step(closure)

    model = Model()
    optimizer = CPUOffloadOptimizer(model.parameters(), Own, lr=0.1)
    train(model, optimizer, 2)
    assert calls == [5, 5]
    assert optimizer.param_groups[0]["calls"] == 2


@pytest.mark.cover("values")
@bases
@gradients
@pytest.mark.parametrize("tensor", [False, True], ids=["", "tensor-lr"])
def test_schedulers_and_changed_groups(base, offload_gradients, tensor):
    lr = torch.tensor(0.01) if tensor else 0.01
    both = pair(base, offload_gradients, lr=lr) if base != "torch-SGD" else pair(base)
    for model, optimizer in both:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        for step in range(4):
            train(model, optimizer, 1, first=step)
            scheduler.step()
        optimizer.param_groups[0]["weight_decay"] = 0.5
        train(model, optimizer, 1, first=4)
    assert_same(*both)
    assert float(both[1][1].param_groups[0]["lr"]) < 1e-6


@pytest.mark.cover("values")
@bases
@gradients
def test_checkpoints_at_any_time_and_either_way(base, offload_gradients):
    """From offloaded to direct and back: before the first step, and between two backward passes of a step."""
    whole = pair(base, offload_gradients)
    for model, optimizer in whole:
        train(model, optimizer, 2, passes=2)
    parts = pair(base, offload_gradients)
    saved = [optimizer.state_dict() for _, optimizer in parts]
    for (_, optimizer), other in zip(parts, reversed(saved), strict=True):
        optimizer.load_state_dict(copy.deepcopy(other))
    for model, optimizer in parts:
        train(model, optimizer, 1, passes=2)
        optimizer.zero_grad()
        backward(model, 10)
    saved = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in parts]
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    for (_, optimizer), other in zip(parts, reversed(saved), strict=True):
        optimizer.param_groups[0]["lr"] = 5.0
        optimizer.load_state_dict(other)
    for model, optimizer in parts:
        backward(model, 11)
        optimizer.step()
    assert_same(whole[0], parts[0])
    assert_same(whole[0], parts[1])


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    (_, _), (model, optimizer) = pair("AdamW8bit")
    train(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(after["state"][i].keys() == s.keys() for i, s in before["state"].items())


@gradients
def test_weights_changed_by_hand_are_seen(offload_gradients):
    both = pair("torch-AdamW", offload_gradients)
    for model, optimizer in both:
        train(model, optimizer, 1)
        model.load_state_dict(Model().state_dict())
        train(model, optimizer, 1)
        with torch.no_grad():
            model.scale.mul_(3)
            model.first.weight.data = model.first.weight.data * 2
        train(model, optimizer, 1)
    assert_same(*both)


@gradients
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(offload_gradients, set_to_none):
    """A dropped pass has no effect. With zero gradients, momentum still moves the weights."""
    both = pair("torch-SGD", offload_gradients)
    for model, optimizer in both:
        train(model, optimizer, 1)
        optimizer.zero_grad()
        backward(model, 7)
        backward(model, 8)
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        train(model, optimizer, 1, first=2)
    assert_same(*both)


def test_offloaded_gradients_are_used_once():
    """A loop that uses model.zero_grad(), which can't reach the host, must not add up the gradients of several
    steps."""
    both = pair("torch-SGD", offload_gradients=True)
    for model, optimizer in both:
        for step in range(3):
            model.zero_grad()
            backward(model, step)
            optimizer.step()
    assert_same(*both)


@gradients
def test_gradients_set_by_hand_and_a_closure(offload_gradients):
    both = pair("torch-AdamW", offload_gradients)
    losses = []
    for model, optimizer in both:
        train(model, optimizer, 1)
        optimizer.zero_grad()
        for p in model.second.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(optimizer.step(lambda model=model: backward(model, 3)))
    assert_same(*both)
    assert torch.equal(*losses)


@gradients
def test_a_group_added_later_and_a_parameter_thawed(offload_gradients):
    both = pair("AdamW8bit", offload_gradients)
    for model, optimizer in both:
        train(model, optimizer, 1)
        model.frozen.requires_grad_(True)
        model.extra = nn.Parameter(torch.ones(65, 70))
        model.register_forward_hook(lambda m, _, out: out + m.extra.square().mean())
        optimizer.add_param_group({"params": [model.extra], "lr": 0.1})
        train(model, optimizer, 2, first=1, passes=2)
        optimizer.zero_grad()
        backward(model, 30)
        if optimizer is both[1][1]:  # with offload_gradients it freed them during backward
            assert (model.frozen.grad is None) == (model.extra.grad is None) == offload_gradients
        optimizer.step()
        assert not torch.equal(model.extra, torch.ones(65, 70))
        assert not torch.equal(model.frozen, Model().frozen)
    assert_same(*both)


def test_a_bad_group_changes_nothing():
    (_, _), (model, optimizer) = pair("AdamW8bit")
    extra = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="eps"):
        optimizer.add_param_group({"params": [extra], "eps": -1.0})
    assert len(optimizer.param_groups) == 1 and extra not in optimizer._slots
    optimizer.add_param_group({"params": [extra]})
    train(model, optimizer, 1)


def test_named_parameters():
    model = Model()
    optimizer = CPUOffloadOptimizer(model.named_parameters(), optim.AdamW8bit)
    assert optimizer.param_groups[0]["param_names"][0] == "scale"
    train(model, optimizer, 1)
    direct = optim.AdamW8bit(Model().named_parameters())
    direct.load_state_dict(optimizer.state_dict())


def test_grad_scaler():
    both = pair("torch-AdamW")
    for model, optimizer in both:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(rand(6, 65, seed=step))
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert_same(*both)


def test_a_frozen_parameter_takes_no_memory():
    (_, _), (model, optimizer) = pair("torch-AdamW")
    assert optimizer._slots[model.frozen].host.untyped_storage().nbytes() == 4
    assert optimizer._slots[model.first.weight].host.untyped_storage().nbytes() == 65 * 96 * 4


@gradients
def test_a_dropped_optimizer_leaves_the_gradients_alone(offload_gradients):
    (_, _), (model, optimizer) = pair("torch-AdamW", offload_gradients)
    del optimizer
    gc.collect()
    backward(model, 0)
    assert model.first.weight.grad is not None


def test_an_optimizer_that_replaces_another_gets_the_gradients():
    both = pair("torch-AdamW", offload_gradients=True)
    _, (model, replaced) = both
    cls, options = BASES["torch-AdamW"]
    newest = CPUOffloadOptimizer(model.parameters(), cls, offload_gradients=True, **options)
    train(*both[0], 2)
    train(model, newest, 2)
    assert_same(both[0], (model, newest))
    assert not replaced.state


@pytest.mark.cover("values")
@bases
@gradients
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_continues_bit_for_bit(base, offload_gradients, how):
    _, (model, optimizer) = pair(base, offload_gradients)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, 3)
    scheduler.step()
    both = model, optimizer
    other = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    for same in (both, other):
        train(*same, 3)
    assert_same(both, other)
    assert all(p is not q for p, q in zip(model.parameters(), other[0].parameters(), strict=True))


def test_a_model_that_was_converted_since_is_refused():
    _, (model, optimizer) = pair("AdamW8bit")
    train(model, optimizer, 1)
    model.double()
    with pytest.raises(RuntimeError, match=r"is torch\.float64, and was torch\.float32.*first"):
        optimizer.step()


def test_errors():
    p = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(TypeError, match="must be a class of optimizers"):
        CPUOffloadOptimizer([p], torch.optim.AdamW([p]))
    with pytest.raises(ValueError, match="LBFGS calls its closure"):
        CPUOffloadOptimizer([p], torch.optim.LBFGS)
    with pytest.raises(ValueError, match="SparseAdam takes sparse"):
        CPUOffloadOptimizer([p], torch.optim.SparseAdam)
    with pytest.raises(ValueError, match="more than one parameter group"):
        CPUOffloadOptimizer([{"params": [p]}, {"params": [p]}], torch.optim.AdamW)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        CPUOffloadOptimizer([p], torch.optim.AdamW, speed=3)
    with pytest.raises(ValueError, match="meta device"):
        CPUOffloadOptimizer([nn.Parameter(torch.ones(2, device="meta"))], torch.optim.AdamW)
    optimizer = CPUOffloadOptimizer([p], torch.optim.AdamW)
    p.grad = torch.ones(8, 8).to_sparse()
    with pytest.raises(RuntimeError, match="is sparse"):
        optimizer.step()
