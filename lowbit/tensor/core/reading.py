"""Which value of a trained weight an operation gets: the rounded one, or the high-precision master.

A `MasterWeightTensor` holds a high-precision weight that a conversion rounds later. A model must compute with rounded
values today too, in every operation. Operations that train, store or move the weight must get high-precision values.

| who asks                                                                   | gets                          |
|----------------------------------------------------------------------------|-------------------------------|
| an operation of a forward pass, of any module, with or without autograd    | the rounded values            |
| any in a graph of torch.compile                                            | the rounded values            |
| operations in place on the weight, `copy_`, lists (`torch._foreach_…`)     | the master                    |
| `detach`, `clone`, `to`, state dicts, FSDP2, pickles, flat copies          | the master, in the same class |
| everything outside of a forward pass: optimizers, averages, regularisers   | the master                    |

Rounded values are plain tensors. They carry the straight-through gradient to the weight, since `read()` makes them
above autograd. A part that is rounded as the whole is, such as an expert, stays a weight of its class, whose products
round their input too. Other parts of a weight whose products round inputs are weights over rounded values.

In eager mode the caller decides: the innermost call of a module, of an optimizer or of FSDP2 on the
stack of Python. So an optimizer that steps inside of a forward pass gets masters, and a closure that calls the model
rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.linear.frozen.checks import TRANSFORMS, in_transform
from lowbit.numerics.opaque import for_subclasses
from lowbit.tensor.core.contracted import CONTRACTIONS, NoProduct, contracted
from lowbit.tensor.core.indexing import READS, as_copies
from lowbit.tracing import tracer

_CHECKPOINT = torch.utils.checkpoint.__file__
_CALL, _WRAPPED_CALL = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__
_FUNCTORCH = Path(torch.__file__).parent / "_functorch"
_TRANSFORMS = {str(_FUNCTORCH / f"{name}.py") for name in ("apis", "eager_transforms", "vmap")}
_OPS = torch._ops.OpOverload, torch._ops.OpOverloadPacket
_MANAGES = (
    str(Path(torch.optim.__file__).parent),
    str(Path(torch.__file__).parent / "distributed" / "fsdp"),
)
"""Folders of code that updates, averages and shards weights, also where a forward pass calls it."""


def in_forward() -> bool:
    """True if this is an operation of a model: a module runs, and no optimizer or FSDP2 inside of it. In graphs of
    torch.compile all are."""
    if torch.compiler.is_compiling():
        return True
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # By identity: from Python 3.12 on the hash of a code object reads all of its bytecode.
        if code is _CALL or code is _WRAPPED_CALL or code.co_filename == _CHECKPOINT:
            return True  # checkpointing runs parts of a forward pass again, in backward
        if code.co_filename.startswith(_MANAGES):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


def below_transform() -> bool:
    """True if a transform of torch.func calls this operation. Below autograd torch does not say so."""
    if torch.compiler.is_compiling():
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in _TRANSFORMS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# ---- the functions that do not read values ---------------------------------------------------------------------------


def _of_tensors(*names: str) -> Iterator[Any]:
    for owner in (Tensor, torch):
        for name in names:
            if hasattr(owner, name):
                yield getattr(owner, name)


def _properties() -> Iterator[Any]:
    """Getters and setters of `shape`, `data`, `grad` and the like, and of views such as `T`."""
    for name in dir(Tensor):
        found = getattr(Tensor, name, None)
        if hasattr(type(found), "__set__"):
            yield from (found.__get__, found.__set__, found.__delete__)  # type: ignore[union-attr]


def _in_place() -> Iterator[Any]:
    """Functions that write to their first argument."""
    for owner in (Tensor, torch, nn.init, F):
        for name in dir(owner):
            if name.endswith("_") and not name.startswith("_"):
                yield getattr(owner, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
        yield from _of_tensors(f"__i{name}__")
    yield from _of_tensors("__ilshift__", "__irshift__", "__setitem__")


_WRITES = {f for f in _in_place() if callable(f)}
_VIEWS_OF_PROPERTIES = {getattr(Tensor, name).__get__: name for name in ("T", "mT", "H", "mH")}
KEEPS = {
    *_properties(),
    *_of_tensors(
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"),
        *("element_size", "get_device", "data_ptr", "untyped_storage", "storage", "storage_type"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference"),
        *("is_pinned", "is_shared", "is_set_to", "is_same_size", "is_conj", "is_neg", "dim_order"),
        *("is_coalesced", "is_distributed", "is_tensor", "is_storage", "result_type", "can_cast"),
        *("detach", "clone", "contiguous", "to", "cpu", "cuda", "xpu", "type", "type_as"),
        *("float", "double", "half", "bfloat16", "pin_memory", "equal", "copy", "__copy__"),
        *("new_zeros", "new_empty", "new_ones", "new_full", "new_tensor", "new"),
        *("new_empty_strided", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like"),
        *("randn_like", "randint_like", "as_strided", "view_as", "reshape_as"),
        *("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
        *("__deepcopy__", "__reduce__", "__reduce_ex__", "__setstate__", "__repr__", "__hash__"),
        *("__dir__", "__array_priority__", "_is_view", "_make_subclass", "_typed_storage"),
        *("copy_", "module_load", "record_stream", "const_data_ptr", "dense_dim", "sparse_dim"),
        *("qscheme", "resolve_conj", "resolve_neg", "real", "imag", "ipu", "mtia", "detach_copy"),
        *("alias_copy", "__dlpack__", "__dlpack_device__", "dequantize"),
    ),
    *(torch.autograd.grad, torch.autograd.backward),
} - set(_VIEWS_OF_PROPERTIES)
"""Functions that store, move or describe a tensor."""
_PRIVATE = set(_of_tensors("_weight_norm", "_weight_norm_interface", "_scaled_mm"))
"""Functions that read, in spite of their names."""
_TRANSPOSES = {
    *_of_tensors("t", "transpose", "permute", "swapaxes", "swapdims", "adjoint"),
    *_VIEWS_OF_PROPERTIES,
}
_DIM_LAST = set(_of_tensors("split", "chunk", "tensor_split", "split_with_sizes"))
_SLICES = {*_DIM_LAST, *_of_tensors("narrow", "index_select")}
_FLATTENS = set(_of_tensors("flatten", "ravel"))
_VIEWS = {*_FLATTENS, *_of_tensors("view", "reshape")}
_CATS = set(_of_tensors("cat", "concat", "concatenate"))
PARTS = {*READS, *_TRANSPOSES, *_SLICES, *_VIEWS, *_CATS}
"""Functions whose result holds elements of the tensor as they are."""

FORWARD_OPS: set[Any] = set()
"""Ops that modules call themselves, so that they read. Who registers one adds it."""


def reads(func: Any, args: Any, kwargs: Any) -> bool:
    """True if this call gets rounded values of a weight among its arguments, and is not a cut that stays a weight."""
    name = getattr(func, "__name__", "")
    is_private = name.startswith("_") and not name.startswith("__")
    is_inner = isinstance(func, _OPS) and func not in FORWARD_OPS
    if is_inner or (is_private and func not in _PRIVATE):
        return False  # below autograd, of optimizers (`_foreach_…`), or of torch itself
    if func in _WRITES and (not args or is_rounded_later(args[0])):
        return False
    if is_rounded_later(kwargs.get("out")):
        return False
    own = [x for x in tree_leaves((args, kwargs)) if is_rounded_later(x)]
    if func in PARTS and torch.compiler.is_compiling() and not any(map(_is_of_a_model, own)):
        return False
    return bool(own) and in_forward() and not stays_a_weight(func, args, kwargs)


def _is_of_a_model(weight: Tensor) -> bool:
    """True if a graph, which knows no caller, may take the weight for one of a forward pass."""
    return isinstance(weight, nn.Parameter) or weight.requires_grad


def is_rounded_later(x: Any) -> bool:
    """True if x is a weight in high precision that its products see rounded."""
    return getattr(type(x), "rounds_reads", False)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`func` of rounded values in place of the weights among its arguments."""
    if in_transform():
        refused = next(x for x in tree_leaves((args, kwargs)) if is_rounded_later(x))
        raise refused._unsupported(TRANSFORMS)
    if func in CONTRACTIONS:
        own, named = tree_map(_factor, (args, kwargs))
        rounding = [x for x in tree_leaves((own, named)) if is_rounded_later(x)]
        if rounding:  # its products round their input
            with suppress(NoProduct):
                return contracted(func, own, named, type(rounding[0]))
    if func is F.dropout and not kwargs["training"]:
        return _factor(args[0])
    is_part = func in PARTS
    value = _settled if is_part else rounded_values
    found = func(*tree_map(value, args), **tree_map(value, kwargs))
    if is_part and func in READS and (func is not Tensor.__getitem__ or _is_basic(args[1])):
        return as_copies(args[0] if args else kwargs["input"], found)
    return found


