"""The base of every low-bit tensor: a logical tensor (shape, dtype) over a few plain inner tensors.

A representation is one subclass in one file. It declares

- `tensor_attrs`: names of its inner tensors (each may be None), and `meta_attrs`: names of its hashable metadata;
- `inner_shapes(shape)`: the shape and dtype of each inner tensor of a tensor of that logical shape;
- `_slice(dim, start, end)`, where slicing along other dimensions than 0 makes sense;
- `_encode(values)`: its inner tensors for these high-precision values, and `dequantize()`, the way back.

From these the base derives flattening for torch.compile, repr, detach, clone, `to`, `copy_`, slicing and views,
collectives, the FSDP2 all-gather hooks (`lowbit.tensor.core.fsdp`), `new_zeros`, pickling by torch.save with
weights_only=True (`lowbit.tensor.core.pickled`), and checkpoints. An operation that is not implemented raises
NotImplementedError; nothing falls back silently.

`LowbitTensor` itself is not an operand of a product. A frozen weight subclasses `AffineTensor` and says in
`stores(spec)` which specs it stores; where its layout is another one it has a `stored_as` of its own. A weight that
trains subclasses `lowbit.tensor.trained.trainable.TrainableTensor` and names its `schemes`.

The scales never change dtype: `tensor.to(torch.bfloat16)` changes the logical dtype, which is the dtype of the
values that `dequantize()` gives, and nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from lowbit.numerics import class_names
from lowbit.tensor.core.contracted import CONTRACTIONS, NoView, contracted
from lowbit.tensor.core.fsdp import FSDPHooks
from lowbit.tensor.core.indexing import READS, as_copies, index_in_graph, is_advanced, write
from lowbit.tensor.core.pickled import Pickling
from lowbit.tensor.core.reading import KEEPS, read, reads
from lowbit.tensor.core.shape_arithmetic import ShapeArithmetic
from lowbit.tensor.core.torchscript import is_traced, refuse_trace
from lowbit_kernels.runtime.library import contiguous_strides

aten = torch.ops.aten
InnerShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SPECIAL = {
    *(_SET_DATA, Tensor.share_memory_, Tensor.data_ptr, Tensor.is_shared, Tensor.__setitem__),
    *(Tensor.is_contiguous, Tensor.numpy, Tensor.__array__, Tensor.tolist),
    *(*READS, *CONTRACTIONS),
}
"""The functions that need more than torch's own implementation."""

_LOADED_WHOLE = (
    "as accelerate.load_checkpoint_and_dispatch asks for with a device_map; accepted: a loaded model, by "
    "model.load_state_dict(lowbit.load(file), assign=True) or lowbit.load_pretrained(folder), and then "
    "accelerate.dispatch_model(model, device_map)"
)


