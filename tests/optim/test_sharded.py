"""Two processes: FSDP2, tensor parallelism and distributed checkpoints give the results of one process, bit for bit.

Every check runs over all formats in one call, since starting processes is what takes the time.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lowbit import optim
from lowbit.tensor import CodebookTensor
from lowbit.testing.launch import launch
from tests.optim.problems import FORMATS, rand, relative


class Model(nn.Module):
    """An odd number of rows, a single row (one rank gets nothing), experts, and small parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(512, 33)
        self.experts = nn.Parameter(torch.empty(5, 33, 40))
        self.gate = nn.Linear(4100, 1, bias=False)
        for i, p in enumerate(self.parameters()):
            p.data = 0.1 * rand(*p.shape, seed=i)

    def forward(self, x):
        hidden = torch.einsum("bi,eio->beo", self.first(x), self.experts)
        return (hidden.flatten(1).sin() * self.gate.weight[:, :200]).square().sum()


def shard(model, mesh, dtype=None):
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(rand(6, 512, seed=step)).backward()
        optimizer.step()


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def same_state(a, b):
    if not isinstance(a, CodebookTensor):
        return torch.equal(a, b)
    return torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


def one_process(state, steps, **options):
    model = Model()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, state=state, **options)
    train(model, optimizer, steps)
    return model, optimizer


def check_fsdp(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for state in FORMATS:
        whole, reference = one_process(state, 4, amsgrad=True)
        model = shard(Model(), mesh)
        optimizer = optim.AdamW(model.parameters(), lr=0.01, state=state, amsgrad=True)
        train(model, optimizer, 4)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q), (state, name)
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                value = optimizer.state[p][key]
                assert isinstance(value, DTensor) and value.placements == p.placements
                expected = reference.state[q][key]
                assert type(value.to_local()) is type(expected), (state, name)
                assert same_state(full(value), expected), (state, name, key)
    return True


