"""`weight_correction="momentum"`: what rounding takes from a weight moves it later, by the momentum."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import lowbit
from lowbit import Int4Weight, Int4WeightTensor, Int8Weight, Int8WeightTensor, optim
from lowbit.numerics.rounding import join_bf16
from lowbit.optim import adam, ademamix, sgd
from lowbit.optim.state.state import correction_units
from lowbit.optim.step import job
from lowbit.testing.launch import launch
from tests.optim.counted import launched
from tests.optim.problems import rand, relative, run, saved
from tests.optim.test_rounded import check_alike, check_codes, inner, masters, same, step_all

ALGORITHMS = {
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True}),
    "SGD": (optim.SGD, {"momentum": 0.9}),
    "SGD Nesterov": (optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "AdEMAMix": (optim.AdEMAMix, {}),
}
algorithms = pytest.mark.parametrize("cls,options", ALGORITHMS.values(), ids=ALGORITHMS)
KINDS = ["bf16", "int8", "int4"]


def weights(kind, device="cpu", shapes=((33, 300), (9, 31))):
    made = []
    for i, shape in enumerate(shapes):
        values = rand(*shape, seed=i) / 10
        if kind == "int8":
            values = Int8WeightTensor(values, Int8Weight(), f"{i}")
        elif kind == "int4":
            values = Int4WeightTensor(values, Int4Weight(), f"{i}")
        else:
            values = values.bfloat16()
        made.append(nn.Parameter(values.to(device)))
    return made


def compensated(cls, params, **options):
    return cls(params, weight_correction="momentum", **options)


def value(param):
    own = param.detach()
    return own.master() if isinstance(own, Int8WeightTensor) else own.float()


# ---- the formula -----------------------------------------------------------------------------------------------


def descend(module, options, errors=(), only_update=None, returned=True):
    """A weight in float64 after 600 steps along one gradient. The first steps lose `errors`, which the momentum takes
    if `returned`."""
    weight, grad = rand(20).double(), rand(20, seed=1).double()
    names = {sgd: ["momentum_buffer"], adam: ["exp_avg", "exp_avg_sq"]}
    names[ademamix] = ["exp_avg", "exp_avg_slow", "exp_avg_sq"]
    states = {name: torch.zeros(20, dtype=torch.float64) for name in names[module]}
    if "exp_avg_sq" in states:
        states["exp_avg_sq"] = (
            grad.square()
        )  # stays as it is, so that the step is linear in the momentum
    for i in range(600):
        step = torch.tensor(10_000.0 + i, dtype=torch.float64)  # no moment is young
        module.reference(weight, grad, **states, step=step, **options, **(only_update or {}))
        if i < len(errors):
            weight -= errors[i]
            if returned:
                timed = {} if module is sgd else {"step": step}
                module.compensate(errors[i], **states, **timed, least_lr=0.0, **options)
    return weight


ADAM = {"betas": (0.9, 0.99), "eps": 1e-8, "lr": 1e-3, "weight_decay": 3.0}
FORMULAS = {
    "AdamW": (adam, ADAM, {}),
    "Adam": (adam, {**ADAM, "weight_decay": 0.0, "decoupled_weight_decay": False}, {}),
    "SGD": (sgd, {"lr": 1e-2, "momentum": 0.9}, {}),
    "SGD Nesterov": (sgd, {"lr": 1e-2, "momentum": 0.8, "nesterov": True}, {}),
    "AdEMAMix": (
        ademamix, {**ADAM, "betas": (0.9, 0.99, 0.999)}, {"alpha": 2.0, "t_alpha_beta3": None}
    ),
}  # fmt: skip


@pytest.mark.parametrize("module,options,others", FORMULAS.values(), ids=FORMULAS)
def test_what_was_lost_comes_back_exactly(module, options, others):
    """Along a fixed gradient the weight ends where it would have ended without rounding, also with weight decay."""
    errors = [1e-3 * rand(20, seed=i).double() for i in (5, 6)]
    exact = descend(module, options, only_update=others)
    lossy = descend(module, options, errors, others, returned=False)
    assert relative(lossy, exact) > 1e-5
    assert relative(descend(module, options, errors, others), exact) < 1e-11


# ---- the step --------------------------------------------------------------------------------------------------


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    "name,kind",
    [
        *(("AdamW", "bf16"), ("Adam amsgrad", "bf16")),
        *(("SGD Nesterov", "int8"), ("AdEMAMix", "int4")),
    ],
)
def test_the_kernel_does_what_pytorch_does(device, name, kind, monkeypatch):
    cls, options = ALGORITHMS[name]
    monkeypatch.setattr(job, "PIECE_CPU", 7000)  # the larger weight takes two pieces
    made = []
    for fused in (True, False):
        params = weights(kind, device)
        make = functools.partial(compensated, cls, params, lr=1e-3, state="fp32", **options)
        made.append((params, make(fused=fused)))
    step_all(made, 3)
    assert launched() >= 3
    if kind.startswith("int"):
        check_codes(made)
        check_alike(masters(made), 1e-3, 1e-5)
    else:
        for p, q in zip(*(params for params, _ in made), strict=True):
            assert (p != q).float().mean() < 2e-3
            for name, expected in made[1][1].state[q].items():
                # where a weight takes the other neighbour, its whole distance goes into the momentum
                assert relative(made[0][1].state[p][name], expected) < 2e-2, name


def test_moments_in_few_bits(device, state="8bit"):
    made = []
    for fused in (True, False):
        params = weights("int8", device, [(33, 300)])
        optimizer = compensated(optim.AdamW, params, lr=1e-2, state=state, fused=fused)
        made.append((params, optimizer))
    step_all(made, 2)
    assert launched() == 4, "two parts of each of two steps"
    check_codes(made)
    check_alike(masters(made), 1e-3, 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_far_below_the_last_bit_add_up(kind):
    """On average over elements: 300 steps, each of a fiftieth of the distance to the next number."""
    start = torch.ones(64, 64)
    start[:, ::32] = {"int8": 1.27, "int4": 7.0}.get(kind, 1.0)  # scales of 0.01 and 1
    if kind == "int8":
        p, lr = nn.Parameter(Int8WeightTensor(start, Int8Weight(), "w")), 0.01 / 50
    elif kind == "int4":
        p, lr = nn.Parameter(Int4WeightTensor(start, Int4Weight(), "w")), 1 / 50
    else:
        p, lr = nn.Parameter(start.bfloat16()), 2**-8 / 50
    optimizer = compensated(optim.AdamW, [p], lr=lr, weight_decay=0.0, state="8bit", fused=False)
    before = value(p).clone()
    for _ in range(300):
        p.grad = torch.ones(64, 64).to(p.dtype)
        p.grad[:, ::32] = 0.0  # the scales stay
        optimizer.step()
    moved = (before - value(p)).unflatten(1, (2, 32))[..., 1:]
    # Rounded to nearest, the weight would be 5 distances behind.
    assert abs(300 * lr - moved.mean().item()) < 0.3 * 50 * lr


@algorithms
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0), 1e-40], ids=["zero", "tensor", "tiny"])
def test_a_rate_of_zero_changes_nothing(cls, options, kind, rate):
    """As in a warm-up, or when torch creates the states."""
    for fused in (True, False) if cls is optim.AdamW else (False,):
        params = weights(kind)
        optimizer = compensated(cls, params, lr=rate, fused=fused, state="fp32", **options)
        plain = weights(kind)
        other = cls(plain, lr=rate, fused=fused, state="fp32", **options)
        before = [value(p).clone() for p in params]
        run(optimizer, params, 2)
        run(other, plain, 2)
        for p, q, old in zip(params, plain, before, strict=True):
            assert torch.equal(value(p), old)
            for name, expected in other.state[q].items():
                assert torch.equal(optimizer.state[p][name], expected), name


def test_a_weight_that_is_not_finite_does_not_reach_its_neighbours(device):
    (p,) = weights("bf16", device, [(64, 256)])
    optimizer = compensated(optim.AdamW, [p], state="fp32", fused=True)
    p.grad = rand(64, 256).to(p)
    p.grad[3, 4] = float("nan")
    with torch.no_grad():
        p[5, 6] = 3.3e38
    optimizer.step()
    bad = ~optimizer.state[p]["exp_avg"].isfinite()
    assert bad.nonzero().tolist() == [[3, 4]]


@pytest.mark.usefixtures("steps")
def test_float32_weights_are_left_alone():
    mine, theirs = ([nn.Parameter(rand(64, 100))] for _ in range(2))
    run(optim.AdamW8bit(mine, weight_correction="momentum"), mine, 3)
    run(optim.AdamW8bit(theirs), theirs, 3)
    assert torch.equal(mine[0], theirs[0])


# ---- rates that fall and rise ---------------------------------------------------------------------------------


def fitted(kind, choice, rate_at, first=3e-3):
    """The losses of a small network whose first layer has low-bit weights, with the rates `rate_at(step)`."""
    torch.manual_seed(0)
    target, model = (
        nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)
    )
    if kind == "bf16":
        model.bfloat16()
    else:
        lowbit.train.prepare_(model, Int8Weight() if kind == "int8" else Int4Weight())
    optimizer = optim.AdamW8bit(model.parameters(), lr=first, weight_correction=choice)
    losses = []
    for step in range(240):
        optimizer.param_groups[0]["lr"] = rate_at(step)
        x = rand(64, 64, seed=step)
        loss = (model(x.to(model[0].bias.dtype)).float() - target(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("kind, first", [*((kind, 3e-3) for kind in KINDS), ("int4", 0.0)])
def test_a_warm_restart_does_no_harm(kind, first):
    """A rate that falls to nearly 0 and jumps back, as under torch's CosineAnnealingWarmRestarts, or set by hand."""

    def rate_at(step):
        return 3e-3 * (1 + math.cos(math.pi * (step % 120) / 120)) / 2

    into_momentum, lost = fitted(kind, "momentum", rate_at, first), fitted(kind, False, rate_at)
    assert into_momentum[120:150].max() < 1.1 * lost[120:150].max()
    assert into_momentum[-20:].mean() < 1.02 * lost[-20:].mean()


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize("rate", [2e-5, torch.tensor(2e-5)], ids=["float", "tensor"])
def test_at_a_low_rate_the_kernel_does_what_pytorch_does(device, kind, rate):
    made = []
    for fused in (True, False):
        params = weights(kind, device)
        optimizer = compensated(optim.AdamW, params, lr=1e-2, state="fp32", fused=fused)
        optimizer.param_groups[0]["lr"] = rate
        made.append((params, optimizer))
    step_all(made, 2)
    for p, q in zip(*(params for params, _ in made), strict=True):
        found, expected = (o.state[w]["exp_avg"] for (_, o), w in zip(made, (p, q), strict=True))
        assert relative(found, expected) < 2e-2


