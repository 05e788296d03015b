"""The scale of a sharded BitNet weight: the mean magnitude of all of it, reduced over the ranks that hold its parts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lowbit.convert import check_module
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.bitnet import BitNetTensor, GatheredBitNet
from lowbit.tensor.sharded_linear import split_dims
from lowbit.tensor.ternary import magnitude, scale_of
from lowbit.train.prepared import was_prepared


@torch.no_grad()
def precompute_bitnet_scale(model: nn.Module) -> None:
    """Compute the scales of all sharded BitNet weights of `model` at once: one reduction, where FSDP2's gathers would
    make one for each weight.

        optimizer.step()
        train.precompute_bitnet_scale(model)        # on all ranks, before the next forward

    Call it after every optimizer step; a scale of a weight that has changed since is not used. Under FSDP2 together
    with tensor parallelism it is needed, since a gather knows only of one of the two.

    Raises ValueError if the model has no such weights, unless `prepare_` left all alone.
    """
    check_module(model)
    found: defaultdict[Any, list[Any]] = defaultdict(list)
    has_any = has_others = False
    for param in model.parameters():
        own: Any = getattr(param, "_local_tensor", param)  # itself, no alias
        has_any |= isinstance(own, BitNetTensor)
        has_others |= isinstance(own, LowbitTensor)
        is_shard = isinstance(own, BitNetTensor) and not isinstance(own, GatheredBitNet)
        if isinstance(param, DTensor) and is_shard:
            found[param.device_mesh, split_dims(param)].append(own)
    if not has_any and (has_others or not was_prepared(model)):
        raise ValueError(
            f"{type(model).__name__} has no BitNet weights; call lowbit.train.prepare_(model, BitNet()) before "
            "sharding it"
        )
    for (mesh, dims), members in found.items():
        own_sums = [magnitude(own.weight) for own in members]
        sums = torch.cat([s.view(-1) for s in own_sums]).to(mesh.device_type)
        for dim in dims:
            dist.all_reduce(sums, group=mesh.get_group(dim))
        parts = sums.to(own_sums[0].device).split([s.numel() for s in own_sums])
        for own, total, like in zip(members, parts, own_sums, strict=True):
            n, k = own.matrix
            own.remember_scale(scale_of(total.view(like.shape), n * k))
