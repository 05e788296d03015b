"""A low-bit tensor in the form in which FSDP2 sends it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lowbit.tensor.core.fsdp import Gather
from lowbit.tensor.trained.bitnet import BitNetTensor
from lowbit.tensor.trained.learned_scales import is_learned


def as_sent(
    shard: Any, module: nn.Module | None = None, ranks: int = 1, shape: torch.Size | None = None
) -> Any:
    """`shard` as one of `ranks` sends it. Itself where it travels as it is, and where its scale is that of other ranks
    (BitNet), or of a module that is not given.

    Args:
        module: the one that holds learned scales.
        shape: of the whole weight; None: of the shard.
    """
    if isinstance(shard, BitNetTensor) or (is_learned(shard) and not module):
        return shard
    whole = shard.shape if shape is None else shape
    with torch._C.DisableTorchFunctionSubclass():
        wire = shard._on_the_wire(Gather(None, ranks, whole, module, MixedPrecisionPolicy()))
        return shard if wire is None else wire.over(shard, wire.tensors, shard.shape, shard.dtype)
