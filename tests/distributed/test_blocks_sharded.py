"""Two processes under FSDP2 with weights in float8 blocks of 128 x 128, stored and in training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lowbit
from lowbit import Float8Tensor, train
from lowbit.tensor.trained.gathered import GatheredTensor
from lowbit.testing.launch import launch
from tests.as_sent import as_sent
from tests.distributed.test_tensor_fsdp import recorded_gathers
from tests.distributed.test_train_fsdp import summed
from tests.scaled_products import scaled_products
from tests.train.problems import SCHEMES, linear, relative, values
from tests.train.test_experts import Experts, by_index

BLOCKS = SCHEMES["float8-blocks"]
STORED = lowbit.Float8DynamicActivationFloat8Weight(lowbit.PerBlock(128, 128))


def shard(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def check_experts(rank, world_size):
    """A 3-D weight is sharded over its experts, so that any number of rows fits."""
    for count in (4, 3):
        model = Experts(by_index, (count, 150, 200))
        train.prepare_(model, BLOCKS, lambda module, name: isinstance(module, Experts))
        whole = copy.deepcopy(model)
        with recorded_gathers() as seen:
            shard(model)
            outputs = []
            for m in (whole, model):
                with scaled_products() as calls:
                    y = m(values(count, 8, 200, seed=rank))
                    y.square().sum().backward()
                assert calls["float8"] == 4, count
                outputs.append(y.detach())
        ((_, inputs),) = seen[:1]
        assert all(t.dtype.itemsize == 1 or t.dtype is torch.float32 for t in inputs)
        assert sum(t.nbytes for t in inputs) <= 2 * 150 * 200 * -(-count // world_size)
        assert torch.equal(*outputs), count
        expected = summed(whole)["weight"]
        assert relative(model.weight.grad.full_tensor(), expected) < 1e-6, count
    return True


def check_tied_embedding(rank, world_size):
    """The embedding looks rows up in the gathered codes; gradients of both uses reach the shards."""
    model = nn.Sequential(nn.Embedding(256, 200), nn.Linear(200, 256, bias=False))
    model[0].weight = model[1].weight = nn.Parameter(values(256, 200))
    train.prepare_(model, BLOCKS)
    whole = copy.deepcopy(model)
    shard(model)
    tokens = torch.arange(100, 120).view(4, 5) + rank
    outputs = []
    for m in (whole, model):
        y = m(tokens)
        y.square().sum().backward()
        outputs.append(y.detach())
    assert relative(outputs[1], outputs[0]) < 0.06
    expected = summed(whole)["0.weight"]
    assert relative(model[0].weight.grad.full_tensor(), expected) < 0.1
    return True


def check_gathered_rows(rank, world_size):
    """Parts of a gathered weight: whole blocks of rows, and single rows by their values."""
    weight = train.prepare_(layer := nn.Sequential(linear(256, 200)), BLOCKS) and layer[0].weight
    gathered = as_sent(weight.detach())
    assert isinstance(gathered, GatheredTensor)
    whole = gathered.dequantize()
    assert torch.equal(gathered[128:256].dequantize(), whole[128:])
    assert torch.equal(gathered[130], whole[130])
    assert torch.equal(gathered.rows(torch.tensor([5, 200])), whole[[5, 200]])
    with pytest.raises(NotImplementedError, match="rows in whole blocks of 128"):
        gathered[100:200]
    return True


def check_adapters_over_stored_weights(rank, world_size):
    """Shards of whole blocks: codes and scales travel, outputs are those of one process, to the bit."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(512, 200), linear(256, 512))
    lowbit.quantize_(model, STORED)
    model.add_module("down", nn.Linear(256, 8, bias=False))
    whole = copy.deepcopy(model)
    with recorded_gathers() as seen:
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
        shard(model)
        outputs = []
        for m in (whole, model):
            x = values(9, 200, seed=rank).requires_grad_()
            y = m(x)
            y.square().sum().backward()
            outputs.append((y.detach(), x.grad))
    assert isinstance(model[0].weight, DTensor)
    assert isinstance(model[0].weight.to_local(), Float8Tensor)
    assert model[0].weight.to_local().scale.shape == (2, 2)
    assert any(t.dtype is torch.uint8 for _, inputs in seen for t in inputs)
    for found, expected in zip(outputs[1], outputs[0], strict=True):
        assert torch.equal(found, expected)
    expected = whole.down.weight.grad
    dist.all_reduce(expected)
    found = model.down.weight.grad.full_tensor()
    assert relative(found, expected / world_size) < 1e-6
    return True


def check_cut_blocks_are_refused(rank, world_size):
    model = nn.Sequential(linear(128, 200))
    lowbit.quantize_(model, STORED)
    with pytest.raises(NotImplementedError, match="multiples of its blocks of 128"):
        shard(model)
    return True


CHECKS = [
    check_experts,
    check_tied_embedding,
    check_gathered_rows,
    check_adapters_over_stored_weights,
    check_cut_blocks_are_refused,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_two_processes(check):
    assert launch(check, 2) == [True, True]
