"""A low-bit tensor taken apart into its inner tensors, and put together from them again; sharded ones too.

A DTensor over a low-bit tensor is split into DTensors of its inner tensors. Each is placed so that this rank's part is
exactly the inner tensor of this rank's shard: where the inner tensor runs along the sharded dimension it is sharded as
the parameter is, and where it belongs to all of that dimension (one scale for all rows) it is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.fsdp import as_bytes
from lowbit.tensor.pickled import FLOATS


def local(value: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def placed_as(value: Any, own: Tensor) -> Tensor:
    """`own` as this rank's part of a DTensor like `value`, or as it is where `value` is no DTensor."""
    if not isinstance(value, DTensor):
        return own
    return _dtensor(own, value, value.placements, tuple(value.shape), value.stride())


def _dtensor(own: Tensor, like: DTensor, placements: Any, shape: Any, stride: Any) -> DTensor:
    return DTensor.from_local(
        own,
        like.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def split(value: Tensor) -> dict[str, Tensor] | None:
    """The inner tensors of a low-bit tensor, or DTensors of them, by name; their memory is shared.

    None if the inner tensors alone do not describe the tensor: a transposed or flattened view, a DTensor whose shards
    share scales.
    """
    own = local(value)
    if getattr(own, "transposed", False) or own.flat_from is not None:
        return None
    inner = {name: t.detach() for name, t in own.inner_tensors().items()}
    if not isinstance(value, DTensor):
        return inner
    placements = placements_of_parts(value)
    if placements is None:
        return None
    shapes = own.inner_shapes(value.shape)
    return {
        name: _dtensor(t, value, placements[name], shapes[name][0], _strides(shapes[name][0]))
        for name, t in inner.items()
    }


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def placements_of_parts(value: DTensor) -> dict[str, list[Placement]] | None:
    """Where the inner tensors of a DTensor over a low-bit tensor are placed, or None. It is the same on all ranks."""
    own: Any = value.to_local()
    shape = tuple(value.shape)
    dims = [getattr(placement, "dim", None) for placement in value.placements]
    found: dict[str, list[Placement]] = {name: [] for name in own.inner_tensors()}
    for placement, dim, ranks in zip(value.placements, dims, value.device_mesh.shape, strict=True):
        for name, places in found.items():
            place: Placement | None = None
            if isinstance(placement, Replicate):
                place = placement
            elif dim == 0:
                place = _along_rows(own, name, placement)
            elif dim is not None and dims.count(dim) == 1:
                place = _along(own, name, shape, placement, dim, ranks)
            if place is None:
                return None
            places.append(place)
    return found


def _along_rows(own: LowbitTensor, name: str, placement: Placement) -> Placement | None:
    try:
        return placement if name in own._row_attrs() else Replicate()
    except NotImplementedError:  # blocks of several rows share a scale
        return None


def _along(
    own: LowbitTensor,
    name: str,
    shape: tuple[int, ...],
    placement: Placement,
    dim: int,
    ranks: int,
) -> Placement | None:
    """Sharded along `dim` > 0: the lengths of every rank's inner tensor decide."""

    def inner(length: int) -> int:
        return own.inner_shapes((*shape[:dim], length, *shape[dim + 1 :]))[name][0][dim]

    held = [inner(length) for length in _lengths(shape[dim], ranks)]
    whole = inner(shape[dim])
    if held == _lengths(whole, ranks):
        return placement
    return Replicate() if held == [whole] * ranks else None


def _lengths(size: int, ranks: int) -> list[int]:
    """What each rank gets of a dimension that Shard splits."""
    step = -(-size // ranks)
    edges = [min(rank * step, size) for rank in range(ranks + 1)]
    return [end - start for start, end in pairwise(edges)]


def join(param: Any, given: Mapping[str, Any], key: str, *, keep_dtypes: bool) -> Tensor:
    """A low-bit tensor stored as `param` is, of the inner tensors `given` by name; nothing is copied.

    Inner tensors of a sharded parameter are DTensors as `split` gives them, or whole on every rank. With `keep_dtypes`
    scales must have the dtype that `param` has.

    Raises ValueError, with `key` as the parameter's name, for what is missing, too much or misshapen.
    """
    own, shape = local(param), tuple(param.shape)
    like = own._with(shape=shape)
    for name, t in given.items():
        if not isinstance(t, Tensor) or isinstance(local(t), LowbitTensor):
            raise ValueError(f"{key}.{name} is {t!r:.80}; accepted: a plain tensor")
    whole = like._with({name: given.get(name) for name in own.tensor_attrs}, shape)
    needed = ({"codes", "scale"} & {*own.tensor_attrs}) | {*like.inner_tensors()}
    expected = whole.inner_shapes(shape) if needed <= given.keys() else {}
    if lacking := sorted((needed | expected.keys()) - given.keys()):
        raise ValueError(
            f"{key} has {', '.join(given)} and lacks {', '.join(lacking)}; {like!r} takes all of its parts or none"
        )
    if keep_dtypes and "scale" in expected:
        expected["scale"] = expected["scale"][0], own.scale.dtype
    first, *others = given
    for name, t in given.items():
        found, wanted = (tuple(t.shape), t.dtype), expected.get(name)
        if found != wanted or (name == "scale" and t.dtype not in FLOATS):
            what = "size mismatch for " if wanted is not None and found[0] != wanted[0] else ""
            raise ValueError(
                f"{what}{key}.{name}: it is {_said(*found)}, expected {_said(*wanted) if wanted else 'none'}; the "
                f"model has {like!r}: prepare it with the scheme, group size and dtype that were saved"
            )
    for name in others:
        if given[name].device != given[first].device:
            raise ValueError(
                f"{key}.{name} is on {given[name].device}, {key}.{first} on {given[first].device}; accepted: one device"
            )
    parts = {name: _own_part(t, param, name, key) for name, t in given.items()}
    tensors = {name: parts.get(name) for name in own.tensor_attrs}
    return placed_as(param, own._with(tensors))


def _said(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')}"


def _own_part(t: Tensor, param: Tensor, name: str, key: str) -> Tensor:
    """This rank's part of inner tensor `name`, dense and contiguous."""
    if not isinstance(param, DTensor):
        if isinstance(t, DTensor):
            raise ValueError(
                f"{key}.{name} is a DTensor, and the model is not sharded: gather it by full_tensor()"
            )
        return t.detach().contiguous()
    placements = placements_of_parts(param)
    wanted = None if placements is None else placements.get(name, placements.get("scale"))
    if wanted is None:
        raise ValueError(
            f"{key} is placed as {param.placements}, where parts share scales: load it whole"
        )
    if not isinstance(t, DTensor):
        placed = distribute_tensor(
            as_bytes(t.detach()), param.device_mesh, wanted, src_data_rank=None
        )
        return placed.to_local().contiguous().view(t.dtype)
    if t.device_mesh != param.device_mesh or list(t.placements) != list(wanted):
        raise ValueError(
            f"{key}.{name} is placed as {t.placements} on {t.device_mesh}; expected {tuple(wanted)} on "
            f"{param.device_mesh}"
        )
    return t.to_local().contiguous()