def rounded_values(x: Any) -> Any:
    """The rounded values of a weight, plain, differentiable, in its dtype; x itself if it is none."""
    if not is_rounded_later(x):
        return x
    if x.flat_from is not None:
        return rounded_values(x.view(x.flat_from)).reshape(-1)
    found = x.read().to(x.dtype)
    tracer.rounded(found, x)
    return found


def _settled(x: Any) -> Any:
    """A weight over the rounded values whose products round their input, or `rounded_values`."""
    if not is_rounded_later(x):
        return x
    found = x.settled()
    return rounded_values(x) if found is x else found


def _factor(x: Any) -> Any:
    is_whole = is_rounded_later(x) and x.flat_from is None
    return x.factor() if is_whole else rounded_values(x)


ROUNDING_INPUTS = for_subclasses("rounding_inputs(Tensor weight, Tensor values) -> Tensor")


def rounding_inputs(weight: Tensor, values: Tensor) -> Tensor:
    """A weight over `values`, the rounded ones of `weight`, whose products round their input as those of `weight`, and
    `values` no more. Its gradient is that of `values`."""
    with torch._C.DisableTorchFunctionSubclass():
        return ROUNDING_INPUTS(weight, values)


# ---- parts -----------------------------------------------------------------------------------------------------------


def stays_a_weight(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """True if the result is rounded as a part of the whole weight is, so that it may stay a weight of its class."""
    if func not in PARTS:
        return False
    if func in _CATS:
        tensors = args[0] if args else kwargs["tensors"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if any(is_rounded_later(t) and t.flat_from is not None for t in tensors):
            return not in_forward()  # `torch.nn.utils.parameters_to_vector`
        return dim in (0, -tensors[0].ndim) and all(
            is_rounded_later(t) and t.has_rows_alone for t in tensors
        )
    weight = args[0] if args else kwargs["input"]
    if not is_rounded_later(weight):
        return False
    given = [*args[1:], *kwargs.values()]
    if weight.flat_from is not None:
        return func in _VIEWS
    if func in _TRANSPOSES:
        return weight.swaps_last and _swaps_last(func, given, weight.ndim)
    if func in _VIEWS:
        return _views_alone(weight, func, given)
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return _selects_alone(weight, index)
    dim = _dim_of(func, args, kwargs) % weight.ndim
    if func in _SLICES:
        return (weight.has_rows_alone and dim == 0) or weight.is_settled
    return weight.has_experts_alone and dim == 0  # one expert, or each


def _dim_of(func: Any, args: Any, kwargs: Any) -> int:
    at = 2 if func in _DIM_LAST else 1
    return kwargs.get("dim", args[at] if len(args) > at else 0)


def _swaps_last(func: Any, given: list[Any], ndim: int) -> bool:
    if not given:  # t, T, mT, adjoint
        return ndim == 2 or _VIEWS_OF_PROPERTIES.get(func) == "mT"
    dims = given[0] if isinstance(given[0], list | tuple) else given
    own = [d % ndim for d in dims]
    if len(own) == 2 and ndim == 3:
        return sorted(own) == [1, 2]
    return ndim == 2 or own == [0, 2, 1]


def _views_alone(weight: Any, func: Any, given: list[Any]) -> bool:
    """True if a view is the flat one, which becomes one of the whole again, or one of rows that nothing rounds."""
    if func in _FLATTENS:
        return not given
    if isinstance(given[0], torch.dtype):
        return False
    sizes = given[0] if isinstance(given[0], list | tuple) else given
    if len(sizes) == 1:
        return sizes[0] in (-1, weight.numel())
    alone = weight.is_settled or not in_forward()
    return alone and len(sizes) > 1 and sizes[-1] == weight.shape[-1]


def _selects_alone(weight: Any, index: tuple[Any, ...]) -> bool:
    """True if `weight[index]` selects rows of a matrix or experts of a stack, each of which is rounded alone."""
    first, *rest = index
    if weight.is_settled and all(isinstance(i, slice) for i in index):
        return True
    if any(not _is_whole(i) for i in rest):
        return False
    if isinstance(first, int):
        return weight.has_experts_alone
    if isinstance(first, Tensor):
        if weight.has_experts_alone:
            return first.ndim < 2 and not rest
        return first.ndim == 1 and not rest and weight.has_rows_alone
    return _is_whole(first) or (isinstance(first, slice) and weight.has_rows_alone)


def _is_whole(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _is_basic(index: Any) -> bool:
    """True if torch answers with a view."""
    own = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in own)
