"""Training through accelerate's FSDP2 plugin on CPU processes, and the same steps in one process without it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

import lowbit as lb

WAYS = {
    "plain": lambda m: None,
    "qat": lambda m: lb.qat.prepare_(m, lb.Int4WeightOnly(32)),
    "int8 weight": lambda m: lb.train.prepare_(m, lb.Int8Weight()),
    "int8 products": lambda m: lb.train.prepare_(m, lb.Int8MixedPrecision(always=True)),
    "frozen": lambda m: lb.quantize_(m, {"0": lb.Int4WeightOnly(32), "*": None}),
}
STEPS = 3


def made(way: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64), nn.SiLU(), nn.Linear(64, 64)
    )
    WAYS[way](model)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return lb.optim.AdamW8bit(trained, lr=1e-2)


def batch(step: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def sharding(rank: int, world: int, efficient: bool) -> Any:
    """An Accelerator with its FSDP2 plugin.

    accelerate turns the plugin on for devices other than the CPU only, so here the test does it.
    """
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }  # a process group is there already
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=efficient,
        state_dict_type="SHARDED_STATE_DICT",
    )
    tool = Accelerator(cpu=True, fsdp_plugin=plugin)
    for state in (tool.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    tool.state.fsdp_plugin = plugin
    return tool


def _steps(tool: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = batch(
            step
        )  # the same on all ranks, so the mean of their gradients is that of one process
        tool.backward((model(x) - x).square().mean())
        tool.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


def run(rank: int, world: int, way: str, efficient: bool, folder: str) -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule

    tool = sharding(rank, world, efficient)
    model = made(way)
    model, optimizer = tool.prepare(model, optimizer_of(model))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    sharded = sum(isinstance(m, FSDPModule) for m in model.modules())
    _steps(tool, model, optimizer, range(STEPS))
    tool.save_state(folder)
    _steps(tool, model, optimizer, range(STEPS, 2 * STEPS))
    first = whole(model)

    again = made(way, seed=1)
    again, optimizer = tool.prepare(again, optimizer_of(again))
    for module in again.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    tool._models, tool._optimizers = [again], [optimizer]
    tool.load_state(folder)
    _steps(tool, again, optimizer, range(STEPS, 2 * STEPS))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [name for name, p in again.named_parameters() if p.requires_grad]
    return {
        "sharded": sharded,
        "first": first,
        "resumed": whole(again),
        "trained": trained,
        "in optimizer": [name for name, p in again.named_parameters() if id(p) in held],
    }
