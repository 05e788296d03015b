"""Two processes train LoRA layers under QAT, with DDP and FSDP2, to the gradients of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lowbit
from lowbit import qat
from lowbit.tensor.trained.adapted import is_merged
from lowbit.testing.launch import launch
from tests.distributed.test_tensor_fsdp import recorded_gathers
from tests.qat.lora_layers import Net
from tests.schemes import relative_error

SCHEMES = {
    "int4": lowbit.Int4WeightOnly(32),
    "int8xint4": lowbit.Int8DynamicActivationInt4Weight(32),
}


def net(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = Net(dtype)
    qat.prepare_(model, SCHEMES[name])
    return model


def batch(rank, step=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 64, generator=generator).to(dtype)


def averaged_gradients(model, world_size, dtype=torch.float32):
    """Those of one process, over the batches of all ranks."""
    for rank in range(world_size):
        (model(batch(rank, dtype=dtype)).float().square().sum() / world_size).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def check_ddp(rank, world_size, name):
    model = net(name)
    expected = averaged_gradients(copy.deepcopy(model), world_size)
    wrapped = DistributedDataParallel(model)
    wrapped(batch(rank)).square().sum().backward()
    for n, p in model.named_parameters():
        if p.requires_grad:
            assert relative_error(p.grad, expected[n]) < 1e-5, n
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer.step()
    seen = model(batch(0))
    qat.convert_(model)
    gathered = [torch.empty_like(seen) for _ in range(world_size)]
    dist.all_gather(gathered, seen.detach())
    assert torch.equal(gathered[0], gathered[1])
    assert relative_error(model(batch(0)), seen) < 1e-5
    return True


def check_fsdp(rank, world_size, name, dtype):
    model = net(name, dtype)
    whole = copy.deepcopy(model)
    expected = averaged_gradients(copy.deepcopy(model), world_size, dtype)
    mesh = init_device_mesh("cpu", (world_size,))
    with recorded_gathers() as seen:
        fully_shard(model.up, mesh=mesh)
        fully_shard(model.down, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no average
        y = model(batch(rank, dtype=dtype))
        assert torch.equal(y, whole(batch(rank, dtype=dtype)))
        y.float().square().sum().backward()
    assert seen
    base = model.up.base_layer.weight
    assert isinstance(base, DTensor) and is_merged(base.to_local())
    bound = 1e-5 if dtype is torch.float32 else 0.03
    for n, p in model.named_parameters():
        if p.requires_grad:
            assert relative_error(p.grad.full_tensor(), expected[n]) < bound, n
        else:
            assert p.grad is None, n
    with pytest.raises(ValueError, match="is sharded: gather the state dict"):
        qat.convert_(model)
    return True


def check_gathered_state_converts(rank, world_size):
    """As the docs say: gather the adapters, load them into a prepared model on one process, convert that."""
    model = net("int4")
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    y = model(batch(rank))
    model.reshard()
    full = {n: p.full_tensor().detach() for n, p in model.named_parameters() if "lora_" in n}
    single = net("int4")
    missing = single.load_state_dict(full, strict=False).unexpected_keys
    assert not missing
    qat.convert_(single)
    assert relative_error(single(batch(rank)), y) < 1e-6
    return True


@pytest.mark.parametrize("name", SCHEMES)
def test_ddp(name):
    assert launch(check_ddp, 2, name) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_fsdp(name, dtype):
    assert launch(check_fsdp, 2, name, dtype) == [True, True]


def test_conversion_after_fsdp():
    assert launch(check_gathered_state_converts, 2) == [True, True]
