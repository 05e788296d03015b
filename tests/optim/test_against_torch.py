"""With float32 states, lowbit's optimizers equal those of torch.optim, arguments and behaviour included."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer
from lowbit.tensor import CodebookTensor
from tests.optim.algorithms import VARIANTS
from tests.optim.problems import parameters, rand, relative, run, set_grads

PAIRS = [("AdamW", torch.optim.AdamW, optim.AdamW), ("Adam", torch.optim.Adam, optim.Adam)]
pairs = pytest.mark.parametrize("theirs,ours", [p[1:] for p in PAIRS], ids=[p[0] for p in PAIRS])
SHAPES = [(40, 130), (7, 11), (129,), (), (3, 5, 64), (1, 1), (0, 5), (4, 8, 3, 3)]
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "no decay": {"weight_decay": 0},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.05},
    "betas": {"betas": (0.5, 0.9), "eps": 1e-3},
    "no momentum": {"betas": (0.0, 0.0)},
}


@pairs
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float32_states_follow_torch(theirs, ours, options):
    a, b = parameters(*SHAPES), parameters(*SHAPES)
    reference_optimizer = theirs(a, lr=0.01, **options)
    optimizer = ours(b, lr=0.01, state="fp32", **options)
    run(reference_optimizer, a, 50)
    run(optimizer, b, 50)
    for p, q, start in zip(a, b, parameters(*SHAPES), strict=True):
        assert p.numel() == 0 or relative(q, start) > 0.01
        assert relative(q, p) < 2e-6, tuple(p.shape)
        for name, value in reference_optimizer.state[p].items():
            assert relative(optimizer.state[q][name], value) < 2e-6, name


@pairs
def test_lr_as_a_tensor_and_changed_in_place(theirs, ours):
    a, b = parameters((40, 130)), parameters((40, 130))
    lr_a, lr_b = torch.tensor(0.01), torch.tensor([0.01])
    first, second = (
        theirs(a, lr=lr_a, weight_decay=0.1),
        ours(b, lr=lr_b, weight_decay=0.1, state="fp32"),
    )
    run(first, a, 3)
    run(second, b, 3)
    lr_a.mul_(0.1)
    lr_b.mul_(0.1)
    run(first, a, 3, first=3)
    run(second, b, 3, first=3)
    assert relative(b[0], a[0]) < 1e-6
    assert second.param_groups[0]["lr"] is lr_b


@pairs
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_lr_schedulers(theirs, ours, as_tensor):
    results = []
    for cls, extra in ((theirs, {}), (ours, {"state": "fp32"})):
        params = parameters((40, 130))
        optimizer = cls(params, lr=torch.tensor(0.02) if as_tensor else 0.02, **extra)
        schedulers = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
        ]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3])
        for step in range(8):
            set_grads(params, step)
            optimizer.step()
            scheduler.step()
        results.append((params[0], float(optimizer.param_groups[0]["lr"])))
    assert results[0][1] == pytest.approx(results[1][1])
    assert relative(results[1][0], results[0][0]) < 1e-6


def test_betas_as_tensors():
    a, b = parameters((40, 130)), parameters((40, 130))
    run(optim.AdamW(a, betas=(torch.tensor(0.5), torch.tensor([0.9])), state="fp32"), a, 3)
    run(optim.AdamW(b, betas=(0.5, 0.9), state="fp32"), b, 3)
    assert relative(a[0], b[0]) < 1e-6


@pairs
def test_takes_every_argument_of_torchs(theirs, ours):
    known = {*inspect.signature(ours).parameters, *optim.CommonOptions.__annotations__}
    asked = set(inspect.signature(theirs).parameters) - {"decoupled_weight_decay"}
    assert asked <= known
    ordered = list(inspect.signature(theirs).parameters)[:6]
    assert list(inspect.signature(ours).parameters)[:6] == ordered
    group = ours(parameters((4, 4))).param_groups[0]
    for name, parameter in inspect.signature(theirs).parameters.items():
        if name in asked - {"params"}:
            assert group[name] == parameter.default, name


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable"])
def test_implementation_flags_change_nothing(flag):
    a, b = parameters((40, 130)), parameters((40, 130))
    run(optim.AdamW(a, **{flag: True}), a, 3)
    run(optim.AdamW(b), b, 3)
    assert torch.equal(a[0], b[0])


# ---- groups and parameters ----------------------------------------------------------------------------------


def test_named_parameters_keep_their_names():
    model = nn.Linear(8, 4)
    optimizer = optim.AdamW4bit(model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    with pytest.raises(TypeError, match=r"parameter 'ids' of shape \(3,\) is torch\.int64"):
        ids = nn.Parameter(torch.arange(3), requires_grad=False)
        optim.AdamW4bit([("weight", model.weight), ("ids", ids)])


def test_generators_and_single_pass_iterables_are_parameters():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    assert len(optim.AdamW(model.parameters()).param_groups[0]["params"]) == 4
    assert len(optim.AdamW([{"params": model[0].parameters()}]).param_groups[0]["params"]) == 2


def test_without_gradient_or_frozen_means_untouched():
    used, unused, frozen = parameters((40, 130), (40, 130), (40, 130))
    frozen.requires_grad_(False)
    before = [p.detach().clone() for p in (unused, frozen)]
    optimizer = optim.AdamW8bit([used, unused, frozen], weight_decay=0.5)
    run(optimizer, [used], 3)
    assert torch.equal(unused, before[0]) and torch.equal(frozen, before[1])
    assert set(optimizer.state) == {used}


@pytest.mark.usefixtures("steps")
def test_zero_grad_and_closure():
    model = nn.Linear(64, 64)
    optimizer = optim.AdamW4bit(model.parameters(), lr=0.01)
    x = rand(16, 64)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(model.weight.grad, torch.zeros(64, 64))
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_step_hooks_run():
    params = parameters((40, 130))
    optimizer = optim.AdamW4bit(params)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(optimizer, params, 1)
    assert seen == ["before", "after"]


def test_grad_scaler_skips_an_overflowing_step():
    params = parameters((40, 130))
    optimizer = optim.AdamW4bit(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(params[0].sum()).backward()
    params[0].grad[0, 0] = float("inf")
    before = params[0].detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(params[0], before)


def test_the_step_counter_is_float64_whatever_the_default_dtype():
    params = parameters((40, 130))
    optimizer = optim.AdamW4bit(params)
    torch.set_default_dtype(torch.bfloat16)
    try:
        run(optimizer, params, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    step = optimizer.state[params[0]]["step"]
    assert step.dtype == torch.float64
    step.fill_(300)
    run(optimizer, params, 1)
    assert step.item() == 301


@pytest.mark.parametrize("cls", [optim.AdamW4bit, CPUOffloadOptimizer], ids=lambda c: c.__name__)
def test_a_compiled_training_step_runs_the_optimizer(cls):
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(130, 40)
        base = {"base_class": optim.AdamW4bit} if cls is CPUOffloadOptimizer else {}
        pairs.append((model, cls(model.parameters(), lr=0.01, **base)))
    x = torch.randn(4, 130)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        step(*pairs[0])
        compiled(*pairs[1])
    for p, q in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.usefixtures("steps")
def test_amsgrad_may_be_turned_on_and_off():
    a, b = parameters((40, 130), (13,)), parameters((40, 130), (13,))
    full, ours = optim.AdamW(a, lr=0.01, state="fp32"), optim.AdamW4bit(b, lr=0.01)
    for step, amsgrad in enumerate((False, True, True, False)):
        for optimizer, params in ((full, a), (ours, b)):
            optimizer.param_groups[0]["amsgrad"] = amsgrad
            run(optimizer, params, 1, first=step)
    largest = full.state[a[0]]["max_exp_avg_sq"]
    assert torch.all(largest > 0) and isinstance(ours.state[b[0]]["max_exp_avg_sq"], CodebookTensor)
    other = optim.AdamW8bit(b)
    other.load_state_dict(ours.state_dict())
    assert "max_exp_avg_sq" not in other.state[b[0]]


# ---- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("cls", [own for own, *_ in VARIANTS.values()], ids=lambda c: c.__name__)
def test_a_copy_continues_bit_for_bit(cls, how, request):
    if cls not in (optim.AdamW8bit, optim.AdamW4bit):  # kernels take the tensors of the copy
        request.getfixturevalue("operations")
    params = parameters((40, 130), (13,))
    optimizer = cls(params, lr=0.01)
    run(optimizer, params, 3)
    other = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    copies = [p for group in other.param_groups for p in group["params"]]
    run(optimizer, params, 3, first=3)
    run(other, copies, 3, first=3)
    assert type(other) is cls
    for p, q in zip(params, copies, strict=True):
        assert p is not q and torch.equal(p, q)