@algorithms
def test_a_share_of_an_error_at_a_low_rate(cls, options):
    """At a hundredth of the first rate a tenth of the error goes into the momentum."""
    injected = []
    for first in (1e-5, 1e-3):
        params = weights("bf16")
        optimizer = compensated(cls, params, lr=first, state="fp32", fused=False, **options)
        optimizer.param_groups[0]["lr"] = 1e-5
        plain = weights("bf16")
        other = cls(
            plain, lr=1e-5, state="fp32", fused=False, bf16_stochastic_round=True, **options
        )
        run(optimizer, params, 1)
        run(other, plain, 1)
        name = "momentum_buffer" if cls is optim.SGD else "exp_avg"
        injected.append(optimizer.state[params[0]][name] - other.state[plain[0]][name])
    assert relative(injected[1], 0.1 * injected[0]) < 1e-3


def test_the_largest_rate_of_a_group(device):
    def added(lr):
        return {"params": weights("bf16", device), "lr": lr}

    lr = torch.tensor(2e-3, device=device)
    optimizer = compensated(optim.AdamW8bit, [added(1e-2), added(lr), added(0.0)])
    optimizer.param_groups[0]["lr"] = 1e-5
    optimizer.param_groups[2]["lr"] = 0.5
    for made in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        found = [made.least_rate(group) for group in made.param_groups]
        assert found == pytest.approx([1e-3, 2e-4, 0.05])
    optimizer.param_groups[2]["lr"] = 1e-5
    other = compensated(optim.AdamW8bit, [added(1e-4), added(1e-4), added(1e-4)])
    other.load_state_dict(optimizer.state_dict())
    found = [other.least_rate(group) for group in other.param_groups]
    assert found == pytest.approx([1e-3, 2e-4, 0.05])
    later = compensated(optim.AdamW8bit, [added(lr.fill_(0.3))])
    assert later.least_rate(later.param_groups[0]) == pytest.approx(0.03)


