"""CPUOffloadOptimizer in two processes: FSDP2, distributed checkpoints and DDP give the base optimizer's results."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer
from lowbit.optim.offload import offload
from lowbit.testing.launch import launch
from tests.optim.offloading import assert_same, pair
from tests.optim.problems import rand
from tests.optim.test_sharded import Model as ShardedModel
from tests.optim.test_sharded import full, same_state, shard

# Muon communicates in its step; the last is clipped too
SHARDED = (optim.Muon8bit, torch.optim.AdamW, optim.AdamW8bit)


def step_sharded(model, optimizer, seed, clip):
    optimizer.zero_grad()
    for i in range(2):
        model(rand(6, 512, seed=seed + i)).backward()
    norm = clip()
    optimizer.step()
    return norm


def check_sharded(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,))
    patch = pytest.MonkeyPatch()
    patch.setattr(offload, "BUCKET", 5000)  # a step takes several buckets
    for offload_gradients in (False, True):
        for cls in SHARDED:
            direct, model = shard(ShardedModel(), mesh), shard(ShardedModel(), mesh)
            options = {"stacked": False} if cls is optim.Muon8bit else {}
            reference = cls(direct.parameters(), lr=0.01, **options)
            optimizer = CPUOffloadOptimizer(
                model.parameters(), cls, offload_gradients=offload_gradients, lr=0.01, **options
            )
            for step in range(2):
                for m, o in ((direct, reference), (model, optimizer)):
                    step_sharded(m, o, 10 * step, lambda: None)
            for p, q in zip(direct.parameters(), model.parameters(), strict=True):
                assert torch.equal(p.full_tensor(), q.full_tensor())
                for key, own in reference.state[p].items():
                    theirs = optimizer.state[q][key]
                    assert (
                        isinstance(theirs, DTensor) == isinstance(own, DTensor) == (key != "step")
                    )
                    assert same_state(full(own), full(theirs)), key
            path = f"{folder}/{offload_gradients}-{cls.__name__}"
            dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path)
            fresh = shard(ShardedModel(), mesh)
            again = CPUOffloadOptimizer(fresh.parameters(), cls, lr=0.5, **options)
            loaded = get_optimizer_state_dict(fresh, again)
            dcp.load(loaded, checkpoint_id=path)
            set_optimizer_state_dict(fresh, again, loaded)
            for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
                for key, value in optimizer.state[q].items():
                    assert same_state(full(again.state[p][key]), full(value)), key
    own = step_sharded(model, optimizer, 30, lambda: optimizer.clip_grad_norm_(0.01))
    theirs = step_sharded(
        direct, reference, 30, lambda: nn.utils.clip_grad_norm_(direct.parameters(), 0.01)
    )
    torch.testing.assert_close(own, theirs.full_tensor())
    patch.undo()
    return True


def check_norm_under_tensor_parallelism(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    placement = _StridedShard(
        0, split_factor=2
    )  # as FSDP2 makes it for a parameter that is sharded already
    weight, grad = (
        DTensor.from_local(rand(4, 8, seed=seed + rank), mesh, [placement], run_check=False)
        for seed in (0, 10)
    )
    param = nn.Parameter(weight)
    optimizer = CPUOffloadOptimizer([param], optim.AdamW8bit)
    param.grad = grad
    everything = torch.cat([rand(4, 8, seed=10 + i) for i in range(world_size)])
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), everything.norm())
    return True


def check_ddp(rank, world_size):
    """Each rank has its own batch. DDP averages after the optimizer's hooks have run."""
    for offload_gradients in (False, True):
        for is_view in (False, True):
            both = pair("torch-AdamW", offload_gradients)
            for model, optimizer in both:
                ddp = DistributedDataParallel(
                    model, gradient_as_bucket_view=is_view, find_unused_parameters=True
                )
                for step in range(3):
                    optimizer.zero_grad()
                    ddp(rand(6, 65, seed=10 * step + rank)).backward()
                    optimizer.step()
            assert_same(*both)
    return True


def test_sharded_parameters(tmp_path):
    assert launch(check_sharded, 2, str(tmp_path)) == [True, True]


def test_norm_under_tensor_parallelism():
    assert launch(check_norm_under_tensor_parallelism, 2) == [True, True]


def test_data_parallel():
    assert launch(check_ddp, 2) == [True, True]
