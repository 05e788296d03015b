"""load_state_dict with values that no optimizer ever saved, and large step counts."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer, dequantize_state_dict
from lowbit.tensor import CodebookTensor
from tests.optim.problems import FORMATS, parameters, run, set_grads

SHAPES = (64, 130), (33,)
CLASSES = {
    "AdamW": (optim.AdamW, {}),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True}),
    "Adam": (optim.Adam, {}),
    "SGD": (optim.SGD, {"momentum": 0.9}),
    "Lion": (optim.Lion, {}),
    "AdEMAMix": (optim.AdEMAMix, {"t_alpha_beta3": 10}),
    "Muon": (optim.Muon, {}),
    "offloaded AdamW": (CPUOffloadOptimizer, {"base_class": optim.AdamW}),
    "offloaded torch AdamW": (CPUOffloadOptimizer, {"base_class": torch.optim.AdamW}),
}
every_class = pytest.mark.parametrize("cls,options", CLASSES.values(), ids=CLASSES)
BAD_STEPS = {
    "NaN": math.nan,
    "infinite": math.inf,
    "negative": -1,
    "fractional": 2.5,
    "a NaN tensor": torch.tensor(math.nan),
    "a negative tensor": torch.tensor(-3, dtype=torch.int64),
    "a fractional tensor": torch.tensor([0.5]),
    "beyond float64": 2**53 + 1,
    "a fraction": Fraction(1, 3),
    "two numbers": torch.ones(2),
    "on meta": torch.zeros((), device="meta"),
    "complex": torch.tensor(1j),
    "True": True,
    "a bool": torch.tensor(True),
    "text": "3",
    "None": None,
    "a list": [3],
}


def made(cls, options, **more):
    """Its steps run by PyTorch's operations: no kernel is compiled."""
    params = parameters(*SHAPES)
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    return params, cls(named, lr=0.01, fused=False, **options, **more)


def trained(cls, options, **more):
    params, optimizer = made(cls, options, **more)
    run(optimizer, params, 2)
    return params, optimizer


def contents(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def same(a, b):
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, CodebookTensor):
        return (
            a.meta() == b.meta() and torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)
        )
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def refused(optimizer, state_dict, match):
    before, groups = contents(optimizer), optimizer.param_groups
    with pytest.raises((ValueError, TypeError), match=match):
        optimizer.load_state_dict(state_dict)
    assert same(contents(optimizer), before) and optimizer.param_groups is groups


# ---- steps -----------------------------------------------------------------------------------------------------


@pytest.mark.cover("values")
@every_class
@pytest.mark.parametrize("step", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_that_is_no_count_is_refused(cls, options, step):
    _, optimizer = trained(cls, options)
    state_dict = contents(optimizer)
    state_dict["param_groups"][0]["lr"] = 0.5
    state_dict["state"][1]["step"] = step
    refused(optimizer, state_dict, r"layer\.1: step must be")


GOOD_STEPS = {
    "int": 7,
    "float": 7.0,
    "numpy": np.float32(7),
    "array": np.array([7]),
    "float32": torch.tensor(7.0),
    "int32": torch.tensor([7], dtype=torch.int32),
    "fraction": Fraction(7),
}


@pytest.mark.parametrize("step", GOOD_STEPS.values(), ids=GOOD_STEPS)
def test_steps_that_are_counts_load(step):
    params, optimizer = trained(optim.AdamW, {})
    state_dict = contents(optimizer)
    state_dict["state"][1]["step"] = step
    optimizer.load_state_dict(state_dict)
    assert optimizer.state[params[1]]["step"] == 7
    run(optimizer, params, 1)
    assert optimizer.state[params[1]]["step"] == 8


@pytest.mark.parametrize("start", [2**24 - 1, 2**24, 2**31, 2**40])
@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.Lion, optim.AdEMAMix, optim.Muon])
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "eager"])
def test_steps_are_counted_beyond_float32(cls, start, fused):
    params = parameters(*SHAPES)
    options = {"momentum": 0.9} if cls is optim.SGD else {}
    optimizer = cls(params, lr=0.01, fused=fused, **options)
    run(optimizer, params, 1)
    state_dict = contents(optimizer)
    for state in state_dict["state"].values():
        state["step"] = start
    optimizer.load_state_dict(state_dict)
    run(optimizer, params, 3)
    assert [optimizer.state[p]["step"].item() for p in params] == [start + 3] * 2