def test_a_group_that_was_set_by_hand():
    params = weights("bf16")
    optimizer = compensated(optim.AdamW8bit, params, lr=1e-3)
    del optimizer.param_groups[0]["largest_lr"]
    run(optimizer, params, 1)
    assert optimizer.param_groups[0]["largest_lr"] == 1e-3


def test_a_rate_on_a_cpu_is_read_at_each_step():
    lr = torch.tensor(2e-3)
    optimizer = compensated(optim.AdamW8bit, weights("bf16"), lr=lr)
    lr.fill_(0.5)
    (group,) = optimizer.param_groups
    assert optimizer.least_rate(group) == pytest.approx(0.05)


def test_a_group_keeps_its_rules():
    """A step looks for kernels by them."""
    optimizer = compensated(optim.AdamW8bit, weights("bf16", "cpu"))
    (group,) = optimizer.param_groups
    for returns_errors in (False, True):
        rule = optimizer.kernel_rule(group, returns_errors)
        assert optimizer.kernel_rule(group, returns_errors) is rule


# ---- the default ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(
    "cls,kind,options,returned",
    [
        (optim.AdamW8bit, "int4", {}, True),
        (optim.AdamW, "int4", {"weight_correction": "16bit"}, True),
        (optim.SGD8bit, "int4", {"momentum": 0.9}, True),
        (optim.AdamW8bit, "int4", {"weight_correction": False}, False),
        (optim.AdamW4bit, "int4", {}, False),
        (optim.AdamW8bit, "int8", {}, False),
        (optim.AdamW8bit, "bf16", {}, False),
    ],
)
def test_int4_weights_keep_their_errors_by_default(fused, cls, kind, options, returned):
    """The choice shows in the momentum."""
    found = []
    for choice in (options.get("weight_correction"), "momentum", False):
        params = [*weights(kind), nn.Parameter(rand(40, 70))]
        made = {**options, "weight_correction": choice}
        optimizer = cls(params, lr=1e-2, fused=fused, **made)
        run(optimizer, params, 2)
        name = "momentum_buffer" if cls is optim.SGD8bit else "exp_avg"
        found.append([optimizer.state[p][name] for p in params[:2]])
    as_chosen, into_momentum, lost = (
        torch.cat([m.dequantize().ravel() if hasattr(m, "dequantize") else m.ravel() for m in each])
        for each in found
    )
    assert not torch.equal(into_momentum, lost)
    assert torch.equal(as_chosen, into_momentum if returned else lost)


