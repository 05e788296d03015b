"""Contracts of every algorithm: names, groups, schedules, copies and checkpoints, also those of torch.optim.SGD."""

from __future__ import annotations

import copy
import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from lowbit import optim
from lowbit.optim.step import fused
from lowbit.testing.launch import launch
from tests.optim.algorithms import SHAPES, STATEFUL, VARIANTS, cases, classes, decoded, every
from tests.optim.problems import FORMATS, copied, parameters, rand, relative, run, saved
from tests.optim.test_sharded import Model, shard, train

pytestmark = pytest.mark.usefixtures("operations")


@pytest.mark.parametrize("cls", VARIANTS, ids=lambda c: c.__name__)
def test_drop_in_names_are_classes_with_their_format(cls):
    for own, state in zip(VARIANTS[cls], ("4bit", "8bit", "float8"), strict=True):
        params = parameters((40, 130))
        optimizer = own(params, 0.01, weight_decay=0.5)
        assert issubclass(own, cls) and issubclass(own, torch.optim.Optimizer)
        assert optimizer.param_groups[0]["state"] == state
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert own(params, state="fp32").param_groups[0]["state"] == "fp32"
        assert own.__name__ in optim.__all__


def test_defaults_are_those_of_torch_and_the_papers():
    (group,) = optim.SGD8bit(parameters((4, 4))).param_groups
    for name, value in torch.optim.SGD(parameters((4, 4))).defaults.items():
        assert group[name] == value, name
    (group,) = optim.Lion8bit(parameters((4, 4))).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.99), 0.0)
    (group,) = optim.AdEMAMix8bit(parameters((4, 4))).param_groups
    assert (group["betas"], group["alpha"]) == ((0.9, 0.999, 0.9999), 5.0)


@classes
def test_groups_have_their_own_options_and_formats(cls):
    a, b, c, late = parameters(*[(40, 130)] * 4)
    groups = [
        {"params": [a], "state": "4bit", "lr": 0.1},
        {"params": b},
        {"params": [c], "state": "fp32"},
    ]
    optimizer = cls(groups, lr=0.01, **STATEFUL[cls])
    before = [p.detach().clone() for p in (a, b, c, late)]
    run(optimizer, [a, b, c], 2)
    optimizer.add_param_group({"params": late, "state": "float8", "lr": 0.0})
    run(optimizer, [a, b, c, late], 2, first=2)
    name = next(iter(optimizer.moments))
    stored = [optimizer.state[p][name] for p in (a, b, c, late)]
    formats = [getattr(s, "format", s.dtype) for s in stored]
    assert formats == ["4bit", "8bit", torch.float32, "float8"]
    assert [optimizer.state[p]["step"].item() for p in (a, b, c, late)] == [4, 4, 4, 2]
    moved = [not torch.equal(p, q) for p, q in zip((a, b, c, late), before, strict=True)]
    assert moved == [True, True, True, False]


@classes
def test_one_cycle_moves_the_momentum(cls):
    params = parameters((40, 130))
    optimizer = cls(params, lr=0.01, **STATEFUL[cls])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    run(optimizer, params, 1)
    scheduler.step()
    (group,) = optimizer.param_groups
    moved = group["betas"][0] if "betas" in group else group["momentum"]
    assert moved != 0.9
    run(optimizer, params, 1, first=1)
    if "betas" in group:
        assert len(group["betas"]) == len(cls(params).param_groups[0]["betas"])


def test_a_momentum_may_be_turned_on_and_off():
    a, b = parameters((40, 130), (13,)), parameters((40, 130), (13,))
    pairs = (torch.optim.SGD(a, lr=0.01), a), (optim.SGD(b, lr=0.01, state="fp32"), b)
    for optimizer, params in pairs:
        for step, momentum in enumerate((0.0, 0.9, 0.9, 0.0, 0.9)):
            optimizer.param_groups[0]["momentum"] = momentum
            run(optimizer, params, 1, first=step)
    assert all(relative(q, p) < 1e-6 for p, q in zip(a, b, strict=True))


