"""The compiled step over sharded parameters: the same bits as over whole ones, however uneven the shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowbit import optim
from lowbit.tensor.dtensor import local as to_local
from lowbit.testing.launch import launch
from tests.kernels.compiled_on_cpu import COMPILER
from tests.optim.counted import LAUNCHES, count, emulate
from tests.optim.problems import rand

pytestmark = pytest.mark.skipif(not COMPILER, reason="no g++")

SHAPES = [(33, 512), (101, 320), (1, 4096), (7, 5, 300)]
OPTIONS = {
    "4bit, stochastic": {"state": "4bit", "bf16_stochastic_round": True},
    "8bit, corrected": {"state": "8bit", "weight_correction": "8bit"},
    "bf16": {"state": "bf16"},
}


HOW = {"cpu": count, "emulated": emulate}


def trained(distribute, options):
    """Parameters after three steps, each sharded by `distribute`, and the optimizer."""
    params = [
        nn.Parameter(distribute(rand(*shape, seed=i).to(torch.bfloat16)))
        for i, shape in enumerate(SHAPES)
    ]
    optimizer = optim.AdamW(params, lr=1e-2, **options)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = distribute(rand(*p.shape, seed=10 * step + i).to(torch.bfloat16))
        optimizer.step()
    return params, optimizer


def check_rows(rank, world_size, how):
    mesh = init_device_mesh("cpu", (world_size,))
    for name, options in OPTIONS.items():
        with pytest.MonkeyPatch.context() as patch:
            HOW[how](patch)
            LAUNCHES.clear()
            whole, reference = trained(lambda t: t, options)
            parts, own = trained(lambda t: distribute_tensor(t, mesh, [Shard(0)]), options)
            assert len(LAUNCHES) == 6, name
        for p, q in zip(whole, parts, strict=True):
            assert torch.equal(q.full_tensor(), p), (name, p.shape)
            for key, expected in reference.state[p].items():
                found = own.state[q][key]
                if key != "step":
                    assert to_local(found).shape == q.to_local().shape, (name, key)
                    found = found.full_tensor()
                assert torch.equal(found, expected), (name, key, p.shape)
    return True


def check_columns(rank, world_size, how):
    """Shards of columns: random bits are those of the whole, so without states the weights are equal too."""
    mesh = init_device_mesh("cpu", (world_size,))
    results = []
    with pytest.MonkeyPatch.context() as patch:
        HOW[how](patch)
        for placement in (Replicate(), Shard(1)):
            weight = rand(64, 320, seed=1).to(torch.bfloat16)
            param = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
            optimizer = optim.SGD([param], lr=1e-3, bf16_stochastic_round=True)
            for step in range(2):
                grad = rand(64, 320, seed=2 + step).to(torch.bfloat16)
                param.grad = distribute_tensor(grad, mesh, [placement])
                LAUNCHES.clear()
                optimizer.step()
                assert LAUNCHES
            results.append(param.full_tensor())
    return torch.equal(*results)


@pytest.mark.parametrize("how", HOW)
def test_rows_shared_out_unevenly(how):
    assert launch(check_rows, 2, how) == [True, True]


@pytest.mark.parametrize("how", HOW)
def test_columns_shared_out(how):
    assert launch(check_columns, 2, how) == [True, True]
