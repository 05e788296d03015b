"""The aten operations of every low-bit tensor, derived from the declarations of a representation. Collectives are in
`lowbit.tensor.core.collectives`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.numerics.packing import as_bytes
from lowbit.tensor.core.base import LowbitTensor, aten
from lowbit.tensor.core.checks import check_not_flat, flat_error
from lowbit.tensor.core.collectives import Concatenated
from lowbit.tensor.core.indexing import as_view, check_part
from lowbit_kernels.runtime.library import contiguous_strides

_implements = LowbitTensor.implements


@_implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    return as_view(args[0], args[0]._with())


@_implements(aten.clone.default, aten._pin_memory.default, aten.contiguous.default)
def _clone(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    return args[0]._map(func)


@_implements(aten.is_pinned.default)
def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return all(t.is_pinned() for t in args[0].inner_tensors().values())


@_implements(aten._to_copy.default)
def to_copy(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self = args[0]
    dtype = kwargs.get("dtype") or self.dtype
    if not dtype.is_floating_point:
        raise self._unsupported(f"conversion to {dtype} (accepted: floating dtypes)")
    options = {"device": kwargs.get("device"), "non_blocking": kwargs.get("non_blocking", False)}
    moved = {
        name: t.to(dtype=dtype if name in self.cast_attrs else t.dtype, copy=True, **options)
        for name, t in self.inner_tensors().items()
    }
    return self._with(moved, dtype=dtype)


@_implements(aten.copy_.default)
def copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    dst, src = args[0], args[1]
    if not isinstance(dst, LowbitTensor):
        if isinstance(dst, nn.Parameter):
            _warn_of_plain_parameter()
        # A QAT weight gives its high-precision values, so that nothing is lost.
        return dst.copy_(src.master())
    if dst.shape != src.shape:
        raise ValueError(f"cannot copy shape {tuple(src.shape)} into {dst!r}")
    if dst.flat_from is not None and not isinstance(src, LowbitTensor):
        as_view(dst, dst._with(shape=dst.flat_from)).copy_(src.reshape(dst.flat_from))
        return dst
    meta: dict[str, Any] = {}
    if not isinstance(src, LowbitTensor):
        src = src.to(dst.device)
        if dst.holds(src) or (dst.shares and dst._write_exactly(src)):
            return dst
        source = dst._encode(src)
        if dst.shares:  # a low-bit source brings its scales: DCP and FSDP2 write all parts of a tensor one by one
            check_part(dst, source)
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


def _warn_of_plain_parameter() -> None:
    """`load_state_dict` makes such copies for a model that was not prepared, and reports that all keys matched."""
    warnings.warn(
        "a plain parameter takes the values of a low-bit tensor, so the model stays in high precision. For a low-bit "
        "model call load_state_dict(state_dict, assign=True); if the values are what you want, call .dequantize() on "
        "the low-bit tensor first",
        UserWarning,
        stacklevel=1,  # this line, so that all weights together warn once
    )


_SLICE_DEFAULTS: tuple[Any, ...] = (0, None, None, 1)


@_implements(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, dim, start, end, step = tuple(args) + _SLICE_DEFAULTS[len(args) - 1 :]
    if step != 1:
        raise self._no_view(f"slicing with step {step}")
    dim = dim % self.ndim
    start, end, _ = slice(start, end).indices(self.shape[dim])
    if self.flat_from is not None and (start, end) == (0, self.shape[0]):
        return as_view(self, self._with())
    check_not_flat(self, "a slice")
    return as_view(self, self._slice(dim, start, max(start, end)))


@_implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> list[LowbitTensor]:
    self, sizes = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % self.ndim
    check_not_flat(self, "a split")
    if isinstance(sizes, int):
        total = self.shape[dim]
        sizes = [min(sizes, total - start) for start in range(0, max(total, 1), max(sizes, 1))]
    if min(sizes, default=0) < 0 or sum(sizes) != self.shape[dim]:
        raise RuntimeError(
            f"a split of dimension {dim} of {self!r} in {list(sizes)}; accepted: sizes of 0 or more, {self.shape[dim]} "
            "in all"
        )
    parts, start = [], 0
    for size in sizes:
        parts.append(as_view(self, self._slice(dim, start, start + size)))
        start += size
    return parts


@_implements(aten.select.int, aten.unbind.int)
def _select(func: Any, args: Any, kwargs: Any) -> Tensor | list[Any]:
    """One entry of dimension 0, or all: experts of a 3-D tensor, rows of a matrix, elements of a vector."""
    self = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    check_not_flat(self, "select")
    if dim % self.ndim != 0:
        raise self._no_view(
            f"selecting along dimension {dim} (accepted: dimension 0, a row or an expert)"
        )
    size = self.shape[0]
    if func is aten.unbind.int:
        if self.ndim < 3:
            return self._all_rows()
        return [as_view(self, self._expert(i)) for i in range(size)]
    index = args[2]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for a dimension of {size} of {self!r}")
    return self._row(index % size) if self.ndim < 3 else as_view(self, self._expert(index % size))


@_implements(aten.index_select.default, aten.index.Tensor)
def _index(func: Any, args: Any, kwargs: Any) -> Any:
    self, dim, rows = args if func is aten.index_select.default else (args[0], 0, args[1][0])
    if (error := flat_error(self, "indexing")) is not None:
        return self._unimplemented(func, args, kwargs, error)
    has_one_index = func is aten.index_select.default or len(args[1]) == 1
    if self.transposed and self.ndim == 3:  # stacked experts, which dimension 0 selects
        return _index(func, (self._transposed(), *args[1:]), kwargs)._transposed()
    if dim != 0 or self.transposed or not has_one_index or rows.ndim != 1:
        error = self._unsupported("this indexing (accepted: one 1-D index of dimension 0)")
        return self._unimplemented(func, args, kwargs, error)
    if rows.dtype is torch.bool:
        if len(rows) != self.shape[0]:
            raise IndexError(
                f"a mask of {len(rows)} elements over the {self.shape[0]} rows of {self!r}"
            )
        rows = rows.nonzero().squeeze(1)
    elif func is aten.index.Tensor:
        rows = torch.where(rows < 0, rows + self.shape[0], rows)
    return self._take(rows)


@_implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    """`.T` and `.mT` arrive as a permutation."""
    self = args[0]
    check_not_flat(self, "transposition")
    same = list(range(self.ndim))
    dims = list(func(torch.empty(same, device="meta"), *args[1:], **kwargs).shape)
    if dims == same:
        return as_view(self, self._with())
    if dims != [*same[:-2], *same[:-3:-1]]:
        raise self._unsupported(f"dimensions in the order {dims} (accepted: the last two swapped)")
    return as_view(self, self._transposed())


@_implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, size = args
    numel = self.numel()
    known = 1
    for s in size:
        known *= 1 if s == -1 else s
    shape = tuple((numel // known if known else 0) if s == -1 else s for s in size)
    if shape == tuple(self.shape):
        return as_view(self, self._with())
    if self.flat_from is not None:
        if shape == self.flat_from:
            return as_view(self, self._with(shape=shape))
    elif len(shape) == 1 and shape[0] == numel:
        flat = self._map(Tensor.contiguous, shape=shape)  # a copy of a transposed master
        flat.flat_from = tuple(self.shape)
        return as_view(self, flat)
    else:
        viewed = self._view(shape)
        if viewed is not None:
            return as_view(self, viewed)
    raise self._no_view(f"a view as {shape}")


@_implements(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, size, stride = args[0], args[1], args[2]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    # FSDP2 asks for contiguous strides, and a transposed stack stays one
    keeps = self.ndim == 3 and tuple(stride) == contiguous_strides(self.shape)
    if tuple(size) != tuple(self.shape) or not (tuple(stride) == self.stride() or keeps) or offset:
        raise self._unsupported(
            f"as_strided with size {tuple(size)}, stride {tuple(stride)}, offset {offset}"
        )
    return as_view(self, self._with())


@_implements(
    aten.new_zeros.default, aten.new_empty.default, aten.zeros_like.default, aten.empty_like.default
)
def _new(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The same representation where only dimension 0 differs; a plain tensor for any other shape."""
    self = args[0]
    shape = tuple(args[1]) if len(args) > 1 else tuple(self.shape)
    dtype = kwargs.get("dtype") or self.dtype
    device = kwargs.get("device") or self.device
    make = torch.zeros if func in (aten.new_zeros.default, aten.zeros_like.default) else torch.empty
    rows_differ_only = bool(shape) and shape[1:] == tuple(self.shape[1:])
    if self.flat_from is not None or not rows_differ_only or not dtype.is_floating_point:
        return make(shape, dtype=dtype, device=device)
    return self._new(shape, dtype, device, make)


