"""lowbit.trace of sharded models: two ranks, FSDP2 and tensor parallelism, every kind of weight."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowbit as lb
from lowbit.testing.launch import launch
from tests.traced import ran_in
from tests.train.problems import SCHEMES, linear, values

PREPARED = {
    "plain": lambda model: None,
    "int8": lambda model: lb.train.prepare_(model, SCHEMES["int8"]),
    "weight": lambda model: lb.train.prepare_(model, lb.Int8Weight()),
    "bitnet": lambda model: lb.train.prepare_(model, lb.BitNet()),
    "qat": lambda model: lb.qat.prepare_(model, lb.Int4WeightOnly(16)),
    "quantized": lambda model: lb.quantize_(model, lb.Int4WeightOnly(16)),
}
OUTPUT = {"int8": "int8", "bitnet": "int8"}
FORMATS = {
    **{"plain": "float32", "int8": "float32", "weight": "int8 weight", "bitnet": "BitNet"},
    **{"qat": "QAT int4-g16", "quantized": "int4-g16"},
}


class Model(nn.Module):
    """64 → 96 → 64 through two plain linears, and a plain weight of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(96, 64), linear(64, 96)
        self.table = nn.Parameter(values(64, 8))

    def forward(self, x):
        y = self.down(self.up(x).relu())
        return (y.full_tensor() if isinstance(y, DTensor) else y) @ self.table


def check_fsdp(rank, world_size):
    for name, prepare in PREPARED.items():
        model = Model()
        prepare(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        model.table.grad = before = torch.ones_like(model.table)
        found = lb.trace(model, values(6, 64).requires_grad_())
        products = {"output", "grad_input"} | ({"grad_weight"} if name != "quantized" else set())
        for layer, n, k in (("up", 96, 64), ("down", 64, 96)):
            lines = [p for p in found.products if p.layer == layer]
            assert {(p.m, p.n, p.k) for p in lines} == {(6, n, k)}, (name, lines)
            assert {p.weight for p in lines} == {FORMATS[name]}, (name, lines)
            assert set(ran_in(found, layer)) == products, (name, lines)
            assert ran_in(found, layer)["output"] == {OUTPUT.get(name, "float32"): 1}
        assert ran_in(found, "table")["grad_weight"] == {"float32": 1}
        assert model.table.grad is before and model.up.weight.grad is None
    return True


def check_tensor_parallel(rank, world_size):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for name, prepare in PREPARED.items():
        model = Model()
        prepare(model)
        parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
        found = lb.trace(model, values(6, 64).requires_grad_())
        for layer, n, k in (("up", 48, 64), ("down", 64, 48)):
            lines = [p for p in found.products if p.layer == layer]
            assert {(p.m, p.n, p.k) for p in lines} == {(6, n, k)}, (name, lines)
            assert {p.weight for p in lines} == {FORMATS[name]}, (name, lines)
            assert ran_in(found, layer)["output"] == {OUTPUT.get(name, "float32"): 1}
            assert sum(ran_in(found, layer)["grad_input"].values()) == 1, (name, lines)
    return True


def test_sharded_by_fsdp2():
    assert all(launch(check_fsdp, 2))


def test_under_tensor_parallelism():
    assert all(launch(check_tensor_parallel, 2))
