"""Let FSDP2 gather a weight in another form than before.

FSDP2 keeps what its first gather of a parameter made: the buffers, of the sizes and dtypes of that gather, and the
whole parameter. A prepared weight travels as codes of a width that depends on its scheme, and in high precision while
its rounding is off. After a change of either, FSDP2 must forget that gather. torch has no public call for this.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.numerics.sharded import held_locally, is_fsdp_module


def reshard(model: nn.Module) -> None:
    """Make the parameters of all FSDP2 modules of `model` their shards again. Outside of forward and backward."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def forget_gathered(model: nn.Module, shards: set[int]) -> None:
    """Drop what FSDP2 keeps of earlier gathers of these parameters. Call `reshard` first.

    Args:
        shards: ids of the local tensors of the sharded parameters.
    """
    for module in model.modules():
        if not is_fsdp_module(module):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group at most
        for group in [state._fsdp_param_group] if groups is None else groups:
            for param in group.fsdp_params if group is not None else ():
                if id(held_locally(param.sharded_param)) in shards:
                    _forget(param)


def _forget(param: Any) -> None:
    whole = getattr(param, "_unsharded_param", None)
    if whole is None:
        return
    if whole.grad is not None:  # of backward passes that did not synchronize gradients
        if param.unsharded_accumulated_grad is None:
            param.unsharded_accumulated_grad = whole.grad
        else:
            param.unsharded_accumulated_grad += whole.grad
    del param._unsharded_param
    param.all_gather_outputs, param._unsharded_inner_tensors = [], []
