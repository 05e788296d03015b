"""The aten operations that every low-bit tensor has, derived from what a representation declares."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed._functional_collectives  # defines the operators of that name
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit.tensor.base import LowbitTensor, aten, check_not_flat
from lowbit.tensor.end_to_end import EndToEnd, wait_for
from lowbit.tensor.fsdp import as_bytes
from lowbit.tensor.plain_destination import warn_of_load

_like = LowbitTensor.implements


@_like(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    return args[0]._with()


@_like(aten.clone.default, aten._pin_memory.default, aten.contiguous.default)
def _clone(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    return args[0]._map(func)


@_like(aten.is_pinned.default)
def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return all(t.is_pinned() for t in args[0].inner_tensors().values())


@_like(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self = args[0]
    dtype = kwargs.get("dtype") or self.dtype
    if not dtype.is_floating_point:
        raise self._unsupported(f"conversion to {dtype} (accepted: floating dtypes)")
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)

    def move(t: Tensor) -> Tensor:
        return t.to(device=device or t.device, non_blocking=non_blocking, copy=True)

    return self._map(move, dtype=dtype)


@_like(aten.copy_.default)
def copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    dst, src = args[0], args[1]
    if not isinstance(dst, LowbitTensor):
        warn_of_load(dst, src)
        return dst.copy_(
            src.master()
        )  # of QAT weights the high-precision ones, so that loading loses nothing
    if dst.shape != src.shape:
        raise ValueError(f"cannot copy shape {tuple(src.shape)} into {dst!r}")
    meta: dict[str, Any] = {}
    if not isinstance(src, LowbitTensor):
        source = dst._encode(src)
    elif dst._is_stored_like(src):
        source = {**src.inner_tensors()}
    elif dst._takes_meta_of(src):
        source, meta = {**src.inner_tensors()}, src.meta()
    else:
        raise ValueError(
            f"cannot copy {src!r} into {dst!r}: they are stored differently. To replace the tensor use "
            "load_state_dict(..., assign=True), or make it with the other's scheme in the first place; to quantize "
            "anew copy src.dequantize()"
        )
    for name, t in dst.inner_tensors().items():
        t.copy_(cast(Tensor, source[name]))
    for name, value in meta.items():
        setattr(dst, name, value)
    return dst


_SLICE_DEFAULTS: tuple[Any, ...] = (0, None, None, 1)


@_like(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, dim, start, end, step = tuple(args) + _SLICE_DEFAULTS[len(args) - 1 :]
    if step != 1:
        raise self._unsupported(f"slicing with step {step}")
    dim = dim % self.ndim
    start, end, _ = slice(start, end).indices(self.shape[dim])
    if self.flat_from is not None and (start, end) == (0, self.shape[0]):
        return self._with()
    check_not_flat(self, "a slice")
    return self._slice(dim, start, max(start, end))


@_like(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> list[LowbitTensor]:
    self, sizes = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % self.ndim
    check_not_flat(self, "a split")
    if isinstance(sizes, int):
        total = self.shape[dim]
        sizes = [min(sizes, total - start) for start in range(0, max(total, 1), max(sizes, 1))]
    parts, start = [], 0
    for size in sizes:
        parts.append(self._slice(dim, start, start + size))
        start += size
    return parts


@_like(aten.select.int, aten.unbind.int)
def _select(func: Any, args: Any, kwargs: Any) -> Tensor | list[Any]:
    """An expert of three or more dimensions, a row of a matrix, an element of a vector: by index, or all in turn."""
    self = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    check_not_flat(self, "select")
    if dim % self.ndim != 0:
        raise self._unsupported(
            f"selecting along dimension {dim} (accepted: dimension 0, a row or an expert)"
        )
    size = self.shape[0]
    if func is aten.unbind.int:
        return self._all_rows() if self.ndim < 3 else [self._expert(i) for i in range(size)]
    index = args[2]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for a dimension of {size} of {self!r}")
    return self._row(index % size) if self.ndim < 3 else self._expert(index % size)


@_like(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, size = args
    numel = self.numel()
    known = 1
    for s in size:
        known *= 1 if s == -1 else s
    shape = tuple((numel // known if known else 0) if s == -1 else s for s in size)
    if shape == tuple(self.shape):
        return self._with()
    if self.flat_from is not None:
        if shape == self.flat_from:
            return self._with(shape=shape)
    elif len(shape) == 1 and shape[0] == numel:
        flat = self._with(shape=shape)
        flat.flat_from = tuple(self.shape)
        return flat
    else:
        viewed = self._view(shape)
        if viewed is not None:
            return viewed
    raise self._unsupported(f"a view as {shape}")


@_like(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, size, stride = args[0], args[1], args[2]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if tuple(size) != tuple(self.shape) or tuple(stride) != self.stride() or offset:
        raise self._unsupported(
            f"as_strided with size {tuple(size)}, stride {tuple(stride)}, offset {offset}"
        )
    return self._with()


@_like(
    aten.new_zeros.default, aten.new_empty.default, aten.zeros_like.default, aten.empty_like.default
)
def _new(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The same representation where only the rows differ; a plain tensor for any other shape."""
    self = args[0]
    shape = tuple(args[1]) if len(args) > 1 else tuple(self.shape)
    dtype = kwargs.get("dtype") or self.dtype
    device = kwargs.get("device") or self.device
    make = torch.zeros if func in (aten.new_zeros.default, aten.zeros_like.default) else torch.empty
    rows_differ_only = bool(shape) and shape[1:] == tuple(self.shape[1:])
    if self.flat_from is not None or not rows_differ_only or not dtype.is_floating_point:
        return make(shape, dtype=dtype, device=device)
    return self._new(shape, dtype, device, make)


