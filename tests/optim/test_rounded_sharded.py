"""The compiled step of sharded int8 weights: the same bits as for whole ones, however uneven the shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lowbit import Int4Weight, Int8Weight, Int8WeightTensor, optim, train
from lowbit.optim.state import state as states
from lowbit.optim.step import job
from lowbit.tensor.core.dtensor import local as to_local
from lowbit.testing.launch import launch
from tests.kernels.compiled_on_cpu import COMPILER
from tests.optim.counted import LAUNCHES
from tests.optim.problems import rand
from tests.optim.test_fused_sharded import HOW

pytestmark = pytest.mark.skipif(not COMPILER, reason="no g++")

SHAPES = [(9, 512), (15, 320), (1, 4096)]  # one of two ranks has nothing of the last
OPTIONS = {
    "8bit": {"state": "8bit"},
    "bf16": {"state": "bf16", "skip_nonfinite": True},
    "4bit, compensated": {"state": "4bit", "weight_correction": "momentum"},
    "int4": {"state": "8bit", "weight_correction": "momentum"},
}


def model(dtype=torch.bfloat16, scheme=None):
    layers = [nn.Linear(k, n, bias=False, dtype=dtype) for n, k in SHAPES]
    made = nn.Sequential(*layers)
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(rand(*p.shape, seed=i))
    train.prepare_(made, scheme or Int8Weight())
    return made


def trained(params, distribute, options):
    optimizer = optim.AdamW(params, lr=1e-2, fused=True, **options)
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = distribute(rand(*p.shape, seed=10 * step + i).to(p.dtype))
        optimizer.step()
    return optimizer


def check_alike(whole, parts, reference, own, name):
    for p, q in zip(whole, parts, strict=True):
        expected, found = p.detach(), q.full_tensor().detach()
        for part in ("codes", "scale"):
            assert torch.equal(getattr(found, part), getattr(expected, part)), (name, part, p.shape)
        for key, value in reference.state[p].items():
            state = own.state[q][key]
            if key != "step":
                assert to_local(state).shape == q.to_local().shape, (name, key)
                state = state.full_tensor()
            assert torch.equal(state, value), (name, key, p.shape)


def check_rows(rank, world_size, how):
    mesh = init_device_mesh("cpu", (world_size,))
    for name in OPTIONS if how == "cpu" else ("8bit",):
        options = OPTIONS[name]
        with pytest.MonkeyPatch.context() as patch:
            HOW[how](patch)
            patch.setattr(job, "PIECE_CPU", 1500)
            LAUNCHES.clear()
            scheme = Int4Weight() if name == "int4" else Int8Weight()
            whole = list(model(scheme=scheme).parameters())
            reference = trained(whole, lambda t: t, options)
            sharded = fully_shard(model(scheme=scheme), mesh=mesh)
            parts = list(sharded.parameters())
            own = trained(parts, lambda t: distribute_tensor(t, mesh, [Shard(0)]), options)
            assert LAUNCHES
        check_alike(whole, parts, reference, own, name)
    assert 0 in {to_local(p).numel() for p in parts} or rank == 0
    return True


def check_experts_sharded_within(rank, world_size, how):
    """Shards of columns consist of runs, in which the random bits of bf16 states follow each other."""
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.MonkeyPatch.context() as patch:
        HOW[how](patch)
        patch.setattr(job, "PIECE_CPU", 1000)
        weight = Int8WeightTensor(rand(6, 10, 128), Int8Weight(), "w")
        whole = [nn.Parameter(weight.clone())]
        reference = trained(whole, lambda t: t, {"state": "bf16"})
        local = weight[:, 5 * rank : 5 * rank + 5]._map(torch.Tensor.contiguous)
        part = states.like_param(distribute_tensor(rand(6, 10, 128), mesh, [Shard(1)]), local)
        parts = [nn.Parameter(part)]
        LAUNCHES.clear()
        own = trained(parts, lambda t: distribute_tensor(t, mesh, [Shard(1)]), {"state": "bf16"})
        assert len(LAUNCHES) > 6
    mine = slice(5 * rank, 5 * rank + 5)
    found, expected = parts[0].to_local().detach(), whole[0].detach()
    assert torch.equal(found.codes, expected.codes[:, mine])
    for key in ("exp_avg", "exp_avg_sq"):
        state = reference.state[whole[0]][key]
        assert torch.equal(own.state[parts[0]][key].to_local(), state[:, mine]), key
    dist.barrier()
    return True


@pytest.mark.parametrize("how", HOW)
def test_rows_shared_out_unevenly(how):
    assert launch(check_rows, 2, how) == [True, True]


@pytest.mark.parametrize("how", HOW)
def test_experts_sharded_within(how):
    assert launch(check_experts_sharded_within, 2, how) == [True, True]