@pytest.mark.cover("values")
@every
@cases
def test_resuming_from_a_file_is_bit_for_bit(cls, options, state):
    params = parameters(*SHAPES)
    optimizer = cls(params, lr=0.01, state=state, **options)
    run(optimizer, params, 3)
    checkpoint = saved(optimizer.state_dict())
    others = [copied(cls, params, state=state) for _ in range(2)]
    run(*others[1], 2, first=7)  # it has stepped, with other options, and keeps launches
    for other, copies in others:
        with torch.no_grad():
            for p, q in zip(params, copies, strict=True):
                q.copy_(p)
        other.load_state_dict(checkpoint)
        run(other, copies, 3, first=3)
    run(optimizer, params, 3, first=3)
    for _, copies in others:
        assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))


# relative error of values of one format in another; 0 in the same format
BOUND = {"4bit": 0.25, "8bit": 0.02, "float8": 0.05, "bf16": 0.005, "fp32": 0.0}


@pytest.mark.cover("pairs")
@classes
@pytest.mark.parametrize("before", FORMATS)
@pytest.mark.parametrize("after", FORMATS)
def test_every_format_loads_into_every_other(cls, before, after):
    params = parameters((40, 130), (13,))
    optimizer = cls(params, lr=0.01, state=before, **STATEFUL[cls])
    run(optimizer, params, 3)
    other, copies = copied(cls, params, state=after)
    other.load_state_dict(saved(optimizer.state_dict()))
    assert other.param_groups[0]["state"] == after, "the format is this optimizer's own"
    fresh, likes = copied(cls, params, state=after, **STATEFUL[cls])
    run(fresh, likes, 1)
    for p, q, like in zip(params, copies, likes, strict=True):
        assert other.state[q]["step"].item() == 3
        for name in optimizer.moments:
            value, loaded = optimizer.state[p][name], other.state[q][name]
            expected = fresh.state[like][name]
            assert type(loaded) is type(expected) and loaded.dtype == expected.dtype
            bound = BOUND[after] if before != after else 0.0
            assert relative(decoded(loaded), decoded(value)) <= bound
            if "slow" in name and "fp32" not in (before, after):
                assert torch.equal(loaded, value)
    run(other, copies, 1, first=3)


@every
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_torchs_sgd_continues_here_and_goes_back(momentum, state):
    """torch's states have no step counter. The buffer is past its first step, so dampening applies at once."""
    options = {"momentum": momentum, "dampening": 0.5, "weight_decay": 0.1}
    params = parameters(*SHAPES)
    theirs = torch.optim.SGD(params, lr=0.01, **options)
    run(theirs, params, 3)
    ours, copies = copied(optim.SGD, params, state=state)
    ours.load_state_dict(saved(theirs.state_dict()))
    assert ours.param_groups[0]["dampening"] == 0.5
    run(theirs, params, 2, first=3)
    run(ours, copies, 2, first=3)
    back, again = copied(torch.optim.SGD, copies, lr=1.0)
    back.load_state_dict(optim.dequantize_state_dict(saved(ours.state_dict())))
    run(theirs, params, 2, first=5)
    run(back, again, 2, first=5)
    exact = state == "fp32" or not momentum
    assert all(
        relative(q, p) < (1e-6 if exact else 0.01) for p, q in zip(params, again, strict=True)
    )
    for buffers in back.state.values():
        assert all(type(value) is torch.Tensor for value in buffers.values())


def test_a_buffer_of_none_or_of_no_use_is_left_out():
    params = parameters((40, 130))
    theirs = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    run(theirs, params, 1)
    state_dict = copy.deepcopy(theirs.state_dict())
    state_dict["param_groups"][0]["momentum"] = 0
    ours, copies = copied(optim.SGD8bit, params)
    ours.load_state_dict(state_dict)
    run(ours, copies, 1)
    assert set(ours.state[copies[0]]) == {"step"}
    state_dict["param_groups"][0]["momentum"] = 0.9
    state_dict["state"][0]["momentum_buffer"] = None
    ours.load_state_dict(state_dict)
    run(ours, copies, 1)
    assert ours.state[copies[0]]["step"] == 1


