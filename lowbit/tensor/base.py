"""The base of every low-bit tensor: a logical tensor (shape, dtype) over a few plain inner tensors.

A representation is one subclass. It declares

- `tensor_attrs`: names of its inner tensors (one may be None), and `meta_attrs`: names of its hashable metadata;
- `inner_shapes(shape)`: the shape and dtype of each inner tensor of a tensor of that logical shape;
- `_slice(dim, start, end)`, where slicing along other dimensions than 0 makes sense;
- `_encode(values)`: its inner tensors for these high-precision values, and `dequantize()`, the way back.

From these the base derives flattening for torch.compile, repr, detach, clone, `to`, `copy_`, slicing and views,
collectives, the FSDP2 all-gather hooks (`lowbit.tensor.fsdp`), `new_zeros`, pickling by torch.save with
weights_only=True (`lowbit.tensor.pickled`). An operation that is not implemented raises NotImplementedError; nothing
falls back silently.

The scales never change dtype: `tensor.to(torch.bfloat16)` changes the logical dtype, which is the dtype of the
values that `dequantize()` gives, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lowbit.tensor.fsdp import FSDPHooks
from lowbit.tensor.pickled import Pickling
from lowbit.tensor.rows import READS, as_copies, write

aten = torch.ops.aten
InnerShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class LowbitTensor(FSDPHooks, Pickling, torch.Tensor):
    """A tensor of logical `shape` and `dtype`, stored in low bits. See the module for how to write a subclass."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ()
    meta_attrs: ClassVar[tuple[str, ...]] = ()
    already: ClassVar[str] = ""
    """Why a weight of this class is not converted once more, if there is more to say than what it is."""
    way_out: ClassVar[str] = "call .dequantize() for a plain tensor first"
    """What to do where an operation is not supported."""
    stored_as: ClassVar[str | None] = None
    """What `lowbit.products` chooses the product of a frozen weight by, besides its metadata; None for others."""
    _ops: ClassVar[dict[Any, Callable[..., Any]]] = {}
    flat_from: tuple[int, ...] | None
    """Set on the result of `view(-1)`: the shape that it was flattened from. Such a tensor can be viewed back,
    moved, cloned and dequantized, and nothing else."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._ops = {}
        torch.serialization.add_safe_globals([cls])

    # ---- construction -------------------------------------------------------------------------------------

    @classmethod
    def from_inner(
        cls,
        tensors: Mapping[str, Tensor | None],
        meta: Mapping[str, Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        strides: Sequence[int] | None = None,
        flat_from: tuple[int, ...] | None = None,
    ) -> Self:
        """A tensor of this shape and dtype over inner tensors (`tensor_attrs`) and metadata (`meta_attrs`) by name.
        Nothing is copied or checked."""
        first = next(t for t in tensors.values() if t is not None)
        # a view of an ordinary tensor is an ordinary tensor, also in inference mode
        with torch.inference_mode(torch.is_inference_mode_enabled() and first.is_inference()):
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                torch.Size(shape),
                strides=strides,
                dtype=dtype,
                device=first.device,
                requires_grad=False,
            )
        for name in cls.tensor_attrs:
            setattr(self, name, tensors.get(name))
        for name in cls.meta_attrs:
            setattr(self, name, meta[name])
        self.flat_from = flat_from
        return self

    def inner_tensors(self) -> dict[str, Tensor]:
        """The inner tensors that are not None, by name."""
        found = ((name, getattr(self, name)) for name in self.tensor_attrs)
        return {name: t for name, t in found if t is not None}

    def meta(self) -> dict[str, Any]:
        """The metadata by name."""
        return {name: getattr(self, name) for name in self.meta_attrs}

    def _with(
        self,
        tensors: Mapping[str, Tensor | None] | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        **meta: Any,
    ) -> Self:
        """This tensor with other inner tensors, shape, dtype or metadata; strides as given by `_strides`."""
        new_meta = {**self.meta(), **meta}
        new_shape = tuple(self.shape if shape is None else shape)
        return type(self).from_inner(
            self.inner_tensors() if tensors is None else tensors,
            new_meta,
            new_shape,
            self.dtype if dtype is None else dtype,
            strides=self._strides(new_shape, new_meta),
            flat_from=self.flat_from if shape is None else None,
        )

    @classmethod
    def _strides(cls, shape: Sequence[int], meta: Mapping[str, Any]) -> tuple[int, ...] | None:
        return None  # contiguous

    def _map(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        return self._with({name: fn(t) for name, t in self.inner_tensors().items()}, **changes)

    # ---- what a representation provides --------------------------------------------------------------------

    def dequantize(self) -> Tensor:
        """The values, as a plain tensor of this tensor's shape and dtype."""
        raise NotImplementedError

    def master(self) -> Tensor:
        """The values that an optimizer updates, as a plain tensor: `dequantize()`, or the high-precision weight."""
        return self.dequantize()

    def write_master(self, out: Tensor) -> None:
        """Put `master()` into `out`, float32 of this shape."""
        out.copy_(self.master())

    def update_(self, values: Tensor) -> None:
        """Take the values that an optimizer made of `master()`. Where they are rounded, stochastically."""
        self.copy_(values)

    def updated_in_place(self) -> Tensor | None:
        """`master()` where that is memory of its own, which an optimizer may write to; else None."""
        return None

    def _assign_data(self, values: Tensor) -> None:
        """`self.data = values`, of which `self.data += x` assigns what it has changed in place already."""
        own = self.inner_tensors()
        given = values.inner_tensors() if type(values) is type(self) else {}
        if own.keys() != given.keys() or any(t is not given[name] for name, t in own.items()):
            raise self._unsupported("assigning .data (accepted: copy_, under no_grad)")

    def nbytes_stored(self) -> int:
        """Bytes that the inner tensors take."""
        return sum(t.nbytes for t in self.inner_tensors().values())

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        """The shape and dtype of each inner tensor of a tensor of that logical shape."""
        raise NotImplementedError

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        raise self._unsupported("copying high-precision values into it")

    def _is_stored_like(self, other: Tensor) -> bool:
        """Whether the inner tensors of both mean the same, so that one's can be copied to the other's."""
        return (
            isinstance(other, LowbitTensor)
            and type(self) is type(other)
            and self.meta() == other.meta()
        )

    def _takes_meta_of(self, other: Tensor) -> bool:
        """Whether a copy makes this tensor what `other` is, metadata included, where it is not stored like it."""
        return False

    def _row_attrs(self) -> tuple[str, ...]:
        """The inner tensors whose dimension 0 runs along this tensor's; the others belong to all rows."""
        return tuple(self.inner_tensors())

    def _slice(self, dim: int, start: int, end: int) -> Self:
        if dim != 0:
            raise self._unsupported(f"slicing along dimension {dim}")
        rows = self._row_attrs()
        tensors = {
            name: t[start:end] if name in rows else t for name, t in self.inner_tensors().items()
        }
        return self._with(tensors, (end - start, *self.shape[1:]))

    def _view(self, shape: tuple[int, ...]) -> Self | None:
        """This tensor with its dimensions merged or split as `shape`, or None where it cannot be."""
        return None

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        if dim != 0:
            raise self._unsupported(f"cat along dimension {dim}")
        rows = self._row_attrs()
        joined = {name: torch.cat([getattr(t, name) for t in tensors]) for name in rows}
        total = sum(t.shape[0] for t in tensors)
        return self._with({**self.inner_tensors(), **joined}, (total, *self.shape[1:]))

    def _expert(self, index: int) -> Self:
        """Entry `index` of dimension 0, where each has inner tensors of its own."""
        shape = tuple(self.shape[1:])
        selected = {name: getattr(self, name).select(0, index) for name in self._row_attrs()}
        tensors = {**self.inner_tensors(), **selected}
        expected = {name: size for name, (size, _) in self.inner_shapes(shape).items()}
        if {name: tuple(t.shape) for name, t in tensors.items()} != expected:
            raise self._unsupported("selecting an expert, since they share scales")
        return self._with(tensors, shape)

    def _row(self, index: int) -> Tensor:
        """Row `index` of a matrix, or that element of a vector: plain values."""
        try:
            part = self._slice(0, index, index + 1)
        except NotImplementedError:  # rows share scales in blocks, or elements in one
            return self.dequantize()[index]
        return part.dequantize()[0]

    def _all_rows(self) -> list[Tensor]:
        """`_row` of each index."""
        return list(self.dequantize().unbind())

    def _new(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: Any, make: Callable[..., Tensor]
    ) -> Self:
        """A tensor of `shape`, which differs in the rows only; `make` is torch.zeros or torch.empty."""
        shapes = self.inner_shapes(shape)
        tensors = {
            name: make(shapes[name][0], dtype=shapes[name][1], device=device)
            for name in self.inner_tensors()
        }
        return self._with(tensors, shape, dtype)

    def _pad_rows(self, rows: int) -> Self:
        """This tensor with `rows` rows of zeros after its own."""
        return self._cat([self, self.new_zeros((rows, *self.shape[1:]))], 0)  # type: ignore[list-item]

    def meta_to_json(self) -> dict[str, Any]:
        """The metadata in plain JSON types, for checkpoints; `meta_from_json` reads it back."""
        return self.meta()

    @classmethod
    def meta_from_json(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        return {name: data[name] for name in cls.meta_attrs}

    # ---- torch protocols ------------------------------------------------------------------------------------

    def _unsupported(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} of shape {tuple(self.shape)} does not support {what}; {self.way_out}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        meta = "".join(
            f", {name}={value!r}" for name, value in self.meta().items() if value is not None
        )
        grad = ", requires_grad=True" if self.requires_grad else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={dtype}, device='{self.device}'{meta}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.inner_tensors()), (tuple(self.meta().values()), self.dtype, self.flat_from)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> Self:
        meta, dtype, flat_from = context
        return cls.from_inner(
            inner,
            dict(zip(cls.meta_attrs, meta, strict=True)),
            outer_size,
            dtype,
            strides=outer_stride,
            flat_from=flat_from,
        )

    def _stable_hash_for_caching(self) -> str:
        """torch.compile's caches key a graph by this: all that dispatch may depend on."""
        _, context = self.__tensor_flatten__()
        tensors = {"": self, **self.inner_tensors()}
        layout = [
            (name, tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)
            for name, t in tensors.items()
        ]
        return f"{type(self).__qualname__}{layout}{context}"

    @classmethod
    def implements(cls, *ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register `fn(func, args, kwargs)` as this class's (and its subclasses') implementation of aten ops."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            for op in ops:
                cls._ops[op] = fn
            return fn

        return register

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Without this the assignment would have no effect: the values are in the inner tensors.
        if func == _SET_DATA and isinstance(args[0], LowbitTensor):
            return args[0]._assign_data(args[1])
        if func is Tensor.share_memory_:  # it would take the address of memory that is none
            for t in args[0].inner_tensors().values():
                t.share_memory_()
            return args[0]
        if func is Tensor.is_shared:
            return all(t.is_shared() for t in args[0].inner_tensors().values())
        if func is Tensor.__setitem__ and isinstance(args[0], LowbitTensor) and write(*args):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func not in READS:
            return result
        source = args[0] if args else (kwargs or {})["input"]
        return as_copies(source, result) if isinstance(source, LowbitTensor) else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for ancestor in cls.__mro__:
            fn = ancestor.__dict__.get("_ops", {}).get(func)
            if fn is not None:
                return fn(func, args, kwargs or {})
        if (
            torch.is_inference_mode_enabled()
        ):  # where autograd does not take composite operations apart
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        raise NotImplementedError(f"{cls.__name__} does not implement {func}; {cls.way_out}")


def check_not_flat(tensor: LowbitTensor, what: str) -> None:
    if tensor.flat_from is not None:
        raise tensor._unsupported(
            f"{what} of a flattened view; view it as {tensor.flat_from} first"
        )
