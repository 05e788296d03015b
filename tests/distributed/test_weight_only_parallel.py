"""int4 and int8 linears split by columns and rows: the kernels get the local shards, with local sizes."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowbit as lb
from lowbit.testing.launch import launch
from tests.inference.weight_ops import counted
from tests.schemes import relative_error

SCHEMES = {
    "int4-g32": lb.Int4WeightOnly(32),
    "int4-g96-asymmetric": lb.Int4WeightOnly(96, "asymmetric"),
    "int8-row": lb.Int8WeightOnly(),
    "int8-g32": lb.Int8WeightOnly(32),
}


class Block(nn.Module):
    """128 → 192 → 64: both ranks' 96 columns of the second are whole groups."""

    def __init__(self, scheme: lb.Scheme) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(128, 192), nn.Linear(192, 64)
        self.bfloat16()
        lb.quantize_(self, scheme)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


def check_block(rank, world_size, names):
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            ops = counted(patch)
            whole, model = Block(SCHEMES[name]), Block(SCHEMES[name])
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            torch.manual_seed(1)
            x = torch.randn(2, 5, 128, dtype=torch.bfloat16)
            expected = whole(x)
            ops.calls.clear()
            y = model(
                x
            ).detach()  # without gradients a CPU's kernel runs without the op that is counted here
            assert relative_error(y, expected.double()) < 1e-2, name
            found[name] = [call[:4] for call in ops.calls]
    return found


def test_local_shards_reach_the_kernels() -> None:
    for found in launch(check_block, 2, list(SCHEMES)):
        for name in SCHEMES:
            codes = name[:4]
            assert found[name] == [(codes, 10, 96, 128), (codes, 10, 64, 96)], name


def check_writes(rank, world_size):
    """FSDP2 gathers and collectives write without raising version counters; products must read the new codes."""
    mesh = init_device_mesh("cpu", (world_size,))
    old, new = Block(SCHEMES["int4-g32"]), Block(SCHEMES["int4-g32"])
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in (new.up, new.down):
            layer.weight.codes.bitwise_not_()
        sharded = Block(SCHEMES["int4-g32"])
        for layer in (sharded.up, sharded.down):
            fully_shard(layer)
        fully_shard(sharded)
        assert torch.equal(sharded(x), old(x))
        for name in ("up", "down"):
            held = getattr(sharded, name).weight
            held.copy_(distribute_tensor(getattr(new, name).weight.detach(), mesh, held.placements))
        after_copy = relative_error(sharded(x), new(x).double())
        received = new if rank == 0 else old
        received(x)  # packs
        for part in received.parameters():
            dist.broadcast(part.data, 0)
        expected = nn.functional.linear(x, received.up.weight.dequantize(), received.up.bias)
        return after_copy, relative_error(received.up(x), expected.double())


def test_packed_copies_follow_gathers_and_broadcasts() -> None:
    for after_copy, after_broadcast in launch(check_writes, 2):
        assert after_copy < 1e-2 and after_broadcast < 1e-2
