"""Indexing of a low-bit matrix: `weight[i]` reads one row as plain values, `weight[i] = values` writes it.

A row of a packed tensor is a dequantized copy. Writes to it would be lost, so it is a `RowCopy`, which refuses them. A
weight that keeps its high-precision values returns views of these instead.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit.numerics.packing import as_bytes

READS = {
    *(Tensor.__getitem__, Tensor.__iter__),
    *(Tensor.select, torch.select, Tensor.unbind, torch.unbind),
}
"""The functions that return rows."""


class RowCopy(Tensor):
    """The values of one row. Operations on it return ordinary tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _has_row(kwargs.get("out")) or (writes(func) and args and _has_row(args[0])):
            raise NotImplementedError(
                "a row of a low-bit tensor is a copy, and writing to it would not reach the tensor; accepted: "
                "tensor[i] = values, or row.clone() for values of your own"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(func, torch._ops.OpOverload):
                # torch.compile's analysis takes no subclasses
                args, kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
            result = func(*args, **kwargs)
            if func is Tensor.numpy:
                result.flags.writeable = False
            if isinstance(result, Tensor) and any(_share(result, a) for a in args):
                return result.as_subclass(RowCopy)
            return result

    def __format__(self, spec: str) -> str:
        """Formats one number as Python does, as a plain tensor."""
        return object.__format__(self, spec) if self.ndim else format(self.item(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone())


def _plain(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, RowCopy) else x


def _has_row(x: Any) -> bool:
    return any(map(_has_row, x)) if isinstance(x, list | tuple) else isinstance(x, RowCopy)


_NEUTRAL = {"requires_grad_", "retain_grad"}
"""Methods that end in an underscore and change no value."""


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def writes(func: Any) -> bool:
    """True if a function of torch, or the setter of `data`, changes its first argument."""
    if func == _SET_DATA:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _IN_PLACE)
    return name.endswith("_") and name not in _NEUTRAL


_IN_PLACE = {
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
}


def _share(result: Tensor, other: Any) -> bool:
    if not isinstance(other, RowCopy) or torch.compiler.is_compiling():
        return False
    is_plain = type(result) in (Tensor, RowCopy) and result.layout is torch.strided
    if result.is_meta or not is_plain:
        return False
    return result.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def as_copies(tensor: Any, result: Any) -> Any:
    """`result` of reading a low-bit tensor. Rows that share no memory with that tensor become `RowCopy`."""
    if torch.compiler.is_compiling():
        return result
    if isinstance(result, list | tuple):
        return type(result)(as_copies(tensor, each) for each in result)
    if not isinstance(result, Tensor):  # the iterator of Tensor.__iter__
        return iter([as_copies(tensor, each) for each in result])
    if type(result) is not Tensor:
        return result
    inner = [t for t in tensor.inner_tensors().values() if type(t) is Tensor]
    memory = {t.untyped_storage().data_ptr() for t in inner}
    return result if result.untyped_storage().data_ptr() in memory else result.as_subclass(RowCopy)


def is_advanced(index: Any) -> bool:
    """True for masks, lists and tensors of positions, of whose elements torch makes a copy."""
    own = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(i, list) or (isinstance(i, Tensor) and (i.ndim > 0 or i.dtype is torch.bool))
        for i in own
    )


def index_in_graph(index: Any) -> Tensor | None:
    """In code that torch.compile traces, a tensor of one integer as an index [1], which the graph does not read; None
    for another index, and in eager code."""
    if not torch.compiler.is_compiling() or type(index) is not Tensor or index.ndim:
        return None
    return None if index.is_floating_point() or index.dtype is torch.bool else index.reshape(1)


def write(tensor: Any, index: Any, value: Any) -> bool:
    """Run `tensor[index] = value` if `index` consists of integers, slices and an ellipsis. Returns whether it does.

    Raises IndexError for an integer out of range, NotImplementedError for a part that shares scales with the rest.
    """
    cuts = _cuts(tensor, index if isinstance(index, tuple) else (index,))
    if cuts is None:
        return False
    part, kept = tensor, []
    for dim, (cut, stays) in enumerate(cuts):
        part = part[(*[slice(None)] * dim, cut)]
        kept += [part.shape[dim]] if stays else []
    if not isinstance(value, type(tensor)):
        plain = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
        value = plain.expand(kept).reshape(part.shape)
    part.copy_(value)
    return True


def _cuts(tensor: Tensor, index: tuple[Any, ...]) -> list[tuple[slice, bool]] | None:
    """For each dimension its slice, and whether the result keeps the dimension; None for masks and lists."""
    if any(each is Ellipsis for each in index):
        at = next(i for i, each in enumerate(index) if each is Ellipsis)
        filler = [slice(None)] * (tensor.ndim - len(index) + 1)
        index = (*index[:at], *filler, *index[at + 1 :])
    if len(index) > tensor.ndim:
        return None
    cuts = []
    for each, size in zip(index, tensor.shape, strict=False):
        position = _integer(each)
        if position is not None:
            if not -size <= position < size:
                raise IndexError(
                    f"index {position} is out of range for a dimension of {size} of {tensor!r}"
                )
            position %= size
            cuts.append((slice(position, position + 1), False))
        elif isinstance(each, slice):
            cuts.append((each, True))
        else:
            return None
    return cuts + [(slice(None), True)] * (tensor.ndim - len(cuts))


def as_view(whole: Any, view: Any) -> Any:
    """`view`, a view of `whole`, which then knows what it shares with other parts of `whole`. A plain tensor, such
    as the values of a convolution's filter, shares nothing."""
    if type(view) is Tensor:
        return view
    shares = {**whole.shares}
    if 0 < view.numel() < whole.numel():
        own = whole.inner_tensors()
        shared = [n for n, t in view.inner_tensors().items() if t.numel() == own[n].numel()]
        shares = {**dict.fromkeys(shared, whole), **shares}
    if shares:
        view.shares = _Shared(shares)
    return view


class _Shared(dict[str, Any]):
    """`LowbitTensor.shares` of a view. A deep copy has memory of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {}


def check_part(part: Any, found: Mapping[str, Any] | None = None) -> None:
    """Raise NotImplementedError for a write to a part of a tensor that changes values outside of it, since they share
    scales. Zeros outside do no harm: FSDP2 pads shards with them.

    Args:
        found: the inner tensors to be written, by name; None: all but those of the input change.
    """
    if part.is_meta:
        return
    changed = {name: whole for name, whole in part.shares.items() if not name.startswith("input_")}
    is_traced = torch.compiler.is_compiling()
    if found is not None and not is_traced:
        own = part.inner_tensors()
        changed = {n: w for n, w in part.shares.items() if not _equal(own[n], found[n])}
    if not is_traced and getattr(part, "zero_point", None) is None:
        changed = {n: whole for n, whole in changed.items() if _nonzero(whole) > _nonzero(part)}
    if changed:
        raise part._unsupported(
            f"writing to it, a part of a tensor of shape {tuple(next(iter(changed.values())).shape)} that shares its "
            f"{' and '.join(changed)} with the rest (accepted: values that these give exactly, such as zeros, or those "
            "of the whole tensor)"
        )


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(as_bytes(a), as_bytes(b.to(a)))


def _nonzero(tensor: Any) -> int:
    return int(tensor.dequantize().count_nonzero())


def _integer(index: Any) -> int | None:
    """`index` as an integer; None for slices, masks, lists and the like."""
    if isinstance(index, bool) or (
        isinstance(index, Tensor) and (index.ndim or index.dtype is torch.bool)
    ):
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None
