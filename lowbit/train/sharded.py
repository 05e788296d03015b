"""A rank's knowledge of a sharded weight besides its own part: the offset of the part, the scale of the whole."""

from __future__ import annotations

import torch
from torch import nn

from lowbit.convert import check_module
from lowbit.numerics.sharded import held_locally
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.trained.bitnet import BitNetTensor, precompute_scales
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.train.prepared import was_prepared

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing put into names."""


@torch.no_grad()
def locate_(model: nn.Module) -> None:
    """Tell the int8 weights of `model` where their parts lie, after the model was sharded or left meta.

    Updates ask for this call in two cases: a model that was prepared on meta (`model.to_empty(...)` first; loading a
    checkpoint of int8 weights does the same), and weights other than `nn.Linear`'s whose columns are split over ranks.

    Raises NotImplementedError for columns split along two dimensions of a mesh.
    """
    check_module(model)
    for name, param in model.named_parameters():
        own = held_locally(param)
        if isinstance(own, TrainableTensor) and not own.is_meta:
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            own.locate(param, name)


@torch.no_grad()
def precompute_bitnet_scale(model: nn.Module) -> None:
    """Compute the scales of all sharded BitNet weights of `model` in one reduction, instead of one for each weight that
    FSDP2 gathers.

        optimizer.step()
        train.precompute_bitnet_scale(model)        # on all ranks, before the next forward

    Call it after every optimizer step; the scale of a weight that has changed since is not used. FSDP2 together with
    tensor parallelism needs it, since a gather knows only one of the two.

    Raises ValueError if the model has no such weights, unless `prepare_` left all weights alone.
    """
    check_module(model)
    params = list(model.parameters())
    own = [held_locally(param) for param in params]
    has_others = any(isinstance(t, LowbitTensor) for t in own)
    has_any = any(isinstance(t, BitNetTensor) for t in own)
    if not has_any and (has_others or not was_prepared(model)):
        raise ValueError(
            f"{type(model).__name__} has no BitNet weights; call lowbit.train.prepare_(model, BitNet()) before "
            "sharding it"
        )
    precompute_scales(params)