def check_bfloat16_parameters(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    whole, model = Model().bfloat16(), shard(Model().bfloat16(), mesh)
    for m in (whole, model):
        optimizer = optim.AdamW4bit(m.parameters(), lr=0.01)
        for step in range(3):
            for i, p in enumerate(m.parameters()):
                grad = rand(*p.shape, seed=100 * step + i).bfloat16()
                is_sharded = isinstance(p, DTensor)
                p.grad = distribute_tensor(grad, mesh, p.placements) if is_sharded else grad
            optimizer.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    return True


def check_empty_shard(rank, world_size):
    """A rank without rows still takes part in redistributing the gradient."""
    mesh = init_device_mesh("cpu", (world_size,))
    p = nn.Parameter(distribute_tensor(torch.ones(1, 5000), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(1, 5000), mesh, [Shard(1)])
    optim.AdamW4bit([p], lr=0.1, weight_decay=0.0).step()
    assert torch.allclose(p.full_tensor(), torch.tensor(0.9))
    return True


def check_save(rank, world_size, folder):
    """Save from any number of processes. Returns the weights after two more steps."""
    mesh = init_device_mesh("cpu", (world_size,))
    result = {}
    for state in FORMATS:
        model = shard(Model(), mesh)
        optimizer = optim.AdamW(model.parameters(), lr=0.01, state=state)
        train(model, optimizer, 3)
        dcp.save(checkpoint(model, optimizer), checkpoint_id=f"{folder}/{state}")
        if state == "4bit":
            future = dcp.async_save(checkpoint(model, optimizer), checkpoint_id=f"{folder}/async")
            future.result()
        train(model, optimizer, 2, first=3)
        result[state] = [p.full_tensor().detach() for p in model.parameters()]
    return result


def check_load(rank, world_size, folder):
    """Load into a fresh model over any number of processes. Returns the weights after two more steps."""
    mesh = init_device_mesh("cpu", (world_size,))
    result = {}
    for name in [*FORMATS, "async"]:
        state = "4bit" if name == "async" else name
        model = shard(Model(), mesh)
        optimizer = optim.AdamW(model.parameters(), lr=0.5, state=state)
        loaded = checkpoint(model, optimizer)
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        model.load_state_dict(loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 0.01
        dcp.save(checkpoint(model, optimizer), checkpoint_id=f"{folder}/{name}-again")
        train(model, optimizer, 2, first=3)
        result[name] = [p.full_tensor().detach() for p in model.parameters()]
    return result


def checkpoint(model, optimizer):
    state = get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": state}


def check_full_state_dict(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for state in FORMATS:
        model = shard(Model(), mesh)
        optimizer = optim.AdamW(model.parameters(), lr=0.01, state=state)
        train(model, optimizer, 3)
        gathered = [get_optimizer_state_dict(model, optimizer, options=options)]
        whole, reference = one_process(state, 3)
        if rank == 0:  # goes on in one process
            unsharded = Model()
            unsharded.load_state_dict(whole.state_dict())
            other = optim.AdamW(unsharded.parameters(), state=state)
            set_optimizer_state_dict(unsharded, other, copy.deepcopy(gathered[0]), options=options)
            for p, q in zip(unsharded.parameters(), whole.parameters(), strict=True):
                for key, value in reference.state[q].items():
                    assert same_state(other.state[p][key], value), (state, key)
        dist.broadcast_object_list(gathered, 0)
        fresh = shard(Model(), mesh)  # goes on sharded, every rank holding the whole state
        again = optim.AdamW(fresh.parameters(), state=state)
        set_optimizer_state_dict(fresh, again, gathered[0], options=options)
        for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
            for key, value in optimizer.state[q].items():
                assert same_state(full(again.state[p][key]), full(value)), (state, key)
        plain = optim.dequantize_state_dict(gathered[0]) if rank == 0 else {}
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(fresh, again, plain, options=broadcast)
        train(fresh, again, 1)
    return True


def check_torchs_checkpoint(rank, world_size):
    """An unsharded torch.optim checkpoint loads straight into a sharded optimizer."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = Model()
    reference = torch.optim.AdamW(whole.parameters(), lr=0.01)
    train(whole, reference, 2)
    model = shard(Model(), mesh)
    optimizer = optim.AdamW4bit(model.parameters())
    optimizer.load_state_dict(reference.state_dict())
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        value = full(optimizer.state[p]["exp_avg"])
        value = value.dequantize() if isinstance(value, CodebookTensor) else value
        assert relative(value, reference.state[q]["exp_avg"]) < 0.25
    wrong = copy.deepcopy(reference.state_dict())
    wrong["state"][0]["exp_avg"] = torch.zeros(34, 512)
    with pytest.raises(ValueError, match=r"shape \(34, 512\)"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"sharded and the parameter is not"):
        optim.AdamW4bit(whole.parameters()).load_state_dict(optimizer.state_dict())
    return True


def check_tensor_parallel(rank, world_size, folder):
    """Weights split by columns and by rows; a checkpoint of column shards loads into row shards and back."""
    mesh = init_device_mesh("cpu", (world_size,))
    values, grads = rand(64, 512), [rand(64, 512, seed=i + 1) for i in range(3)]
    for state in FORMATS:
        whole = nn.Parameter(values.clone())
        reference = optim.AdamW([whole], lr=0.01, state=state)
        optimizers = {}
        for dim in (0, 1):
            p = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(dim)]))
            optimizers[dim] = p, optim.AdamW([p], lr=0.01, state=state)
        for grad in grads:
            whole.grad = grad
            reference.step()
            for dim, (p, optimizer) in optimizers.items():
                placed = Shard(1 - dim) if grad is grads[1] else Shard(dim)  # moved to the weight's
                p.grad = distribute_tensor(grad, mesh, [placed])
                optimizer.step()
        for dim, (p, _) in optimizers.items():
            assert torch.equal(p.full_tensor(), whole), (
                state,
                dim,
            )  # blocks divide the column shards
        for source, target in ((0, 1), (1, 0)):
            p, optimizer = optimizers[source]
            path = f"{folder}/{state}-{source}"
            dcp.save({"s": dict(optimizer.state[p])}, checkpoint_id=path)
            other = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(target)]))
            fresh = optim.AdamW([other], state=state)
            other.grad = distribute_tensor(grads[0], mesh, [Shard(target)])
            fresh.step()
            dcp.load({"s": dict(fresh.state[other])}, checkpoint_id=path)
            for key in ("exp_avg", "exp_avg_sq"):
                a, b = (
                    fresh.state[other][key],
                    optimizers[target][1].state[optimizers[target][0]][key],
                )
                assert same_state(a.to_local(), b.to_local()), (state, key)
    return True


@pytest.mark.parametrize(
    "check", [check_fsdp, check_bfloat16_parameters, check_empty_shard, check_full_state_dict, check_torchs_checkpoint],
    ids=lambda f: f.__name__.removeprefix("check_"),
)  # fmt: skip
def test_two_processes(check):
    assert launch(check, 2) == [True, True]


def test_tensor_parallel_and_its_checkpoints(tmp_path):
    assert launch(check_tensor_parallel, 2, str(tmp_path)) == [True, True]


def test_distributed_checkpoints_between_two_processes_and_one(tmp_path):
    expected = launch(check_save, 2, str(tmp_path))[0]
    expected["async"] = expected["4bit"]
    one = launch(check_load, 1, str(tmp_path))[0]
    for state in FORMATS:
        (tmp_path / state).rename(tmp_path / f"{state}-first")
        (tmp_path / f"{state}-again").rename(tmp_path / state)
    two = launch(check_load, 2, str(tmp_path))
    for state, weights in expected.items():
        for i, weight in enumerate(weights):
            assert torch.equal(one[state][i], weight), (state, i)
            assert torch.equal(two[0][state][i], weight), (state, i)
            assert torch.equal(two[1][state][i], weight), (state, i)
