"""Where the parts of a sharded int8 weight lie: what its updates have to know beyond the part itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lowbit.convert import check_module
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.sharded_linear import share_scales

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""


@torch.no_grad()
def locate_(model: nn.Module) -> None:
    """Tell the int8 weights of `model` where their parts lie, after it has been sharded, or taken from meta to memory.

    Needed in two cases, which updates ask for: a model that was prepared on meta (`model.to_empty(...)` first; loading
    a checkpoint of int8 weights does it too), and weights other than `nn.Linear`'s whose columns are split over ranks.

    Raises NotImplementedError for columns split along two dimensions of a mesh.
    """
    check_module(model)
    for name, param in model.named_parameters():
        own: Any = getattr(param, "_local_tensor", param)  # itself, no alias
        if isinstance(own, Int8WeightTensor) and not own.is_meta:
            if isinstance(param, DTensor):
                share_scales(param)
            if own.place is None:
                for wrapper in _WRAPPERS:
                    name = name.replace(wrapper, "")
                own.put_at(name, _rows_of(param))


def _rows_of(param: Any) -> Tensor | None:
    """Indices in the whole weight of the rows that this rank has: [..., N, 1]; None: all."""
    if not isinstance(param, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    rows = torch.zeros((), dtype=torch.int64)
    for dim in range(param.ndim - 1):
        stride = math.prod(param.shape[dim + 1 : -1])
        rows = rows.unsqueeze(-1) + (torch.arange(shape[dim]) + offset[dim]) * stride
    return rows.unsqueeze(-1)
