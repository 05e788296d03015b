"""The state dict of a prepared model is that of the plain one: names, plain tensors, their memory shared.

So checkpoints know nothing of how a model was trained: `torch.save`, `lowbit.save`, torch.distributed.checkpoint and
others' loaders write and read plain weights, and a model prepared otherwise, or not at all, loads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.trainable import TrainableTensor


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _placed_as(value: Any, local: Tensor) -> Tensor:
    """`local` as `value` is: this rank's part of a DTensor, or itself."""
    if not isinstance(value, DTensor):
        return local
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def has_plain_memory(value: Any) -> bool:
    own = _local(value)
    return isinstance(own, LowbitTensor) and own.updated_in_place() is not None


def hand_out_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook after `state_dict`. Parameters themselves (keep_vars=True) stay."""
    with torch.no_grad():
        for name in module._parameters:
            value = state_dict.get(prefix + name)
            if not isinstance(value, nn.Parameter) and has_plain_memory(value):
                state_dict[prefix + name] = _placed_as(value, _local(value).updated_in_place())


def take_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """A hook before loading with assign=True, by which plain tensors would take the place of prepared weights."""
    if not metadata.get("assign_to_params_buffers"):
        return
    with torch.no_grad():
        for name, param in module._parameters.items():
            value = state_dict.get(prefix + name)
            given, own = _local(value), _local(param)
            if param is None or not isinstance(value, Tensor) or isinstance(given, LowbitTensor):
                continue
            if value.shape != param.shape:  # load_state_dict tells of it
                continue
            if isinstance(own, TrainableTensor):
                state_dict[prefix + name] = _placed_as(value, own.over(given))
            elif isinstance(own, Int8WeightTensor):
                made = torch.empty_like(own, device=given.device if own.is_meta else None)
                state_dict[prefix + name] = _placed_as(value, made.copy_(given))


def register(module: nn.Module) -> None:
    """Once a module, whichever of its weights are prepared, and when."""
    if hand_out_plain not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(hand_out_plain)
        module.register_load_state_dict_pre_hook(take_plain)


def unregister(module: nn.Module) -> None:
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in (hand_out_plain, take_plain):
                del hooks[key]
