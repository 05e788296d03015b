"""The compiled step over sharded parameters: the same bits as over whole ones, however uneven the shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowbit import optim
from lowbit.optim.state.state import dequantized
from lowbit.tensor.core.dtensor import local as to_local
from lowbit.testing.launch import launch
from tests.kernels.compiled_on_cpu import COMPILER
from tests.optim.counted import LAUNCHES, count, emulate
from tests.optim.problems import rand, relative

pytestmark = pytest.mark.skipif(not COMPILER, reason="no g++")

SHAPES = [(9, 512), (15, 320), (1, 4096), (3, 5, 300)]
OPTIONS = {
    "4bit, stochastic": {"state": "4bit", "bf16_stochastic_round": True},
    "8bit, corrected": {"state": "8bit", "weight_correction": "8bit"},
    "4bit, exact": {"state": "4bit", "weight_correction": "16bit"},
    "8bit, compensated": {
        "state": "8bit",
        "weight_correction": "momentum",
        "bf16_stochastic_round": True,
    },
    "bf16": {"state": "bf16"},
}


HOW = {"cpu": count, "emulated": emulate}


def trained(distribute, options):
    """Parameters after two steps, each sharded by `distribute`, and the optimizer."""
    params = [
        nn.Parameter(distribute(rand(*shape, seed=i).to(torch.bfloat16)))
        for i, shape in enumerate(SHAPES)
    ]
    optimizer = optim.AdamW(params, lr=1e-2, **options)
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = distribute(rand(*p.shape, seed=10 * step + i).to(torch.bfloat16))
        optimizer.step()
    return params, optimizer


def check_rows(rank, world_size, how):
    mesh = init_device_mesh("cpu", (world_size,))
    for name in OPTIONS if how == "cpu" else ("4bit, stochastic", "8bit, corrected"):
        options = OPTIONS[name]
        with pytest.MonkeyPatch.context() as patch:
            HOW[how](patch)
            LAUNCHES.clear()
            whole, reference = trained(lambda t: t, options)
            parts, own = trained(lambda t: distribute_tensor(t, mesh, [Shard(0)]), options)
            assert len(LAUNCHES) == 4, name
        for p, q in zip(whole, parts, strict=True):
            assert torch.equal(q.full_tensor(), p), (name, p.shape)
            for key, expected in reference.state[p].items():
                found = own.state[q][key]
                if key != "step":
                    assert to_local(found).shape[: q.ndim] == q.to_local().shape, (name, key)
                    found = found.full_tensor()
                assert torch.equal(found, expected), (name, key, p.shape)
    return True


def check_columns(rank, world_size, how):
    """Shards of columns: random bits are those of the whole, so without states the weights are equal too."""
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.MonkeyPatch.context() as patch:
        HOW[how](patch)
        for cols in (320, 330):  # shards of 160, and of 165, which 8 does not divide
            whole, part = (
                stepped((64, cols), mesh, placement, optim.SGD, bf16_stochastic_round=True)[0]
                for placement in (Replicate(), Shard(1))
            )
            assert torch.equal(whole, part), cols
        results = [
            stepped((64, 512), mesh, placement, optim.AdamW4bit)
            for placement in (Replicate(), Shard(1))
        ]
        assert all(map(torch.equal, *results)), "with blocks that divide the shards"
    return True


def check_runs_that_eight_does_not_divide(rank, world_size, how):
    """Draws of eight neighbours that lie in two runs: as PyTorch operations take them."""
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.MonkeyPatch.context() as patch:
        HOW[how](patch)
        for shape, placement in (((40, 330), Shard(1)), ((32, 6, 44), Shard(2))):
            for options in ({"state": "4bit"}, {"state": "bf16"}):
                fused, eager = (
                    stepped(shape, mesh, placement, optim.AdamW, fused=f, **options)
                    for f in (True, False)
                )
                # the weight and the moments; a first moment near the boundary of two codes may take the other one
                for mine, theirs, bound in zip(fused, eager, (1e-3, 0.05, 1e-4), strict=True):
                    assert relative(mine, theirs) < bound, (shape, options)
    return True


def stepped(shape, mesh, placement, cls, **options):
    """The weight after two steps, and the states, whole or as they are sharded."""
    weight = rand(*shape, seed=1).to(torch.bfloat16)
    param = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
    optimizer = cls([param], lr=1e-3, **options)
    for step in range(2):
        grad = rand(*shape, seed=2 + step).to(torch.bfloat16)
        param.grad = distribute_tensor(grad, mesh, [placement])
        LAUNCHES.clear()
        optimizer.step()
        assert bool(LAUNCHES) == (options.get("fused") is not False)
    states = [v for name, v in optimizer.state[param].items() if name != "step"]
    return [param.full_tensor(), *(dequantized(v).full_tensor() for v in states)]


@pytest.mark.parametrize("how", HOW)
def test_rows_shared_out_unevenly(how):
    assert launch(check_rows, 2, how) == [True, True]


@pytest.mark.parametrize("how", HOW)
def test_columns_shared_out(how):
    assert launch(check_columns, 2, how) == [True, True]


@pytest.mark.parametrize("how", HOW)
def test_runs_that_eight_does_not_divide(how):
    assert launch(check_runs_that_eight_does_not_divide, 2, how) == [True, True]
