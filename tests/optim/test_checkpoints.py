"""state_dict and load_state_dict: resuming bit for bit, other formats, torch.optim's checkpoints, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit
from lowbit import optim
from lowbit.tensor import CodebookTensor
from tests.optim.algorithms import VARIANTS
from tests.optim.problems import FORMATS, LOW, parameters, rand, relative, run, saved, set_grads

every = pytest.mark.parametrize("state", FORMATS)
SHAPES = [(40, 130), (13,), (5, 7, 137)]


def trained(cls=optim.AdamW, steps=3, **options):
    params = parameters(*SHAPES)
    optimizer = cls(params, lr=0.01, **options)
    run(optimizer, params, steps)
    return params, optimizer


def fresh(params, cls=optim.AdamW, **options):
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    return copies, cls(copies, **options)


def values(optimizer, param, name):
    value = optimizer.state[param][name]
    return value.dequantize() if isinstance(value, CodebookTensor) else value


def test_loaded_states_share_no_memory_with_the_checkpoint():
    params, optimizer = trained(state="4bit")
    copies, other = fresh(params, state="4bit")
    state_dict = optimizer.state_dict()
    other.load_state_dict(state_dict)
    kept = copy.deepcopy(state_dict)
    run(other, copies, 1)
    for key, state in kept["state"].items():
        for name, value in state.items():
            assert torch.equal(value, state_dict["state"][key][name])


@every
@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_of_narrow_parameters_keep_their_dtype(state, dtype):
    """torch.optim's own loader would cast them to the parameter's dtype."""
    params = parameters((64, 128), (13,), dtype=dtype)
    optimizer = optim.AdamW(params, state=state)
    run(optimizer, params, 2)
    copies, other = fresh(params, state=state)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, copies, strict=True):
        for name, value in optimizer.state[p].items():
            loaded = other.state[q][name]
            assert loaded.dtype == value.dtype and torch.equal(loaded, value)


PAIRS = [(torch.optim.AdamW, optim.AdamW), (torch.optim.Adam, optim.Adam)]


@pytest.mark.parametrize("theirs,ours", PAIRS, ids=["AdamW", "Adam"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_torchs_checkpoint_continues_here_and_goes_back(theirs, ours, amsgrad):
    params, optimizer = trained(theirs, amsgrad=amsgrad, weight_decay=0.1)
    copies, other = fresh(params, ours, state="fp32")
    other.load_state_dict(saved(optimizer.state_dict()))
    assert other.param_groups[0]["weight_decay"] == 0.1
    run(optimizer, params, 3, first=3)
    run(other, copies, 3, first=3)
    back, third = fresh(copies, theirs)
    third.load_state_dict(optim.dequantize_state_dict(saved(other.state_dict())))
    run(optimizer, params, 3, first=6)
    run(third, back, 3, first=6)
    for p, q in zip(params, back, strict=True):
        assert relative(q, p) < 1e-6


@pytest.mark.parametrize("state", LOW)
def test_torchs_checkpoint_is_encoded_and_back_decoded(state):
    params, optimizer = trained(torch.optim.AdamW)
    copies, other = fresh(params, state=state)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, copies, strict=True):
        assert relative(values(other, q, "exp_avg"), optimizer.state[p]["exp_avg"]) < 0.25
        assert torch.equal(other.state[q]["step"], torch.tensor(3.0))
    plain = optim.dequantize_state_dict(other.state_dict())
    third = torch.optim.AdamW(copies)
    third.load_state_dict(plain)
    run(third, copies, 1, first=3)
    for state_of in third.state.values():
        assert all(type(value) is torch.Tensor for value in state_of.values())


@pytest.mark.usefixtures("steps")
def test_adam_and_adamw_read_each_other_and_stay_what_they_are():
    params, optimizer = trained(optim.Adam4bit, weight_decay=0.1)
    copies, other = fresh(params, optim.AdamW4bit)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["decoupled_weight_decay"] is True
    a, b = fresh(params, torch.optim.AdamW)[1], fresh(params, optim.Adam)[1]
    b.load_state_dict(a.state_dict())
    assert b.param_groups[0]["decoupled_weight_decay"] is False
    run(other, copies, 1)


def test_step_as_a_number_and_groups_without_newer_options():
    params, optimizer = trained(torch.optim.AdamW)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["step"] = 3
    for name in ("maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad"):
        state_dict["param_groups"][0].pop(name)
    copies, other = fresh(params, optim.AdamW8bit, amsgrad=False)
    other.load_state_dict(state_dict)
    assert other.state[copies[0]]["step"].dtype == torch.float64
    run(other, copies, 1, first=3)


def test_a_checkpoint_from_before_the_first_step():
    params, optimizer = trained(steps=0)
    copies, other = fresh(params)
    other.load_state_dict(saved(optimizer.state_dict()))
    assert not other.state and other.param_groups[0]["lr"] == 0.01
    run(other, copies, 1)


def test_entries_of_no_parameter_are_kept_as_torch_keeps_them():
    params, optimizer = trained(state="4bit")
    expected = optimizer.state_bytes()
    state_dict = optimizer.state_dict()
    state_dict["state"] |= {"rounds": 5, "names": ["a"]}
    optimizer.load_state_dict(state_dict)
    assert optimizer.state["rounds"] == 5 and optimizer.state["names"] == ["a"]
    run(optimizer, params, 1, first=3)
    assert optimizer.state_bytes() == expected


def test_load_hooks_run_and_may_replace_the_checkpoint():
    params, optimizer = trained()
    _, other = fresh(params)
    seen = []

    def double_lr(_, state_dict):
        groups = [{**g, "lr": 2 * g["lr"]} for g in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    other.register_load_state_dict_pre_hook(double_lr)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [other] and other.param_groups[0]["lr"] == 0.02


def test_a_scheduler_resumes_with_the_optimizer():
    params, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    run(optimizer, params, 1)
    scheduler.step()
    _, other = fresh(params)
    resumed = torch.optim.lr_scheduler.StepLR(other, 2, gamma=0.5)
    other.load_state_dict(saved(optimizer.state_dict()))
    resumed.load_state_dict(scheduler.state_dict())
    other.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == 0.005


# ---- checkpoints that don't fit-------------------------------------------------------------------------------------


def broken(change):
    params, optimizer = trained(state="4bit")
    state_dict = copy.deepcopy(optimizer.state_dict())
    change(state_dict)
    return params, state_dict


def drop(name):
    return lambda sd: sd["state"][1].pop(name)


def put(name, value):
    return lambda sd: sd["state"][1].update({name: value})


def group(name, value):
    return lambda sd: sd["param_groups"][0].update({name: value})


BROKEN = {
    "shape": (put("exp_avg", torch.zeros(14)), ValueError, r"parameter 1: exp_avg has shape \(14,\).*\(13,\)"),
    "missing": (drop("exp_avg_sq"), ValueError, r"parameter 1.*\['exp_avg', 'step'\], AdamW takes"),
    "other optimizer": (put("momentum_buffer", torch.zeros(13)), ValueError, r"momentum_buffer.*another optimizer"),
    "no tensor": (put("exp_avg", 3.0), TypeError, r"exp_avg must be a tensor, got float"),
    "step": (put("step", torch.zeros(2)), ValueError, r"step must be one.*, got shape \(2,\)"),
    "amsgrad without its state": (group("amsgrad", True), ValueError, r"max_exp_avg_sq"),
    "option": (group("lr", -1.0), ValueError, r"lr must be"),
    "differentiable": (group("differentiable", True), ValueError, r"differentiable"),
    "count": (lambda sd: sd["param_groups"][0]["params"].pop(), ValueError, r"groups of \[2\] parameters.*of \[3\]"),
    "groups": (lambda sd: sd["param_groups"].append({"params": []}), ValueError, r"groups of \[3, 0\]"),
}  # fmt: skip


@pytest.mark.parametrize("change,error,message", BROKEN.values(), ids=BROKEN)
def test_a_misfit_is_refused_and_changes_nothing(change, error, message):
    params, state_dict = broken(change)
    copies, other = fresh(params, lr=0.5, state="8bit")
    run(other, copies, 1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(error, match=message):
        other.load_state_dict(state_dict)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(after["state"][key][name], value)


@pytest.mark.parametrize("given", [None, {}, {"state": {}}], ids=repr)
def test_values_that_are_no_checkpoint_are_refused(given):
    _, optimizer = trained()
    with pytest.raises(TypeError, match=r"state_dict must be.*'param_groups', got"):
        optimizer.load_state_dict(given)


def test_the_parameters_name_is_in_the_message():
    model = nn.Linear(130, 40)
    optimizer = optim.AdamW4bit(model.named_parameters())
    run(optimizer, list(model.parameters()), 1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="weight: exp_avg has shape"):
        optimizer.load_state_dict(state_dict)


# ---- torch.distributed.checkpoint.state_dict, in one process ------------------------------------------------


@every
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_get_and_set_optimizer_state_dict(state, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(130, 40), nn.Linear(40, 137))
    before = copy.deepcopy(model.state_dict())
    optimizer = optim.AdamW(model.parameters(), lr=0.01, state=state, weight_decay=0.5)
    get_optimizer_state_dict(model, optimizer, options=options)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "creating the states changes no weight"
    run(optimizer, list(model.parameters()), 3)
    state_dict = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))

    other_model = copy.deepcopy(model)
    other = optim.AdamW(other_model.parameters(), state=state)
    set_optimizer_state_dict(other_model, other, state_dict, options=options)
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(p, q)
    run(optimizer, list(model.parameters()), 2, first=3)
    run(other, list(other_model.parameters()), 2, first=3)
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "cls", VARIANTS[optim.AdamW] + VARIANTS[optim.Adam], ids=lambda c: c.__name__
)
@pytest.mark.usefixtures("steps")
def test_states_made_by_get_optimizer_state_dict_train_like_fresh_ones(cls):
    """The step without gradients is counted, as in torch.optim, and has no other effect."""
    model, other_model = nn.Linear(130, 64, bias=False), nn.Linear(130, 64, bias=False)
    theirs = torch.optim.AdamW if "AdamW" in cls.__name__ else torch.optim.Adam
    for m in (model, other_model):
        m.weight = nn.Parameter(rand(64, 130))
    optimizer = cls(model.parameters(), lr=1e-3)
    reference = theirs(other_model.parameters(), lr=1e-3)
    for m, o in ((model, optimizer), (other_model, reference)):
        get_optimizer_state_dict(m, o)
        set_grads([m.weight], 0)
        o.step()
    start = rand(64, 130)
    assert relative(model.weight - start, other_model.weight - start) < 1e-4


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "eager"])
def test_states_made_after_the_model_is_loaded_leave_random_numbers(fused):
    """accelerate loads the model first. Then the step that creates the states must not advance the numbers by which
    int8 weights round."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    lowbit.train.prepare_(model, lowbit.Int8Weight())
    before = model[0].weight.place.clone()
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2, fused=fused)
    get_optimizer_state_dict(model, optimizer)
    assert torch.equal(model[0].weight.place, before)
    set_grads([model[0].weight], 0)
    optimizer.step()
    assert not torch.equal(model[0].weight.place, before)


def test_how_an_optimizer_works_is_not_taken_from_a_checkpoint():
    """A checkpoint of torch's fused step on a GPU must load on a machine without one."""
    params, optimizer = trained(torch.optim.AdamW, fused=True)
    copies, other = fresh(params, optim.AdamW8bit, max_grad_norm=2.0, seed=5)
    other.load_state_dict(optimizer.state_dict())
    group = other.param_groups[0]
    assert (group["fused"], group["foreach"], group["state"]) == (None, None, "8bit")
    assert (group["max_grad_norm"], group["seed"]) == (2.0, 5), (
        "its own, where a checkpoint has none"
    )
    run(other, copies, 1, first=3)
    third = optim.AdamW8bit([nn.Parameter(p.detach().clone()) for p in params])
    third.load_state_dict(other.state_dict())
    assert (third.param_groups[0]["max_grad_norm"], third.param_groups[0]["seed"]) == (2.0, 5)