@_implements(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Flattened tensors stay as they are stored."""
    tensors = args[0]
    if any(isinstance(t, LowbitTensor) and t.flat_from is not None for t in tensors):
        return Concatenated(tensors)
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensors[0].ndim
    first = tensors[0]
    if not isinstance(first, LowbitTensor):
        first = next(t for t in tensors if isinstance(t, LowbitTensor))
    if not all(first._is_stored_like(t) for t in tensors):
        error = first._unsupported("cat with tensors that are stored differently")
        return first._unimplemented(func, args, kwargs, error)
    return first._cat(tensors, dim)


@_implements(aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, pad = args[0], list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if len(pad) == 2 and pad[0] == 0 < pad[1] and self.ndim > 1:
        own, most = self.shape[-1], self.shape[-1] + pad[1]
        raise NotImplementedError(
            f"{type(self).__name__} of shape {tuple(self.shape)} cannot be padded to {most} columns. torch asks for "
            f"it where it splits columns over ranks and some get {most}, others {own}; accepted: RowwiseParallel of "
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


@_implements(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """True if both are stored alike, to the bit; two classes need equal values alone. transformers calls it
    to find tied weights of a checkpoint."""
    a, b = args
    if type(a) is not type(b):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        values = [t.dequantize() if isinstance(t, LowbitTensor) else t for t in (a, b)]
        return torch.equal(*values)
    if a.shape != b.shape or a.dtype != b.dtype or a.meta() != b.meta():
        return False
    # torch.equal does not take float8 where both share memory
    pairs = ((as_bytes(t), as_bytes(getattr(b, name))) for name, t in a.inner_tensors().items())
    return all(torch.equal(x, y) for x, y in pairs)


def looked_up(func: Any, args: Any, kwargs: Any) -> Tensor:
    """aten.embedding of a weight [N, K]: gathers the codes of the rows, and dequantizes only those."""
    self, indices = args[0], args[1]
    if self.transposed:
        raise self._unsupported("an embedding of its transpose")
    rows = self._take(indices.reshape(-1)).dequantize()
    return rows.view(*indices.shape, *self.shape[1:])


def experts_in_high_precision(func: Any, args: Any, kwargs: Any) -> Tensor:
    """aten.bmm or _grouped_mm of a plain operand and the values of a low-bit one, which may be either."""
    dtype = next(x.dtype for x in args[:2] if not isinstance(x, LowbitTensor))
    first, second = (
        x.dequantize().to(dtype) if isinstance(x, LowbitTensor) else x for x in args[:2]
    )
    return func(first, second, *args[2:], **kwargs)


def product_below_autograd(
    linear: Callable[..., Tensor], func: Any, args: Any, kwargs: Any
) -> Tensor:
    """aten.mm, addmm or linear of a plain input and a low-bit weight, as DTensor calls them, and aten.mm of a weight
    and a plain operand, as gradients of products are. `linear`: that of the weight's class, which runs where the
    weight is stored as [N, K]."""
    if func is aten.addmm.default:
        bias, x, weight = args
        if isinstance(bias, LowbitTensor):
            bias = bias.dequantize()
            if not isinstance(x, LowbitTensor) and not isinstance(weight, LowbitTensor):
                return func(bias, x, weight, **kwargs)
        if kwargs:
            raise weight._unsupported(f"addmm with {kwargs}")
    else:
        x, weight, bias = (*args, None)[:3]
    if (
        func is aten.mm.default
        and isinstance(x, LowbitTensor)
        and not isinstance(weight, LowbitTensor)
    ):
        return func(x.dequantize().to(weight.dtype), weight)
    if not isinstance(weight, LowbitTensor) or isinstance(x, LowbitTensor):
        quantized = x if isinstance(x, LowbitTensor) else weight
        raise quantized._unsupported(f"{func} in that position (accepted: input @ weight)")
    if func is aten.linear.default:
        return linear(x, weight, bias)
    if weight.transposed:
        return linear(x, weight._transposed(), bias)
    product = x @ weight.dequantize().to(x.dtype)
    return product if bias is None else product + bias