def test_random_bits_differ_in_every_step_beyond_float32():
    """The step is part of the key of random bits: a counter that stops would repeat the same bits."""
    start, moves = 2**24, []
    param = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = optim.SGD([param], lr=1e-4, bf16_stochastic_round=True)
    for step in range(3):
        param.data.fill_(1.0)
        param.grad = torch.ones_like(param)
        optimizer.step()
        if step == 0:
            optimizer.state[param]["step"].fill_(start)
        moves.append(param.detach().clone())
    assert not torch.equal(moves[1], moves[2])


def test_rows_of_a_large_int8_weight_count_the_same_steps():
    """Each row of the kernel's table has its own counter."""
    from lowbit.optim.step import job, rounded
    from lowbit.train import Int8Weight, prepare_

    model = nn.Sequential(nn.Linear(256, 4096, bias=False))
    prepare_(model, Int8Weight())
    optimizer = optim.AdamW8bit(model.parameters())
    weight = model[0].weight
    assert weight.numel() > job.piece_of(weight.device)
    for _ in range(2):
        weight.grad = torch.ones(4096, 256)
        optimizer.step()
        optimizer.state[weight]["step"].fill_(2**24 + 1)
    launch = optimizer._fused.launches[0]
    assert isinstance(launch, rounded.RoundedLaunch) and launch.steps.dtype == torch.float64
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2**24 + 2


def test_a_float32_counter_set_by_the_user():
    params, optimizer = trained(optim.AdamW, {})
    for param in params:
        optimizer.state[param]["step"] = torch.tensor(5.0)
    run(optimizer, params, 1)
    assert all(optimizer.state[p]["step"] == 6 for p in params)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_state_dict_of_many_steps_goes_to_torch_and_back(foreach):
    params, optimizer = trained(optim.AdamW, {}, state="fp32")
    copies = parameters(*SHAPES)
    theirs = torch.optim.AdamW(copies, lr=0.01, foreach=foreach)
    state_dict = dequantize_state_dict(optimizer.state_dict())
    assert all(s["step"].dtype == torch.float32 for s in state_dict["state"].values())
    theirs.load_state_dict(state_dict)
    run(theirs, copies, 1)
    assert theirs.state[copies[0]]["step"] == 3
    optimizer.load_state_dict(theirs.state_dict())
    run(optimizer, params, 1)
    assert optimizer.state[params[0]]["step"] == 4


# ---- second moments ----------------------------------------------------------------------------------------


def with_a_negative(value):
    """A second moment with one value below zero."""
    if not isinstance(value, CodebookTensor):
        value = value.clone()
        value.view(-1)[5] = -0.5
        return value
    value = value.clone()
    value.scale.view(-1)[0] = -1.0
    return value


SECOND = {name: CLASSES[name] for name in ("AdamW amsgrad", "Adam", "AdEMAMix", "offloaded AdamW")}