@pytest.mark.parametrize("cls", [optim.SGD8bit, optim.Lion8bit])
@pytest.mark.usefixtures("steps")
def test_without_a_momentum_int4_weights_lose_them(cls):
    mine, theirs = weights("int4"), weights("int4")
    run(cls(mine, lr=1e-2), mine, 2)
    run(cls(theirs, lr=1e-2, weight_correction=False), theirs, 2)
    assert same(inner(mine), inner(theirs))
    assert not same(inner(mine), inner(weights("int4")))


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls,options,named",
    [
        (optim.SGD, {}, "momentum=0.0"),
        (optim.SGD, {"momentum": 1.0}, "momentum=1.0"),
        (optim.Lion, {}, "betas="),
        (optim.AdEMAMix, {"betas": (0.0, 0.9, 0.99)}, r"betas=\(0.0, 0.9, 0.99\)"),
        (optim.Muon, {}, "use_muon=True"),
    ],
)
def test_optimizers_without_a_momentum_that_could_take_it(cls, options, named):
    group = {"params": [nn.Parameter(rand(64, 64).bfloat16())]}
    if cls is optim.Muon:
        group["use_muon"] = True
    told = f"none that moves a weight by its size, with .*{named}.*'16bit'"
    with pytest.raises(ValueError, match=told):
        cls([group], weight_correction="momentum", **options)


@pytest.mark.usefixtures("steps")
def test_muons_other_groups_take_it():
    p = nn.Parameter(rand(64, 64).bfloat16())
    group = {"params": [p], "use_muon": False, "weight_correction": "momentum"}
    run(optim.Muon([group]), [p], 2)