def stored_shape(tensor: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which `tensor` stores one of this logical shape: its last two dimensions swapped if transposed."""
    return (*shape[:-2], shape[-1], shape[-2]) if tensor.transposed else tuple(shape)


def is_turned_stack(tensor: Any) -> bool:
    """True for a stack of matrices that are stored the other way."""
    return getattr(tensor, "transposed", False) and tensor.ndim == 3


class CodesByRow(NamedTuple):
    """Codes of a symmetric range, whose rows a kernel can update.

    Attributes:
        codes: int8 [..., N, K], or uint8 [..., N, K/2] of codes plus 8 in nibbles, the low one first; contiguous.
        scale: float32 [..., N, K / scale_width].
        place: int64 [..., N, 1], random-number offsets (`round_rows`).
        bits: of a code, 8 or 4.
        scale_width: elements of a row that share a scale.
    """

    codes: Tensor
    scale: Tensor
    place: Tensor
    bits: int
    scale_width: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.place


class LowbitTensor(FSDPHooks, ShapeArithmetic, Pickling, torch.Tensor):
    """A tensor of logical `shape` and `dtype`, stored in low bits. See the module for how to write a subclass."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ()
    meta_attrs: ClassVar[tuple[str, ...]] = ()
    cast_attrs: ClassVar[tuple[str, ...]] = ()
    """The inner tensors that a conversion to another dtype converts too."""
    already: ClassVar[str] = ""
    """Why a conversion leaves a weight of this class alone, where the class name does not say enough."""
    way_out: ClassVar[str] = "call .dequantize() for a plain tensor first"
    """The end of every message about an unsupported operation."""
    is_described: ClassVar[bool] = True
    """True if state dicts and checkpoints describe a tensor of this class, so that reading them restores it. False
    where they hold plain values only."""
    is_stored_plain: ClassVar[bool] = False
    """True if a state dict holds its inner tensor `weight` under the parameter's own name, and not its parts."""
    kinds: ClassVar[dict[str, type[LowbitTensor]]] = {}
    """The classes that a description may name, by that name. Each class enters itself. A name that another class has
    raises TypeError."""
    stored_as: ClassVar[str | None] = None
    """The key by which `lowbit.linear.frozen` chooses the product of a frozen weight; None for other tensors."""
    rounds_reads: ClassVar[bool] = False
    """True if the tensor holds a high-precision weight that operations of a model see rounded
    (`lowbit.tensor.core.reading`)."""
    returns_errors: ClassVar[bool] = False
    """True if lowbit's optimizers put what rounding takes from it into the momentum unless they are told not to."""
    _ops: ClassVar[dict[Any, Callable[..., Any]]] = {}
    rounds_inputs: bool = True
    """True if products with it compute from more than its values: they round their input, or train."""
    products: ClassVar[dict[Any, str]] = {}
    """The functions that `computed` answers, and the names of the methods that compute them."""
    flat_from: tuple[int, ...] | None
    """Set on the result of `view(-1)`: the shape that it was flattened from. Such a tensor can be viewed back,
    moved, cloned and dequantized, and nothing else."""
    shown_in: tuple[tuple[weakref.ref[Any], Callable[[Any], None]], ...] = ()
    """The modules that hold the inner tensors too (`lowbit.layers.frozen`), and the function that updates a module."""
    shares: Mapping[str, LowbitTensor] = MappingProxyType({})
    """Set on a part of a tensor: the names of the inner tensors that serve more than this part, and that tensor."""
    transposed: bool = False
    """The logical tensor is the stored one with its last two dimensions swapped. True only for classes that have this
    in `meta_attrs`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._ops = {}
        if "__new__" in cls.__dict__:
            cls.__new__ = _also_a_parameter(cls.__new__)  # type: ignore[method-assign]
        if cls.is_described and cls.tensor_attrs:
            class_names.enter(LowbitTensor.kinds, cls)
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
        """A tensor over inner tensors. Nothing is copied or checked.

        Args:
            tensors: `tensor_attrs` by name; None for those that are absent.
            meta: `meta_attrs` by name.
            shape, dtype: of the tensor.
            strides: None: contiguous.
            flat_from: the shape of which it is a flattened view, or None.
        """
        first = next(t for t in tensors.values() if t is not None)
        options: dict[str, Any] = {"dtype": dtype, "device": first.device, "strides": strides}
        if torch.is_inference_mode_enabled() and not first.is_inference():
            # a view of an ordinary tensor is an ordinary tensor, also in inference mode
            with torch.inference_mode(False):
                self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), **options)
        else:
            self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), **options)
        for name in cls.tensor_attrs:
            setattr(self, name, tensors.get(name))
        for name in cls.meta_attrs:
            setattr(self, name, meta[name])
        self.flat_from = flat_from
        return self

    def inner_tensors(self) -> dict[str, Tensor]:
        """The inner tensors that are not None, by name."""
        names = self.tensor_attrs
        return {name: t for name in names if (t := getattr(self, name)) is not None}

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
        """Strides of a tensor of that logical shape; None: contiguous."""
        if not meta.get("transposed") or len(shape) < 2:
            return None
        *base, last = contiguous_strides((*shape[:-2], shape[-1], shape[-2]))
        return (*base[:-1], last, base[-1])

    def _map(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        return self._with({name: fn(t) for name, t in self.inner_tensors().items()}, **changes)

    # ---- methods that representations override --------------------------------------------------------------------

    def dequantize(self) -> Tensor:
        """The values, as a plain tensor of this tensor's shape and dtype, without gradient."""
        if self.flat_from is not None:
            return self._with(shape=self.flat_from).dequantize().reshape(-1)
        if self.transposed:
            return self._transposed().dequantize().transpose(-2, -1)
        return self._stored_values()

    def _stored_values(self) -> Tensor:
        """`dequantize` of a tensor that is neither flat nor transposed."""
        raise NotImplementedError(f"{type(self).__name__} defines no dequantize()")

    def master(self) -> Tensor:
        """The values that an optimizer updates, as a plain tensor: `dequantize()`, or the high-precision weight."""
        return self.dequantize()

    def write_master(self, out: Tensor) -> None:
        """Write `master()` to `out`, float32 of this shape."""
        out.copy_(self.master())

    def update_(self, values: Tensor) -> None:
        """Take the values that an optimizer computed from `master()`. A class that rounds them rounds
        stochastically."""
        self.copy_(values)

    def random_offsets(self) -> Tensor | None:
        """The random-number offsets that `update_` reads and advances; None where it needs none."""
        return None

    def codes_by_row(self) -> CodesByRow | None:
        """What a kernel needs to update this tensor with the bits of `master` and `update_`; None where it has to call
        these."""
        return None

    def was_updated(self) -> None:
        """A kernel has updated `codes_by_row()`. Autograd may hold these tensors for a backward pass."""

    def updated_in_place(self) -> Tensor | None:
        """`master()` where it is the tensor's own memory, which an optimizer may write to; else None."""
        return None

    def _assign_data(self, values: Tensor) -> None:
        """`self.data = values`: takes over a tensor of the same shape that is stored alike, as `self.data += x` assigns
        after its change, and `self.data = self.data.to(dtype)`. Raises NotImplementedError for others."""
        if values.shape != self.shape or not self._is_stored_like(values):
            raise self._unsupported(
                "assigning .data (accepted: low-bit data of this shape that is stored alike, or copy_, under no_grad; "
                "resize a model, as by resize_token_embeddings, before it is prepared or quantized)"
            )
        self._take_over(values)

    def _take_over(self, other: Any) -> None:
        """Have the dtype, the device and the inner tensors of `other`, which is stored alike. Aliases of this tensor
        keep the old inner tensors."""
        if other.dtype is not self.dtype or other.device != self.device:
            with torch._C.DisableTorchFunctionSubclass():
                _SET_DATA(self, other)  # of the wrapper
        for name, t in other.inner_tensors().items():
            setattr(self, name, t)
        layers = self.shown_in
        for name in self.caches:
            self.__dict__.pop(name, None)
        for ref, show in layers:
            if (layer := ref()) is not None:
                show(layer)

    def over(self, values: Tensor) -> Self | None:
        """A tensor like this one over other plain values of its shape; None where a plain tensor takes its place."""
        return None

    @property
    def _parameters(self) -> None:
        """What accelerate asks a module for, in the place of which it has `weight` of the entry `weight.codes`."""
        raise AttributeError(f"{type(self).__name__} takes no parts one by one, {_LOADED_WHOLE}")

    def nbytes_stored(self) -> int:
        """Bytes that the inner tensors take."""
        return sum(t.nbytes for t in self.inner_tensors().values())

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        """The shape and dtype of each inner tensor of a tensor of that logical shape."""
        raise NotImplementedError(f"{type(self).__name__} defines no inner_shapes(shape)")

    def holds(self, values: Tensor) -> bool:
        """True if `values` are those that this tensor has, up to rounding, so that a copy of them changes nothing.
        False for classes whose encoding restores such values itself."""
        return False

    def _write_exactly(self, values: Tensor) -> bool:
        """Write `values` by the present scales if codes of these give them exactly, as those of zeros do. Returns
        whether it did."""
        return False

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        raise self._unsupported("copying high-precision values into it")

    def _is_stored_like(self, other: Tensor) -> bool:
        """True if the inner tensors of both have the same meaning, so that `copy_` copies them one by one."""
        return type(self) is type(other) and self.meta() == other.meta()

    def _takes_meta_of(self, other: Tensor) -> bool:
        """True if `copy_` from `other`, which is stored differently, copies inner tensors and metadata."""
        return False

    @property
    def is_describable(self) -> bool:
        """True if state dicts and checkpoints describe this tensor."""
        return type(self).__name__ in LowbitTensor.kinds

    def stored_format(self) -> str:
        """How the weight is stored, in a word or two, for `lowbit.trace`."""
        return type(self).__name__

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

    def _no_view(self, what: str) -> NoView:
        """As `_unsupported`, for a view: an operation that takes the view inside may read the values."""
        return NoView(self._unsupported(what))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        meta = "".join(
            f", {name}={value!r}" for name, value in self.meta().items() if value is not None
        )
        grad = ", requires_grad=True" if self.requires_grad else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={dtype}, device='{self.device}'{meta}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """torch.compile calls this for each weight at each call of a graph."""
        names = [name for name in self.tensor_attrs if getattr(self, name) is not None]
        meta = tuple([getattr(self, name) for name in self.meta_attrs])
        with torch._C.DisableTorchFunctionSubclass():  # for `dtype`, which passes through it
            return names, (meta, self.dtype, self.flat_from)

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
        """The key of torch.compile's caches: everything that dispatch depends on, including lowbit's own code."""
        _, context = self.__tensor_flatten__()
        tensors = {"": self, **self.inner_tensors()}
        layout = [
            (name, tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)
            for name, t in tensors.items()
        ]
        return f"{type(self).__qualname__}{layout}{context}{self.digest_of_sources()}"

    @classmethod
    def implements(cls, *ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register `fn(func, args, kwargs)` as this class's (and its subclasses') implementation of aten ops."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            for op in ops:
                cls._ops[op] = _counted(fn) if op._schema.is_mutable else fn
            return fn

        return register

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # One frame of Python decides: FSDP2 and torch.compile ask for sizes and the like of each weight in each step.
        if is_traced() is not None:
            refuse_trace()
        if func in cls.products:
            return cls.computed(func, args, kwargs or {})
        if cls.rounds_reads and func not in KEEPS and reads(func, args, kwargs or {}):
            return read(func, args, kwargs or {})
        if func in _SPECIAL:
            return cls._special(func, args, kwargs or {})
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        except NoView as error:
            return cls._without_views(func, args, kwargs or {}, error)

    @classmethod
    def _without_views(cls, func: Any, args: Any, kwargs: Any, error: NotImplementedError) -> Any:
        """A function that failed with `error`, as it is such a view, or takes one inside."""
        raise NotImplementedError(error) from None

    @classmethod
    def computed(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One of the functions in `products`."""
        return getattr(cls, cls.products[func])(*args, **kwargs)

    @classmethod
    def _special(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One of the functions in `_SPECIAL`."""
        if func in CONTRACTIONS:
            return contracted(func, args, kwargs, LowbitTensor)
        # torch's setter would change only the wrapper, not the inner tensors.
        if func == _SET_DATA and isinstance(args[0], LowbitTensor):
            return args[0]._assign_data(args[1])
        # torch's share_memory_ takes the address of the wrapper, which has none.
        if func is Tensor.share_memory_:
            for t in args[0].inner_tensors().values():
                t.share_memory_()
            return args[0]
        # accelerate takes parameters of one address for one parameter, and that of the wrapper is always 0. Tensors
        # that are not parameters keep the 0, by which torch's asynchronous checkpoints know them.
        if func is Tensor.data_ptr and getattr(args[0], "_is_param", False):
            return next(iter(args[0].inner_tensors().values())).data_ptr()
        if func is Tensor.is_shared:
            return all(t.is_shared() for t in args[0].inner_tensors().values())
        # FSDP2 shards no parameter that is not contiguous. The experts of a transposed stack lie one after another.
        if func is Tensor.is_contiguous and not (args[1:] or kwargs) and is_turned_stack(args[0]):
            return True
        if func in (Tensor.numpy, Tensor.__array__):
            raise NotImplementedError(
                f"{cls.__name__} does not become an array of numpy; {cls.way_out}"
            )
        if func is Tensor.__getitem__ and (at := index_in_graph(args[1])) is not None:
            return args[0][at][0]
        if func is Tensor.__setitem__ and isinstance(args[0], LowbitTensor) and write(*args):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func not in READS or (func is Tensor.__getitem__ and is_advanced(args[1])):
            return result
        source = args[0] if args else kwargs["input"]
        return as_copies(source, result) if isinstance(source, LowbitTensor) else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for ancestor in cls.__mro__:
            fn = ancestor.__dict__.get("_ops", {}).get(func)
            if fn is not None:
                return fn(func, args, kwargs or {})
        # Composite operations arrive whole where autograd, which decomposes them, is off: in inference mode, and below
        # DTensor, which pads shards of unequal sizes by aten.pad.
        result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        missing = NotImplementedError(f"{cls.__name__} does not implement {func}; {cls.way_out}")
        return cls._unimplemented(func, args, kwargs or {}, missing)

    @classmethod
    def _unimplemented(cls, func: Any, args: Any, kwargs: Any, error: NotImplementedError) -> Any:
        """An aten operation that no class implements for these arguments: raises `error`."""
        raise error


def written(func: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments that an operation changes in place, those in lists one by one."""
    found: list[Any] = []
    for declared, value in zip(func._schema.arguments, args, strict=False):
        if declared.alias_info is not None and declared.alias_info.is_write:
            found += value if isinstance(value, list | tuple) else [value]
    return found


def count_change(tensors: Sequence[Any]) -> None:
    """Tell autograd that the memory of these tensors has changed, so that it refuses a backward pass that would read
    it. Autograd counts changes of a low-bit tensor and its views, but products may keep inner tensors."""
    changed = [t for t in tensors if isinstance(t, LowbitTensor)]
    wholes: list[Any] = [t._base for t in changed if t._base is not None]
    inner = [i for t in (*changed, *wholes) for i in t.inner_tensors().values()]
    torch.autograd.graph.increment_version([i for i in inner if not i.is_inference()])


def count_on_lists(func: Any, args: Sequence[Any]) -> None:
    """As `count_change`, after an operation on lists, of which autograd counts no change of a low-bit tensor itself:
    torch counts those of plain tensors where it changes them, which is below these."""
    changed = [t for t in written(func, args) if isinstance(t, LowbitTensor)]
    count_change(changed)
    torch.autograd.graph.increment_version([t for t in changed if not t.is_inference()])


def _counted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, the implementation of operations in place, which then tells autograd."""

    @wraps(fn)
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        result = fn(func, args, kwargs)
        count_change(written(func, args))
        return result

    return run


def _also_a_parameter(make: Callable[..., Any]) -> Any:
    """`make`, a `__new__`, which also takes a tensor of its class, as `nn.Parameter` does, and gives a parameter.

    accelerate calls the class of a parameter so, when it moves the parameter to another device.
    """

    @wraps(make)
    def new(cls: type[LowbitTensor], *args: Any, **kwargs: Any) -> Any:
        is_own = len(args) == 1 and isinstance(args[0], cls) and kwargs.keys() <= {"requires_grad"}
        if "requires_grad" in kwargs and not is_own:
            raise TypeError(f"{cls.__name__} is not made of values alone, {_LOADED_WHOLE}")
        return torch.nn.Parameter(args[0], **kwargs) if is_own else make(cls, *args, **kwargs)

    return staticmethod(new)