@pytest.mark.parametrize("cls,options", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize("state", FORMATS)
def test_a_negative_second_moment_is_refused(cls, options, state):
    _, optimizer = trained(cls, options, state=state)
    names = [n for n in optimizer.state_dict()["state"][0] if n.endswith("_sq")]
    assert names
    for name in names:
        for i in range(len(SHAPES)):
            state_dict = contents(optimizer)
            state_dict["param_groups"][0]["lr"] = 0.5
            state_dict["state"][i][name] = with_a_negative(state_dict["state"][i][name])
            refused(optimizer, state_dict, rf"layer\.{i}: {name} .* below 0")


def test_a_negative_second_moment_under_a_torch_optimizer_is_refused():
    _, optimizer = trained(*CLASSES["offloaded torch AdamW"])
    state_dict = contents(optimizer)
    state_dict["state"][0]["exp_avg_sq"][3, 7] = -1e-30
    refused(optimizer, state_dict, r"layer\.0: exp_avg_sq .* below 0")


def test_signed_codes_of_a_second_moment_are_looked_at():
    _, optimizer = trained(optim.AdamW, {}, state="8bit")
    state_dict = contents(optimizer)
    values = torch.randn(64, 130)
    state_dict["state"][0]["exp_avg_sq"] = CodebookTensor.from_float(values, "8bit", signed=True)
    refused(optimizer, state_dict, r"layer\.0: exp_avg_sq .* below 0")
    state_dict["state"][0]["exp_avg_sq"] = CodebookTensor.from_float(
        values.abs(), "8bit", signed=True
    )
    optimizer.load_state_dict(state_dict)


def test_negative_float8_codes_of_a_second_moment_are_refused():
    _, optimizer = trained(optim.AdamW, {}, state="float8")
    state_dict = contents(optimizer)
    state_dict["state"][0]["exp_avg_sq"].codes[3, 7] = 0xC0
    refused(optimizer, state_dict, r"layer\.0: exp_avg_sq .* below 0")


def test_signed_moments_may_be_negative_and_states_may_hold_nans():
    """A run that diverged resumes with its NaN, as in torch.optim."""
    params, optimizer = trained(optim.AdEMAMix, {}, state="bf16")
    state_dict = contents(optimizer)
    for name in ("exp_avg", "exp_avg_slow"):
        state_dict["state"][0][name].fill_(-1.0)
    state_dict["state"][0]["exp_avg_sq"][0, 0] = math.nan
    optimizer.load_state_dict(state_dict)
    assert optimizer.state[params[0]]["exp_avg_sq"][0, 0].isnan()


# ---- values without memory, and of other kinds ---------------------------------------------------------------


@every_class
@pytest.mark.parametrize("state", ["4bit", "fp32"])
def test_a_state_on_meta_is_refused(cls, options, state):
    if options.get("base_class") is torch.optim.AdamW:
        state = None
    _, optimizer = trained(cls, options, **({"state": state} if state else {}))
    for name in set(optimizer.state_dict()["state"][0]) - {"step"}:
        state_dict = contents(optimizer)
        state_dict["state"][0][name] = state_dict["state"][0][name].to("meta")
        refused(optimizer, state_dict, rf"layer\.0: {name} .* on the meta device")


@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_states_for_a_parameter_on_meta_are_refused(state):
    _, optimizer = trained(optim.AdamW, {}, state=state)
    empty = nn.Linear(130, 64, device="meta")
    other = optim.AdamW([("layer.0", empty.weight), ("layer.1", nn.Parameter(torch.ones(33)))])
    refused(other, contents(optimizer), r"layer\.0: .* is on the meta device")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool], ids=str)
def test_states_of_no_real_dtype_are_refused(dtype):
    _, optimizer = trained(optim.AdamW, {}, state="fp32")
    state_dict = contents(optimizer)
    state_dict["state"][0]["exp_avg"] = state_dict["state"][0]["exp_avg"].to(dtype)
    refused(optimizer, state_dict, r"layer\.0: exp_avg must be .* floating")


def test_a_correction_that_is_no_bytes_is_refused():
    param = nn.Parameter(torch.ones(64, 130, dtype=torch.bfloat16))
    optimizer = optim.AdamW([("layer.0", param)], weight_correction="8bit")
    set_grads([param], 0)
    optimizer.step()
    state_dict = contents(optimizer)
    state_dict["state"][0]["weight_correction"] = torch.full((64, 130), 200.5)
    refused(
        optimizer,
        state_dict,
        r"layer\.0: weight_correction must be of dtype torch.int8 or torch.uint8",
    )


@pytest.mark.parametrize("state", [None, [1.0], "text"], ids=repr)
def test_a_parameters_state_that_is_no_dict_is_refused(state):
    _, optimizer = trained(optim.AdamW, {})
    state_dict = contents(optimizer)
    state_dict["state"][1] = state
    refused(optimizer, state_dict, r"layer\.1: .* must be a dict")


def test_a_sharded_second_moment_is_refused(single_process_mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.ones(64, 130)
    param = nn.Parameter(distribute_tensor(whole, single_process_mesh, [Shard(0)]))
    optimizer = optim.AdamW([("layer.0", param)], state="fp32")
    param.grad = distribute_tensor(whole, single_process_mesh, [Shard(0)])
    optimizer.step()
    for broken in (distribute_tensor(-whole, single_process_mesh, [Shard(0)]), -whole):
        state_dict = dict(optimizer.state_dict())
        state_dict["state"] = {0: {**state_dict["state"][0], "exp_avg_sq": broken}}
        with pytest.raises(ValueError, match=r"layer\.0: exp_avg_sq .* below 0"):
            optimizer.load_state_dict(state_dict)


@pytest.fixture
def single_process_mesh(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_states_created_by_get_optimizer_state_dict_are_counts():
    model = nn.Linear(130, 64)
    optimizer = optim.AdamW8bit(model.parameters())
    state_dict = get_optimizer_state_dict(model, optimizer)
    assert {s["step"].dtype for s in state_dict["state"].values()} == {torch.float64}