@_like(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Flattened tensors stay as they are stored: see `lowbit.tensor.end_to_end`."""
    tensors = args[0]
    if any(isinstance(t, LowbitTensor) and t.flat_from is not None for t in tensors):
        return EndToEnd(tensors)
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensors[0].ndim
    first = tensors[0]
    if not isinstance(first, LowbitTensor):
        first = next(t for t in tensors if isinstance(t, LowbitTensor))
    if not all(first._is_stored_like(t) for t in tensors):
        raise first._unsupported("cat with tensors that are stored differently")
    return first._cat(tensors, dim)


@_like(aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, pad = args[0], list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if len(pad) == 2 and pad[0] == 0 < pad[1] and self.ndim > 1:
        own, most = self.shape[-1], self.shape[-1] + pad[1]
        raise NotImplementedError(
            f"{type(self).__name__} of shape {tuple(self.shape)} cannot be padded to {most} columns, as they are where "
            f"columns are split over ranks of which some get {most} and some {own}; accepted: RowwiseParallel of "
            "linears whose in_features are a multiple of the number of ranks, which plain ones need as well"
        )
    rows = pad[-1] if len(pad) == 2 * self.ndim else 0
    if sum(map(abs, pad)) != rows or rows < 0 or value:
        raise self._unsupported(
            f"padding by {pad} with value {value} (accepted: zero rows at the end)"
        )
    if rows == 0:
        return self._with()
    return self._pad_rows(rows)


@_like(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    a, b = args
    if type(a) is not type(b):
        raise NotImplementedError(
            f"torch.equal of {type(a).__name__} and {type(b).__name__}: compare .dequantize() instead"
        )
    if a.shape != b.shape or a.dtype != b.dtype or a.meta() != b.meta():
        return False
    # torch.equal knows no float8 where both are one memory
    pairs = ((as_bytes(t), as_bytes(getattr(b, name))) for name, t in a.inner_tensors().items())
    return all(torch.equal(x, y) for x, y in pairs)


_funcol = torch.ops._c10d_functional


@_like(_funcol._wrap_tensor_autograd.default)
def _wait(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    """A gathered DTensor would wait for its values when they are first read; this one waits at once."""
    return args[0]._map(_funcol.wait_tensor)


@_like(_funcol.wait_tensor.default, _funcol.broadcast.default)
def _collective(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    return args[0]._map(partial(_finished, func, args[1:], kwargs))


def _finished(func: Any, args: Any, kwargs: Any, inner: Tensor) -> Tensor:
    """A collective over the bytes of `inner`, waited for while what it reads is still held.

    Gloo's threads drop their references after the result is there. A temporary freed by Python in
    the middle of that corrupts the heap (torch 2.13, some hundred thousand collectives to one abort).
    """
    sent = as_bytes(inner).contiguous()
    return _funcol.wait_tensor(func(sent, *args, **kwargs)).view(inner.dtype)


@_like(_funcol.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, world = args[0], args[1]
    check_not_flat(self, "an all-gather")
    gathered = {
        name: _finished(func, args[1:], kwargs, getattr(self, name)) for name in self._row_attrs()
    }
    return self._with(
        {**self.inner_tensors(), **gathered}, (self.shape[0] * world, *self.shape[1:])
    )


@_like(torch.ops.c10d.broadcast_.default, torch.ops.c10d.scatter_.default)
def _c10d(func: Any, args: Any, kwargs: Any) -> Any:
    """In place on every inner tensor, each waited for here (see _finished): the caller's wait is none."""
    outputs = args[0]
    if func is torch.ops.c10d.broadcast_.default:
        _check_receivers(outputs[0])
    else:
        check_not_flat(outputs[0], "a collective")
    work = None
    for name in outputs[0].inner_tensors():
        inner_args = tree_map(partial(_inner_bytes, name), args)
        _, work = func(*inner_args, **kwargs)
        wait_for(work)
        for output, sent in zip(outputs, inner_args[0], strict=True):
            received = as_bytes(getattr(output, name))
            if received.data_ptr() != sent.data_ptr():  # it was not contiguous
                received.copy_(sent)
    return outputs, work


def _check_receivers(sent: LowbitTensor) -> None:
    """Loading with broadcast_from_rank0=True has plain tensors receive, on the other ranks, what this rank sends: gloo
    then aborts them, NCCL waits. Nothing but who calls tells it from other broadcasts."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if (module, function) == ("torch.distributed._state_dict_utils", "_broadcast_tensors"):
            raise NotImplementedError(
                f"broadcast_from_rank0=True of {sent!r}, which other ranks would receive as a plain tensor; accepted: "
                "the state dict on every rank, without broadcast_from_rank0, or plain values in it: value.dequantize()"
            )
        frame = frame.f_back


def _inner_bytes(name: str, leaf: Any) -> Any:
    """Contiguous: slices along the columns are not, though the tensor over them says so."""
    return as_bytes(getattr(leaf, name)).contiguous() if isinstance(leaf, LowbitTensor) else leaf