# ---- resume and shards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("steps")
def test_resumed_bit_for_bit(kind):
    params = weights(kind)
    optimizer = compensated(optim.AdamW4bit, params, lr=1e-2)
    run(optimizer, params, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    other = compensated(optim.AdamW4bit, copies)
    other.load_state_dict(saved(optimizer.state_dict()))
    run(optimizer, params, 3, first=3)
    run(other, copies, 3, first=3)
    if kind.startswith("int"):
        assert same(inner(params), inner(copies))
    else:
        assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))


IN_MOMENTUM = functools.partial(optim.AdamW8bit, weight_correction="momentum")
TURBO = {"ns_scaling": "gram", "ns_steps": 4, "row_beta2": 0.95, "bf16_stochastic_round": True}
RESHARDED = {
    "16bit": (None, functools.partial(optim.AdamW4bit, weight_correction="16bit")),
    "momentum": (None, IN_MOMENTUM),
    "int8 weights": (Int8Weight(), IN_MOMENTUM),
    "int4 weights": (Int4Weight(), IN_MOMENTUM),
    "Muon8bit": (None, functools.partial(optim.Muon8bit, **TURBO)),
    "Muon4bit": (None, functools.partial(optim.Muon4bit, **TURBO)),
}


class Model(nn.Module):
    def __init__(self, mesh, scheme):
        super().__init__()
        self.first = nn.Linear(512, 33, bias=False, dtype=torch.bfloat16)
        self.gate = nn.Linear(4100, 1, bias=False, dtype=torch.bfloat16)
        for i, p in enumerate(self.parameters()):
            p.data = (0.1 * rand(*p.shape, seed=i)).bfloat16()
        if scheme is not None:
            lowbit.train.prepare_(self, scheme)
        fully_shard(self, mesh=mesh)


def advance(model, optimizer, mesh, steps, first):
    for step in range(first, first + steps):
        for i, p in enumerate(model.parameters()):
            grad = rand(*p.shape, seed=100 * step + i).bfloat16()
            p.grad = distribute_tensor(grad, mesh, p.placements)
        optimizer.step()


def whole_weights(name, model, optimizer):
    """Codes and scales of low-bit weights, the exact values of those with a correction of 16 bits."""
    found = {}
    for i, p in enumerate(model.parameters()):
        whole = p.full_tensor().detach()
        kept = optimizer.state[p].get("weight_correction")
        if isinstance(whole, Int8WeightTensor):
            found |= {f"{name} {i} {key}": t for key, t in whole.inner_tensors().items()}
        elif kept is not None:
            found[f"{name} {i}"] = join_bf16(whole, correction_units(kept.full_tensor()))
        else:
            found[f"{name} {i}"] = whole
    return found


def check_reshard(rank, world_size, folder, source, target, first):
    """Load `source` if there is one, take two steps, save `target`. Returns `whole_weights`."""
    mesh = init_device_mesh("cpu", (world_size,))
    result = {}
    for name, (scheme, make) in RESHARDED.items():
        model = Model(mesh, scheme)
        optimizer = make(model.parameters(), lr=1e-3)
        if source is not None:
            held = {
                "model": model.state_dict(),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(held, checkpoint_id=f"{folder}/{name}-{source}")
            model.load_state_dict(held["model"])
            set_optimizer_state_dict(model, optimizer, held["optimizer"])
        advance(model, optimizer, mesh, 2, first)
        held = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(held, checkpoint_id=f"{folder}/{name}-{target}")
        result |= whole_weights(name, model, optimizer)
    return result


def check_straight(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    result = {}
    for name, (scheme, make) in RESHARDED.items():
        model = Model(mesh, scheme)
        optimizer = make(model.parameters(), lr=1e-3)
        advance(model, optimizer, mesh, 6, 0)
        result |= whole_weights(name, model, optimizer)
    return result


def test_two_processes_then_one_then_two(tmp_path):
    """FSDP2 with 2, 1 and 2 processes, through files of torch.distributed.checkpoint: as one process without a stop."""
    folder = str(tmp_path)
    launch(check_reshard, 2, folder, None, "a", 0)
    launch(check_reshard, 1, folder, "a", "b", 2)
    found = launch(check_reshard, 2, folder, "b", "c", 4)[0]
    expected = launch(check_straight, 1)[0]
    assert found.keys() == expected.keys()
    for name, due in expected.items():
        assert torch.equal(found[name], due), name
