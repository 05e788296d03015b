"""The parts of a low-bit tensor as plain tensors, and a tensor from its parts, or from plain values. For a sharded
tensor both are DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.numerics.code_range import FLOATS
from lowbit.numerics.packing import as_bytes
from lowbit.numerics.sharded import is_dtensor
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import largest_over_ranks, local, placed, placed_as
from lowbit.tensor.core.pickled import describe_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def split(value: Tensor) -> dict[str, Tensor] | None:
    """The inner tensors of a low-bit tensor, or DTensors of them, by name; their memory is shared.

    None if the inner tensors and `describe` do not describe the tensor: a flattened view, a DTensor that is transposed
    or whose shards share scales.
    """
    own = local(value)
    if own.flat_from is not None or (own.transposed and is_dtensor(value)):
        return None
    inner = {name: t.detach() for name, t in own.inner_tensors().items()}
    if not is_dtensor(value):
        return inner
    placements = placements_of_parts(value)
    if placements is None:
        return None
    shapes = own.inner_shapes(value.shape)
    return {name: placed(value, t, placements[name], shapes[name][0]) for name, t in inner.items()}


def placements_of_parts(value: DTensor) -> dict[str, list[Placement]] | None:
    """Placements of the inner tensors of a DTensor over a low-bit tensor, or None. They are the same on all ranks."""
    own: Any = value.to_local()
    shape = tuple(value.shape)
    dims = [getattr(placement, "dim", None) for placement in value.placements]
    found: dict[str, list[Placement]] = {name: [] for name in own.inner_tensors()}
    for placement, dim, ranks in zip(value.placements, dims, value.device_mesh.shape, strict=True):
        for name, places in found.items():
            place: Placement | None = None
            if placement.is_replicate():
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
    from torch.distributed.tensor import Replicate

    try:
        return placement if name in own._row_attrs() else Replicate()
    except NotImplementedError:  # blocks of several rows share a scale
        return None


def _along(
    own: LowbitTensor, name: str, shape: tuple[int, ...], placement: Placement, dim: int, ranks: int
) -> Placement | None:
    """The placement of an inner tensor for a shard along `dim` > 0, from the lengths of every rank's inner tensor."""
    from torch.distributed.tensor import Replicate

    if dim >= len(own.inner_shapes(shape)[name][0]):  # one for the whole tensor
        return Replicate()

    def inner(length: int) -> int:
        return own.inner_shapes((*shape[:dim], length, *shape[dim + 1 :]))[name][0][dim]

    held = [inner(length) for length in _lengths(shape[dim], ranks)]
    whole = inner(shape[dim])
    if held == _lengths(whole, ranks):
        return placement
    return Replicate() if held == [whole] * ranks else None


def _lengths(size: int, ranks: int) -> list[int]:
    """Lengths of the parts of a dimension that Shard splits."""
    step = -(-size // ranks)
    edges = [min(rank * step, size) for rank in range(ranks + 1)]
    return [end - start for start, end in pairwise(edges)]


def join(param: Any, given: Mapping[str, Any], key: str, *, keep_dtypes: bool) -> Tensor:
    """A low-bit tensor like `param` over the inner tensors `given` by name, without copies.

    Inner tensors of a sharded parameter are DTensors as `split` gives them, or whole on every rank. With `keep_dtypes`
    scales must have the dtype that `param` has.

    Raises ValueError, with `key` as the parameter's name, for parts that are missing, unknown or misshapen.
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
        is_of_kind = not own.is_floating(name) or t.dtype in FLOATS
        if found != wanted or not is_of_kind:
            what = "size mismatch for " if wanted is not None and found[0] != wanted[0] else ""
            raise ValueError(
                f"{what}{key}.{name}: it is {describe_part(*found)}, expected "
                f"{describe_part(*wanted) if wanted else 'none'}; the model has {like!r}: prepare it with the scheme, "
                "group size and dtype that were saved"
            )
    for name in others:
        if given[name].device != given[first].device:
            raise ValueError(
                f"{key}.{name} is on {given[name].device}, {key}.{first} on {given[first].device}; accepted: one device"
            )
    parts = {name: _own_part(t, param, name, key) for name, t in given.items()}
    tensors = {name: parts.get(name) for name in own.tensor_attrs}
    return placed_as(param, own._with(tensors))


def _own_part(t: Tensor, param: Tensor, name: str, key: str) -> Tensor:
    """This rank's part of inner tensor `name`, dense and contiguous."""
    if not is_dtensor(param):
        if is_dtensor(t):
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
    if not is_dtensor(t):
        from torch.distributed.tensor import distribute_tensor

        shard = distribute_tensor(
            as_bytes(t.detach()), param.device_mesh, wanted, src_data_rank=None
        )
        return shard.to_local().contiguous().view(t.dtype)
    if t.device_mesh != param.device_mesh or list(t.placements) != list(wanted):
        raise ValueError(
            f"{key}.{name} is placed as {t.placements} on {t.device_mesh}; expected {tuple(wanted)} on "
            f"{param.device_mesh}"
        )
    return t.to_local().contiguous()


def is_plain_for(param: Tensor, value: Any) -> bool:
    """True for plain values of the shape of `param`, which are also sharded as it is."""
    return (
        isinstance(value, Tensor)
        and not isinstance(local(value), LowbitTensor)
        and value.shape == param.shape
        and getattr(value, "placements", None) == getattr(param, "placements", None)
        and not (local(value).is_meta or local(param).is_meta)
    )


def share_over_ranks(param: Tensor) -> bool:
    """True for a sharded weight whose ranks have a part of the scales in common, such as the scale of a whole
    tensor."""
    if not is_dtensor(param):
        return False
    places = placements_of_parts(param) or {}
    others = ("codes", "order", "place")
    scales = [
        where for n, where in places.items() if not n.startswith("input_") and n not in others
    ]
    return any(where != list(param.placements) for where in scales)


def holds(param: Tensor, value: Tensor) -> bool:
    """True if `param` has these plain values already (`LowbitTensor.holds`), on all ranks where both are sharded: a
    collective then."""
    like: Any = local(param)
    own = local(value).to(like.device)
    changes = own.numel() > 0 and not like.holds(own)
    if not is_dtensor(param):
        return not changes
    mesh = param.device_mesh
    found = torch.tensor(float(changes), device=mesh.device_type)
    return not bool(largest_over_ranks(found, mesh))


def encoded(param: Tensor, whole: Tensor, key: str, joint: Tensor | None = None) -> Tensor:
    """Plain values as a weight that is stored like `param`, and split like it.

    Args:
        param: a low-bit weight, or a DTensor over one.
        whole: of the shape of `param`, the same on all ranks.
        key: its name, for errors.
        joint: what its scales share with siblings (`Spec.joint_part`).

    Raises ValueError as `_encode`.
    """
    like: Any = local(param)._with(shape=tuple(param.shape))
    found = like._encode(whole) if joint is None else like._encode(whole, joint)
    parts = {name: t for name, t in found.items() if t is not None}
    return join(param, parts, key, keep_dtypes=True) if is_dtensor(param) else like._with(parts)


def gathered(value: Any) -> Tensor:
    """All of a DTensor, on the device of this rank's part: a collective of all ranks. Another tensor as it is."""
    if not is_dtensor(value):
        return value
    own = value.to_local()
    moved = own.to(value.device_mesh.device_type)
    whole = placed(value, moved, value.placements, value.shape, value.stride()).full_tensor()
    return whole.to(own.device)
