"""Tensor parallelism on two gloo processes: split by columns and by rows, equal to one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lowbit.testing.comparison import relative_error, same_bits, values
from lowbit.testing.launch import launch
from lowbit.testing.subject import Subject


class ParallelBlock(nn.Module):
    """192 → 192 → 64; both ranks' parts of 64 and 192 hold whole groups of 32 and 48."""

    def __init__(self, subject: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(192, 192), nn.Linear(192, 64)
        for seed, layer in enumerate((self.up, self.down)):
            made = subject.make(layer.weight.shape, seed)
            layer.weight = nn.Parameter(made, requires_grad=subject.trainable)
            with torch.no_grad():
                layer.bias.copy_(values(layer.bias.shape, 3 + seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def outcome(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    x = values((5, 192), 9).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    assert x.grad is not None
    return {"y": y.detach(), "input": x.grad, **full}


def check_parallel_block(rank: int, world_size: int, subject: Any) -> bool:
    """Outputs and gradients of a layer split by columns and one split by rows, as in a transformer's MLP."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole, model = ParallelBlock(subject), ParallelBlock(subject)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name, dim in (("up", 0), ("down", 1)):
        full: Any = getattr(whole, name).weight.detach()
        weight: Any = getattr(model, name).weight
        assert isinstance(weight, DTensor) and weight.placements == (Shard(dim),), name
        local = weight.to_local().detach()
        assert type(local) is type(full) and local.shape[dim] * world_size == full.shape[dim]
        expected = subject.values_of(full).chunk(world_size, dim)[rank]
        assert same_bits(subject.values_of(local), expected), (name, dim)
    for _ in range(2):
        found, expected = outcome(model), outcome(whole)
        assert found.keys() == expected.keys()
        for name, t in expected.items():
            error = relative_error(found[name], t)
            assert error < subject.parallel_tolerance, (name, error)
    return True


class TensorParallelContract(Subject):
    """An MLP under `parallelize_module`, `ColwiseParallel` then `RowwiseParallel`."""

    def test_a_block_split_by_columns_and_rows(self) -> None:
        assert launch(check_parallel_block, 2, self) == [True, True]
