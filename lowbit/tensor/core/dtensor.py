"""The local part of a DTensor, and a DTensor placed like another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.numerics.sharded import is_dtensor
from lowbit_kernels.runtime.library import contiguous_strides

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def local(value: Any) -> Any:
    """This rank's part of a DTensor, an alias of it under no_grad; anything else unchanged."""
    if type(value) in _PLAIN:  # a step of an optimizer asks often
        return value
    return value.to_local() if is_dtensor(value) else value


_PLAIN = Tensor, torch.nn.Parameter


def placed_as(value: Any, own: Tensor) -> Tensor:
    """`own` as this rank's part of a DTensor of the shape and placement of `value`; unchanged where `value` is not a
    DTensor."""
    if not is_dtensor(value):
        return own
    return placed(value, own, value.placements, value.shape, value.stride())


def own_region(param: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this rank's part of `param`, and the index in the whole at which the part begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)


def split_as(value: Any, whole: Tensor) -> Tensor:
    """`whole`, which every rank has, split as the DTensor `value` is; unchanged where `value` is not a DTensor."""
    if not is_dtensor(value):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)


def replicated(own: Tensor, mesh: Any) -> DTensor:
    """A DTensor of `own`, which every rank of the mesh has as a whole."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)


def by_rows(placements: Sequence[Placement]) -> bool:
    """True if a part consists of whole rows: each dimension of the mesh splits dimension 0, or nothing."""
    from torch.distributed.tensor import Replicate, Shard

    return all(p in (Shard(0), Replicate()) for p in placements)


def placed(
    like: DTensor,
    own: Tensor,
    placements: Any,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """`own` as this rank's part of a DTensor of this shape on the mesh of `like`; `stride`: None for contiguous."""
    from torch.distributed.tensor import DTensor

    mesh, size = like.device_mesh, torch.Size(shape)
    strides = contiguous_strides(size) if stride is None else tuple(stride)
    if own.device.type not in (mesh.device_type, "meta"):
        # FSDP2 offloads parts to host memory, on a mesh of GPUs. from_local would move them to the GPU.
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        spec = DTensorSpec(
            mesh, tuple(placements), tensor_meta=TensorMeta(size, strides, own.dtype)
        )
        return DTensor(own, spec, requires_grad=False)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=size, stride=strides)


def largest_over_ranks(own: Tensor, mesh: Any) -> Tensor:
    """The elementwise maximum of the tensors that all ranks of the mesh give: a collective."""
    found = own.float()  # gloo reduces no 16-bit floats
    found = found.clone() if found is own else found
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))
    return found.to(own.dtype)
