"""The local part of a DTensor, and a DTensor placed like another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lowbit_kernels.library import contiguous_strides


def local(value: Any) -> Any:
    """This rank's part of a DTensor, an alias of it under no_grad; anything else unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def held_locally(value: Any) -> Any:
    """The very tensor that a DTensor holds, so that attributes set on it stay; anything else unchanged."""
    return value._local_tensor if isinstance(value, DTensor) else value


def placed_as(value: Any, own: Tensor) -> Tensor:
    """`own` as this rank's part of a DTensor of the shape and placement of `value`; unchanged where `value` is no
    DTensor."""
    if not isinstance(value, DTensor):
        return own
    return placed(value, own, value.placements, value.shape, value.stride())


def placed(
    like: DTensor,
    own: Tensor,
    placements: Any,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """`own` as this rank's part of a DTensor of this shape on the mesh of `like`; `stride`: None for contiguous."""
    mesh, size = like.device_mesh, torch.Size(shape)
    strides = contiguous_strides(size) if stride is None else tuple(stride)
    if own.device.type not in (mesh.device_type, "meta"):
        # FSDP2 offloads parts to host memory, on a mesh of GPUs. from_local would move them to the GPU.
        spec = DTensorSpec(
            mesh, tuple(placements), tensor_meta=TensorMeta(size, strides, own.dtype)
        )
        return DTensor(own, spec, requires_grad=False)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=size, stride=strides)
