"""Muon in every format against its reference and torch's, its groups, checkpoints, and two processes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import _muon as torchs

from lowbit import optim
from lowbit.numerics.rounding import join_bf16
from lowbit.optim import CPUOffloadOptimizer, Muon, dequantize_state_dict, muon
from lowbit.optim.step.orthogonalize import orthogonalize
from lowbit.tensor import CodebookTensor
from lowbit.testing.launch import launch
from tests.optim.problems import FORMATS, is_beside, parameters, rand, relative, run, set_grads
from tests.optim.test_sharded import Model as ShardedModel
from tests.optim.test_sharded import full, same_state, shard
from tests.optim.test_sharded import train as train_sharded

every = pytest.mark.parametrize("state", FORMATS)
SHAPES = [(65, 96), (96, 65), (70, 70), (1, 5000), (5000, 1), (64, 7, 9, 3), (8, 8)]
OPTIONS = [
    {},
    {"nesterov": False, "weight_decay": 0.0, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw", "maximize": True},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "adjust_lr_fn": "original"},
]


def decoded(value):
    return value.dequantize() if isinstance(value, CodebookTensor) else value.float()


def momentum_of(optimizer, p):
    state = optimizer.state[p]
    return decoded(state["momentum_buffer"]) if state else torch.zeros_like(p)


@every
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_reference_from_the_decoded_momentum(state, options):
    params = parameters(*SHAPES)
    optimizer = Muon(params, lr=0.1, state=state, **options)
    for step in range(3):
        set_grads(params, step)
        expected = [(p.detach().clone(), momentum_of(optimizer, p).clone()) for p in params]
        for p, (weight, momentum) in zip(params, expected, strict=True):
            muon.reference(weight, p.grad, momentum, lr=0.1, **options)
        optimizer.step()
        for p, (weight, momentum) in zip(params, expected, strict=True):
            assert relative(p, weight) < 1e-5, p.shape
            stored = optimizer.state[p]["momentum_buffer"]
            if state == "4bit" and isinstance(stored, CodebookTensor):
                assert is_beside(stored, momentum).all()
            elif isinstance(stored, CodebookTensor):
                encoded = CodebookTensor.from_float(momentum, stored.format, signed=True)
                assert relative(stored.dequantize(), encoded.dequantize()) < 2e-2
                assert relative(stored.dequantize(), momentum) < 0.2
            else:
                assert relative(stored, momentum) < (
                    4e-3 if stored.dtype == torch.bfloat16 else 1e-6
                )
    assert isinstance(optimizer.state[params[0]]["momentum_buffer"], CodebookTensor) == (
        state not in ("bf16", "fp32")
    )


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torchs_in_float32(monkeypatch, adjust_lr_fn, nesterov):
    def in_float32(grad, coefficients, steps, eps):  # torch's is bfloat16 on the CPU too
        return orthogonalize(grad[None], coefficients, steps=steps, eps=eps)[0]

    monkeypatch.setattr(torchs, "_zeropower_via_newtonschulz", in_float32)
    options = {"lr": 0.05, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    params, others = parameters((65, 96), (96, 65)), parameters((65, 96), (96, 65))
    ours, theirs = Muon(params, state="fp32", **options), torch.optim.Muon(others, **options)
    run(ours, params, 3)
    run(theirs, others, 3)
    again = Muon(parameters((65, 96), (96, 65)), state="fp32")
    again.load_state_dict(theirs.state_dict())
    low = optim.Muon8bit(parameters((65, 96), (96, 65)))
    low.load_state_dict(theirs.state_dict())
    back = torch.optim.Muon(parameters((65, 96), (96, 65)))
    back.load_state_dict(dequantize_state_dict(low.state_dict()))
    for p, q in zip(params, others, strict=True):
        assert relative(p, q) < 1e-5
    pairs = zip(again.state.values(), back.state.values(), theirs.state.values(), strict=True)
    for ours_, back_, theirs_ in pairs:
        assert torch.equal(ours_["momentum_buffer"], theirs_["momentum_buffer"])
        assert relative(back_["momentum_buffer"], theirs_["momentum_buffer"]) < 0.02


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(50, 96)
        self.first = nn.Linear(96, 65)
        self.norm = nn.LayerNorm(65)
        self.second = nn.Linear(65, 96)
        self.third = nn.Linear(65, 96)
        for i, p in enumerate(self.parameters()):
            p.data = 0.1 * rand(*p.shape, seed=i) + (p.ndim == 1)
        self.to(dtype)

    def forward(self, tokens):
        hidden = self.norm(self.first(self.embed(tokens)))
        return (self.second(hidden) + self.third(hidden).sin()).float()


def groups(model):
    """The embedding goes to AdamW by an option, the rest by the number of dimensions."""
    rest = [p for name, p in model.named_parameters() if not name.startswith("embed")]
    return [{"params": rest}, {"params": model.embed.parameters(), "use_muon": False}]


def train(model, optimizer, steps, first=0, tokens=16):
    for step in range(first, first + steps):
        batch = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(batch) - rand(50, 96, seed=7)[batch]).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@every
def test_groups_and_their_adamw_part(state):
    """The groups for AdamW equal those of AdamW, bit for bit."""
    model, other = Model(), Model()
    optimizer = Muon(groups(model), lr=0.02, adamw_lr=0.01, adamw_eps=1e-6, state=state)
    assert [g["use_muon"] for g in optimizer.param_groups] == [True, False, False]
    assert [len(g["params"]) for g in optimizer.param_groups] == [3, 5, 1]
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.01, 0.01]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}
    twins = dict(zip(model.parameters(), other.parameters(), strict=True))
    order = [twins[p] for g in optimizer.param_groups for p in g["params"]]  # keys of random bits
    reference = optim.AdamW(order, state=state, **options)
    by_muon = {id(p) for p in optimizer.param_groups[0]["params"]}
    for step in range(3):
        set_grads([*model.parameters()], step)
        set_grads([*other.parameters()], step)
        optimizer.step()
        reference.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) == (id(p) not in by_muon)
        if id(p) not in by_muon:
            for key, value in reference.state[q].items():
                assert same_state(value, optimizer.state[p][key])


def test_options_of_a_group_that_is_split():
    matrix, vector = parameters((8, 8), (8,))
    group = {"params": [("a", matrix), ("b", vector)], "lr": 1.0, "adamw_lr": 2.0, "seed": 5}
    optimizer = Muon([group], adamw_betas=(0.5, 0.6), fused=False, lr=torch.tensor(0.1))
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"], second["betas"]) == (1.0, 2.0, (0.5, 0.6))
    assert first["seed"] == second["seed"] == 5
    assert first["param_names"] == ["a"] and second["param_names"] == ["b"]
    extra = parameters((4, 4))[0]
    optimizer.add_param_group({"params": [("c", extra)], "use_muon": False, "lr": 3.0})
    assert optimizer.param_groups[2]["lr"] == 3.0 and not optimizer.param_groups[2]["use_muon"]
    stacked_bias = {"params": [("up", matrix), ("experts.up_proj_bias", parameters((4, 8))[0])]}
    for cls in (Muon, optim.SOAP):  # the bias of experts has the shape of a matrix
        named = [g["param_names"] for g in cls([stacked_bias]).param_groups]
        assert named == [["up"], ["experts.up_proj_bias"]]
    asked = Muon(parameters((8, 8), (8,)), fused=True)
    assert [g["fused"] for g in asked.param_groups] == [True, True]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 1.0, 1.5]
    assert scheduler.get_last_lr() == [0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_muon": True}, r"use_muon=True takes matrices, got a parameter of shape \(8,\)"),
        ({"adamw_lr": -1.0}, "adamw_lr must be"),
    ],
    ids=str,
)
def test_bad_options_change_nothing(options, message):
    optimizer = Muon(parameters((8, 8)))
    bad = {"params": parameters((9, 9), (8,)), **options}
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=message):
        Muon([bad])


def test_an_unknown_option_is_refused_with_those_of_muon():
    with pytest.raises(TypeError, match=r"'betas'; accepted: lr, .*adamw_betas,") as raised:
        Muon(parameters((8, 8)), betas=(0.9, 0.99))
    assert " betas" not in str(raised.value).split("accepted")[1]


@every
@pytest.mark.usefixtures("steps")
def test_checkpoints_resume_bit_for_bit(state, tmp_path):
    model = Model(torch.bfloat16)
    options = {"lr": 0.02, "state": state, "bf16_stochastic_round": True}
    optimizer = Muon(groups(model), **options)
    train(model, optimizer, 2)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved")
    train(model, optimizer, 2, first=2)
    weights, states = torch.load(tmp_path / "saved", weights_only=True)
    again = Model(torch.bfloat16)
    again.load_state_dict(weights)
    resumed = Muon(groups(again), **{**options, "lr": 9.0})
    resumed.load_state_dict(states)
    train(again, resumed, 2, first=2)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


@every
def test_training_against_float32_momentum(state):
    """Rounding errors of codes are noise in every direction, which orthogonalization amplifies: 4 bits cost most."""

    def loss(format):
        model = Model()
        optimizer = Muon(groups(model), lr=0.02, adamw_lr=0.01, state=format)
        return train(model, optimizer, 60, tokens=128)

    expected = loss("fp32")
    assert expected < 0.05 * train(Model(), Muon(groups(Model()), lr=0.0, adamw_lr=0.0), 1)
    bound = {"4bit": 5.5, "8bit": 1.3, "float8": 1.7, "bf16": 1.05, "fp32": 1.0}[state]
    assert loss(state) <= bound * expected  # measured 4.5, 1.16, 1.5, 1.01


def test_bfloat16_weights():
    """Rounding to nearest loses small updates; stochastic rounding and the correction keep them."""

    def moved(dtype, **options):
        p = nn.Parameter(torch.ones(64, 80, dtype=dtype))
        optimizer = Muon([p], lr=0.02, weight_decay=0.0, state="fp32", **options)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach().float().mean().item() - 1

    exact = moved(torch.float32)
    assert exact < 0
    assert moved(torch.bfloat16) == 0
    assert moved(torch.bfloat16, bf16_stochastic_round=True) == pytest.approx(exact, rel=0.3)
    p = nn.Parameter(torch.ones(64, 80, dtype=torch.bfloat16))
    optimizer = Muon([p], lr=0.02, weight_decay=0.0, weight_correction="8bit")
    for _ in range(20):
        p.grad = torch.ones_like(p)
        optimizer.step()
    kept = join_bf16(p.detach(), optimizer.state[p]["weight_correction"])
    assert kept.mean().item() - 1 == pytest.approx(exact, rel=0.05)


def test_clipping_and_skipping():
    params, others = parameters((64, 80), (80,)), parameters((64, 80), (80,))
    inside = Muon(params, lr=0.1, max_grad_norm=0.5, skip_nonfinite=True, adamw_eps=0.1)
    outside = Muon(others, lr=0.1, adamw_eps=0.1)
    for step in range(3):
        set_grads(params, step)
        set_grads(others, step)
        params[0].grad *= 100.0**-step
        others[0].grad *= 100.0**-step
        nn.utils.clip_grad_norm_(others, 0.5)
        inside.step()
        outside.step()
    for p, q in zip(params, others, strict=True):
        assert relative(p, q) < 1e-4
    before = copy.deepcopy([*params, inside.state_dict()["state"]])
    params[1].grad[3] = float("nan")
    inside.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before[:2], strict=True))
    assert inside.state[params[0]]["step"] == before[2][0]["step"] == 3


def test_offloaded():
    model, other = Model(), Model()
    direct = optim.Muon8bit(groups(model), lr=0.02)
    offloaded = CPUOffloadOptimizer(groups(other), optim.Muon8bit, offload_gradients=True, lr=0.02)
    assert [g["use_muon"] for g in offloaded.param_groups] == [True, False, False]
    train(model, direct, 3)
    train(other, offloaded, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    direct.load_state_dict(offloaded.state_dict())


# ---- two processes ----------------------------------------------------------------------------------------------


def check_sharded(rank, world_size, folder):
    """FSDP2 with an odd number of rows, a rank without rows, and distributed checkpoints."""
    mesh = init_device_mesh("cpu", (world_size,))
    for state in FORMATS:
        whole, model = ShardedModel(), shard(ShardedModel(), mesh)
        options = {"state": state, "stacked": False}
        reference, optimizer = (Muon(m.parameters(), lr=0.02, **options) for m in (whole, model))
        train_sharded(whole, reference, 2)
        train_sharded(model, optimizer, 2)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q), state
            for key, expected in reference.state[q].items():
                assert same_state(full(optimizer.state[p][key]), expected), (state, key)
        if state not in ("4bit", "bf16"):
            continue
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=f"{folder}/{state}")
        fresh = shard(ShardedModel(), mesh)
        again = Muon(fresh.parameters(), lr=0.5, **options)
        loaded = get_optimizer_state_dict(fresh, again)
        dcp.load(loaded, checkpoint_id=f"{folder}/{state}")
        set_optimizer_state_dict(fresh, again, loaded)
        fresh.load_state_dict(model.state_dict())
        train_sharded(model, optimizer, 1, first=2)
        train_sharded(fresh, again, 1, first=2)
        for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor()), state
    return True


def check_columns(rank, world_size):
    """Split by columns, bfloat16 weights rounded stochastically."""
    mesh = init_device_mesh("cpu", (world_size,))
    for state in ("8bit", "fp32"):
        values = rand(65, 512).bfloat16()
        whole = nn.Parameter(values.clone())
        part = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(1)]))
        options = {"lr": 0.02, "state": state, "bf16_stochastic_round": True}
        reference, optimizer = Muon([whole], **options), Muon([part], **options)
        for step in range(2):
            whole.grad = rand(65, 512, seed=step + 1).bfloat16()
            part.grad = distribute_tensor(whole.grad, mesh, [Shard(step)])
            reference.step()
            optimizer.step()
        assert torch.equal(part.full_tensor(), whole), state
    return True


def test_two_processes(tmp_path):
    assert launch(check_sharded, 2, str(tmp_path)) == [True, True]
    assert launch(check_columns, 2) == [True, True]


def test_a_copy_takes_groups():
    optimizer = optim.Muon8bit([nn.Parameter(rand(64, 96))], adamw_lr=0.5)
    copied = copy.deepcopy(optimizer)
    copied.add_param_group({"params": [nn.Parameter(rand(10))]})
    assert copied.param_groups[1]["lr"] == 0.5
    assert len(optimizer.param_groups) == 1
