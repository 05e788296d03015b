"""Random bits, corrections and the gradients' norm do not depend on how parameters are sharded.

The steps are PyTorch operations. `test_fused_sharded` has the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lowbit import optim
from lowbit.optim.state import state as states
from lowbit.testing.launch import launch
from tests.optim.problems import rand, relative

WEIGHTS = [
    {"bf16_stochastic_round": True, "seed": 5},
    {"weight_correction": "8bit"},
    {"weight_correction": "16bit"},
    {"weight_correction": "momentum", "bf16_stochastic_round": True},
]


def bf16(*shape, seed=0):
    return rand(*shape, seed=seed).bfloat16()


def full(value):
    value = states.dequantized(value)
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(mesh, shapes, placements, state, options, steps=2):
    """The same steps on sharded and on whole parameters, bit for bit."""
    values = [bf16(*shape, seed=i) for i, shape in enumerate(shapes)]
    whole = [nn.Parameter(v.clone()) for v in values]
    parts = [
        nn.Parameter(distribute_tensor(v.clone(), mesh, p))
        for v, p in zip(values, placements, strict=True)
    ]
    options = {"fused": False, **options}
    optimizers = [optim.AdamW(ps, lr=0.01, state=state, **options) for ps in (whole, parts)]
    for step in range(steps):
        for i, (p, q) in enumerate(zip(whole, parts, strict=True)):
            p.grad = bf16(*p.shape, seed=100 * step + i)
            q.grad = distribute_tensor(p.grad, mesh, q.placements)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(whole, parts, strict=True):
        assert torch.equal(full(q), p), (state, options, tuple(p.shape))
        for name, value in optimizers[0].state[p].items():
            assert torch.equal(full(optimizers[1].state[q][name]), full(value)), (state, name)


def check_rows(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for options in WEIGHTS:
        for state in ("4bit", "bf16"):
            shapes = [(33, 512), (3, 40, 40), (1, 5000), (13,)]
            compare(mesh, shapes, [[Shard(0)]] * 4, state, options)
    compare(mesh, [(1601, 1280)], [[Shard(0)]], "8bit", WEIGHTS[0], steps=1)
    return True


def check_columns(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for options in WEIGHTS:
        for state in ("4bit", "8bit", "bf16", "fp32"):  # blocks of 256 divide the column shards
            shapes, placements = [(64, 512)], [[Shard(1)]]
            if state in ("bf16", "fp32"):
                # rank 1 has nothing of the last one
                shapes += [(7, 3, 64, 128), (64, 64), (5000, 1)]
                placements += [[Shard(2)], [Replicate()], [Shard(1)]]
            compare(mesh, shapes, placements, state, options)
    return True


def check_indices(rank, world_size):
    """Base and runs give every element the index that sharding a tensor of indices gives."""
    flat, square = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (world_size, 1))
    for mesh, placements in (
        (flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Shard(2)]), (flat, [Replicate()]),
        (square, [Shard(0), Shard(1)]), (square, [Shard(2), Shard(0)]),
    ):  # fmt: skip
        check_index_of_each(mesh, placements)
    return True


def check_index_of_each(mesh, placements):
    indices = distribute_tensor(torch.arange(5 * 7 * 9).view(5, 7, 9), mesh, placements)
    index, runs = states.global_index(indices)
    i = torch.arange(indices.to_local().numel())
    for run, stride in runs:
        index, i = index + i // run * stride, i % run
    assert torch.equal(index + i, indices.to_local().flatten()), placements


def check_two_inner_dimensions(rank, world_size):
    """No kernel takes a parameter that is sharded in two dimensions besides the first. PyTorch operations do."""
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(1), Shard(2)], [Shard(2), Shard(1)], [Shard(0), Shard(2)]):
        check_index_of_each(mesh, placements)
    inner = [Shard(1), Shard(2)]
    for state in ("4bit", "bf16"):
        compare(mesh, [(5, 4, 512)], [inner], state, {"seed": 3})
        param = nn.Parameter(distribute_tensor(rand(5, 4, 512), mesh, inner))
        param.grad = distribute_tensor(rand(5, 4, 512), mesh, inner)
        optim.AdamW([param], state=state).step()
        with pytest.raises(RuntimeError, match="sharded in two dimensions besides the first"):
            optim.AdamW([param], state=state, fused=True).step()
    optim.AdamW([param], state="8bit").step()
    return True


def check_norm(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    values = [rand(33, 100), rand(64, 100, seed=1), rand(40, 100, seed=2)]
    placements = [Shard(0), Shard(1), None]
    options = {"lr": 0.1, "betas": (0.0, 0.0), "eps": 1.0, "state": "fp32", "max_grad_norm": 0.5}
    parts = []
    for v, p in zip(values, placements, strict=True):
        parts.append(nn.Parameter(v.clone() if p is None else distribute_tensor(v, mesh, [p])))
    whole = [nn.Parameter(v.clone()) for v in values]
    optimizers = [optim.AdamW(ps, **options, skip_nonfinite=True) for ps in (whole, parts)]
    for step in range(2):
        for i, (p, q) in enumerate(zip(whole, parts, strict=True)):
            p.grad = rand(*p.shape, seed=100 * step + i)
            grad = p.grad.clone()
            q.grad = distribute_tensor(grad, mesh, q.placements) if isinstance(q, DTensor) else grad
        for optimizer in optimizers:
            optimizer.step()
    for p, q, start in zip(whole, parts, values, strict=True):
        assert relative(full(q) - start, p - start) < 1e-6
    before = [full(q).clone() for q in parts]
    if rank == 1:
        parts[0].grad.to_local()[0, 0] = math.nan
    optimizers[1].step()
    assert all(torch.equal(full(q), b) for q, b in zip(parts, before, strict=True))
    assert all(optimizers[1].state[q]["step"].item() == 2 for q in parts)
    return True


@pytest.mark.parametrize(
    "check",
    [check_rows, check_columns, check_indices, check_norm],
    ids=lambda f: f.__name__.removeprefix("check_"),
)
def test_two_processes(check):
    assert launch(check, 2) == [True, True]


def test_four_processes():
    assert launch(check_two_inner_dimensions, 4) == [True] * 4


@pytest.mark.parametrize("state", ["4bit", "8bit"])
@pytest.mark.parametrize("options", WEIGHTS, ids=["rounded", "corrected", "exact", "momentum"])
def test_four_shards_in_turn(options, state, monkeypatch):
    """Four ranks with 161 rows: 41, 41, 41 and 38."""
    values, grads = bf16(161, 320), [bf16(161, 320, seed=i + 1) for i in range(2)]

    def trained(rows):
        p = nn.Parameter(values[rows].clone())
        optimizer = optim.AdamW([p], lr=0.01, state=state, fused=False, **options)
        for grad in grads:
            p.grad = grad[rows]
            optimizer.step()
        return p.detach()

    whole = trained(slice(None))
    parts = []
    for start in range(0, 161, 41):
        monkeypatch.setattr(states, "global_index", lambda _, base=start * 320: (base, ()))
        parts.append(trained(slice(start, start + 41)))
    assert torch.equal(torch.cat(parts), whole)