@pytest.mark.parametrize("cls", [optim.Lion, optim.SGD, optim.AdEMAMix], ids=lambda c: c.__name__)
def test_another_optimizers_checkpoint_is_refused(cls):
    params = parameters((40, 130))
    adam = torch.optim.Adam(params)
    run(adam, params, 1)
    options = {
        k: v for k, v in cls(params, **STATEFUL[cls]).param_groups[0].items() if k != "params"
    }
    state_dict = copy.deepcopy(adam.state_dict())
    state_dict["param_groups"][0].update(options)
    with pytest.raises(ValueError, match=rf"exp_avg_sq.*{cls.__name__} takes.*another optimizer"):
        cls(params, **STATEFUL[cls]).load_state_dict(state_dict)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_states_that_get_optimizer_state_dict_makes_count_as_a_step(momentum, flatten):
    """As with torch.optim.SGD, where the momentum is zeros then and the next gradient is dampened."""
    results = []
    for cls, extra in ((torch.optim.SGD, {}), (optim.SGD, {"state": "fp32"})):
        model = nn.Linear(130, 40)
        model.load_state_dict({"weight": rand(40, 130), "bias": rand(40)})
        optimizer = cls(model.parameters(), lr=0.01, momentum=momentum, dampening=0.5, **extra)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        if momentum or cls is optim.SGD:  # otherwise torch creates no states
            get_optimizer_state_dict(model, optimizer, options=options)
        run(optimizer, list(model.parameters()), 2)
        state_dict = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, state_dict, options=options)
        run(optimizer, list(model.parameters()), 1, first=2)
        results.append(model)
    for p, q in zip(*(model.parameters() for model in results), strict=True):
        assert relative(q, p) < 1e-6


def test_a_skipped_first_step_is_not_the_first():
    a, b = parameters((40, 130)), parameters((40, 130))
    options = {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}
    theirs = torch.optim.SGD(a, **options)
    ours = optim.SGD(b, state="fp32", skip_nonfinite=True, **options)
    b[0].grad = torch.full((40, 130), torch.nan)
    ours.step()
    run(theirs, a, 2)
    run(ours, b, 2)
    assert relative(b[0], a[0]) < 1e-6


@classes
def test_bfloat16_weights_follow_float32_ones(cls):
    """SGD without momentum has a step counter, for the random bits."""
    options = {"lr": 1e-4, "state": "fp32"}
    moved = {}
    for name, extra in {
        "rounded": {"bf16_stochastic_round": True},
        "corrected": {"weight_correction": "8bit"},
        "wide": {},
    }.items():
        dtype = torch.float32 if name == "wide" else torch.bfloat16
        p = nn.Parameter(torch.ones(40, 130, dtype=dtype))
        optimizer = cls([p], **options, **extra)
        for _ in range(30):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[name] = 1 - p.detach().double().mean().item()
    assert moved["wide"] > 0.002
    assert moved["rounded"] == pytest.approx(moved["wide"], rel=0.1)
    assert moved["corrected"] == pytest.approx(moved["wide"], abs=2**-9)


# Each rank would compile kernels for a second a class; `test_sharded` steps sharded weights by kernels.
@mock.patch.object(fused, "device_obstacle", lambda device, float8: "a test without kernels")
def check_sharded(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for cls, state in zip(STATEFUL, itertools.cycle(("4bit", "bf16")), strict=False):
        whole, first, second = Model(), shard(Model(), mesh), shard(Model(), mesh)
        models = (whole, first, second)
        own = [cls(m.parameters(), lr=0.01, state=state, **STATEFUL[cls]) for m in models]
        train(whole, own[0], 3)
        train(first, own[1], 3)
        second.load_state_dict(first.state_dict())
        gathered = [get_optimizer_state_dict(first, own[1], options=options)]
        torch.distributed.broadcast_object_list(gathered)  # only rank 0 gets the whole state dict
        set_optimizer_state_dict(second, own[2], gathered[0], options=options)
        train(whole, own[0], 2, first=3)
        train(second, own[2], 2, first=3)
        for (name, p), q in zip(second.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q), (cls, state, name)
    return True


def test_two_processes_and_their_full_checkpoint_give_what_one_process_gives():
    assert launch(check_sharded, 2) == [True, True]
