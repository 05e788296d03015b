"""Tensor parallelism over prepared linears: split by columns and by rows, all three products in low bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowbit
from lowbit import MixedPrecisionTensor
from lowbit.testing.launch import launch
from tests.scaled_products import scaled_products
from tests.train.problems import SCHEMES, linear, prepared, relative, snr, values


class Block(nn.Module):
    """64 → 96 → 64, as a transformer's MLP."""

    def __init__(self, bias=True, hidden=96):
        super().__init__()
        self.up, self.down = linear(hidden, 64, bias=bias), linear(64, hidden, bias=bias)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def mesh_of(world_size):
    return init_device_mesh("cpu", (world_size,))


def outcome(model, x):
    """Output and gradients by name, whole."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    whole = y.full_tensor() if isinstance(y, DTensor) else y
    whole.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    full = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return {"output": whole.detach(), "input": x.grad, **full}


def check_columns_then_rows(rank, world_size):
    """Outputs and gradients are as close to float64 as those of one process."""
    mesh = mesh_of(world_size)
    for name, scheme in SCHEMES.items():
        for bias in (True, False):
            plain = Block(bias)
            whole, model = prepared(plain, scheme), prepared(plain, scheme)
            parallelize_module(model, mesh, PLAN)
            for layer, dim in ((model.up, 0), (model.down, 1)):
                assert layer.weight.placements == (Shard(dim),)
                assert isinstance(layer.weight.to_local(), MixedPrecisionTensor)
            x = values(2, 10, 64)
            with scaled_products() as calls:
                found = outcome(model, x)
            assert sum(calls.values()) == 6, name
            expected = outcome(plain.double(), x.double())
            one = outcome(whole, x)
            for key, value in expected.items():
                limit = min(20, snr(one[key], value)) - 1.5
                assert snr(found[key], value) > limit, (name, bias, key, snr(found[key], value))
    return True


def check_columns_are_those_of_one_process(rank, world_size):
    """Each row of the weight has its own scale, so the output and the weight's gradient are the same numbers."""
    mesh = mesh_of(world_size)
    for hidden in (96, 33):
        layer = prepared(linear(hidden, 64), SCHEMES["int8"])
        split = copy.deepcopy(layer)
        parallelize_module(split, mesh, ColwiseParallel(output_layouts=Replicate()))
        x = values(2, 10, 64)
        found, expected = outcome(split, x), outcome(layer, x)
        for key in ("output", "weight", "bias"):
            assert relative(found[key], expected[key]) < 1e-6, (hidden, key)
        assert snr(found["input"], expected["input"]) > 30
    return True


def check_sequence_parallel(rank, world_size):
    """Activations sharded along the sequence between the layers."""
    mesh = mesh_of(world_size)
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plain = Block()
    model = prepared(plain, SCHEMES["int8"])
    parallelize_module(model, mesh, plan)
    x = values(2, 10, 64).requires_grad_()
    part = x.chunk(world_size, 1)[rank]
    y = model(part)
    assert y.shape == (2, 10 // world_size, 64)
    y.square().sum().backward()
    expected = outcome(plain, x.detach())
    assert snr(y.detach(), expected["output"].chunk(world_size, 1)[rank]) > 25
    mine = x.grad.chunk(world_size, 1)[rank]
    assert snr(mine, expected["input"].chunk(world_size, 1)[rank]) > 20
    for name, p in model.named_parameters():
        assert snr(p.grad.full_tensor(), expected[name]) > 20, name
    return True


def check_by_hand_and_replicated(rank, world_size):
    """Weights replicated over the mesh, inputs split by rows: each rank's part of the weight's gradient is summed."""
    mesh = mesh_of(world_size)
    layer = prepared(linear(24, 64), SCHEMES["int8"])
    split = copy.deepcopy(layer)
    for name, p in list(split.named_parameters()):
        split.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [Replicate()])))
    x = values(8, 64)
    expected = outcome(layer, x)
    given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    y = split(given)
    assert y.placements == (Shard(0),)
    assert torch.equal(y.full_tensor(), expected["output"])
    y.full_tensor().square().sum().backward()
    assert relative(given.grad.full_tensor(), expected["input"]) < 1e-6
    for name, p in split.named_parameters():
        assert snr(p.grad.full_tensor(), expected[name]) > 30, name
    return True


def check_training_with_fsdp_and_compiled(rank, world_size):
    """Two dimensions of the mesh: FSDP2 over one, tensor parallelism over the other."""
    torch._dynamo.reset()
    for shape, compiled in (((1, 2), False), ((2, 1), False), ((1, 2), True)):
        check_mesh("int8", shape, compiled)
    return True


def check_mesh(name, shape, compiled):
    """The losses of four steps are those of one process, within 2%."""
    plain = Block()
    whole = prepared(plain, SCHEMES[name])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = prepared(plain, SCHEMES[name])
    parallelize_module(model, mesh["tp"], PLAN)
    if compiled:
        model.compile(backend="aot_eager")
    fully_shard(model, mesh=mesh["dp"])
    model.set_force_sum_reduction_for_comms(True)
    optimizers = [lowbit.optim.AdamW8bit(m.parameters(), lr=1e-2) for m in (whole, model)]
    reference = copy.deepcopy(whole)
    optimizers[0] = lowbit.optim.AdamW8bit(reference.parameters(), lr=1e-2)
    for step in range(4):
        x = values(16, 64, seed=step)
        losses = []
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            with scaled_products() as calls:
                loss = (m(x) - x).square().mean()
                loss.backward()
            assert calls == {name: 5}, "the input has no gradient"
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert abs(losses[1] - losses[0]) < 0.02 * losses[0], (shape, step, losses)
    weight = model.state_dict()["up.weight"]
    assert isinstance(weight, DTensor) and type(weight.to_local()) is torch.Tensor


def check_parts_in_shards(rank, world_size):
    """2 x 2 processes."""
    for name in ("int8", "float8"):
        check_mesh(name, (2, 2), False)
    return True


def check_other_placements_are_refused(rank, world_size):
    layer = prepared(linear(24, 64, bias=False), SCHEMES["int8"])
    part = DTensor.from_local(layer.weight.detach(), mesh_of(world_size), [Partial()])
    layer.weight = nn.Parameter(part)
    with pytest.raises(NotImplementedError, match=r"placed as P.*accepted: Shard\(0\), Shard\(1\)"):
        layer(values(4, 64))
    return True


CHECKS = [
    check_columns_then_rows,
    check_columns_are_those_of_one_process,
    check_sequence_parallel,
    check_by_hand_and_replicated,
    check_training_with_fsdp_and_compiled,
    check_other_placements_are_refused,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_two_processes(check):
    assert launch(check, 2) == [True, True]


def test_parts_in_shards():
    assert launch(check_parts_in_shards, 4) == [True] * 4
