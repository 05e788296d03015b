"""FSDP2 on two gloo processes: the results of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lowbit.testing.comparison import same_bits, values
from lowbit.testing.launch import launch
from lowbit.testing.subject import Subject


class TwoLinears(nn.Module):
    """100 → rows → 96, both weights as the subject makes them, a bias on the first. `seed`: of all values."""

    def __init__(self, subject: Any, rows: int, seed: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(100, rows), nn.Linear(rows, 96, bias=False)
        with torch.no_grad():
            self.first.bias.copy_(values((rows,), seed or 3))
        for i, layer in enumerate((self.first, self.second)):
            made = subject.make(layer.weight.shape, seed + i)
            layer.weight = nn.Parameter(made, requires_grad=subject.trainable)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.silu(self.first(x)))


def shard(model: Any, dtype: torch.dtype | None = None, mesh: DeviceMesh | None = None) -> Any:
    """`fully_shard` of both layers and the model over `mesh`; None: over all processes. FSDP2 gathers the parameters in
    `dtype`."""
    if mesh is None:
        device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def batch_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return values((4, 100), 10 + rank).to(dtype).requires_grad_()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def mean_over_ranks(model: nn.Module, world_size: int) -> dict[str, Tensor]:
    """Each gradient of an unsharded model, averaged over the ranks' batches."""
    means = {}
    for name, grad in gradients(model).items():
        total = grad.clone()
        dist.all_reduce(total)
        means[name] = total / world_size
    return means


def check_gradient(found: Any, expected: Tensor, where: Any) -> None:
    assert isinstance(found, DTensor) and type(found.to_local()) is Tensor, where
    full = found.full_tensor()
    if expected.dtype is torch.float32:
        assert torch.equal(full, expected), where
    else:
        assert (full - expected).norm() <= 0.02 * expected.float().norm(), where


def check_forward_and_backward(rank: int, world_size: int, subject: Any) -> bool:
    """Outputs and gradients of the input are those of one process to the bit, gradients of parameters their mean."""
    for rows in subject.fsdp_rows:
        for dtype in (torch.float32, torch.bfloat16):
            where = (rows, dtype)
            whole = TwoLinears(subject, rows).to(dtype)
            x = batch_of(rank, dtype)
            expected = whole(x)
            expected.float().square().sum().backward()
            expected_x, expected_grads = x.grad, mean_over_ranks(whole, world_size)
            assert expected_x is not None
            model = shard(TwoLinears(subject, rows), None if dtype is torch.float32 else dtype)
            for _ in range(2):
                x = batch_of(rank, torch.float32)
                y = model(x)
                y.float().square().sum().backward()
                assert same_bits(y, expected), where
                assert x.grad is not None and same_bits(x.grad, expected_x.to(x.dtype)), where
                found = gradients(model)
                assert found.keys() == expected_grads.keys(), where
                for name, grad in found.items():
                    check_gradient(grad, expected_grads[name], (*where, name))
                model.zero_grad()
    return True


class FSDP2Contract(Subject):
    """A model of two weights under `fully_shard`, with rows that divide and rows that do not, in float32 and gathered
    as bfloat16."""

    def test_two_processes_give_the_results_of_one(self) -> None:
        assert launch(check_forward_and_backward, 2, self) == [True, True]
