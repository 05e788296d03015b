"""Pickling of low-bit tensors, and the check of the parts that one is put together from.

A pickle holds a call of `rebuild` on plain inner tensors and metadata. torch's own way for wrapper subclasses records
the device of the wrapper beside the storages of the inner tensors: it refuses a `map_location` that is a function, and
it checks nothing. Files written so by earlier versions still load, through `__setstate__`.

Whoever puts a tensor together from parts that came from elsewhere (a pickle, `lowbit.load`, an optimizer's state
dict) calls `check_parts`. Codes of the wrong shape would otherwise be broadcast, or read as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.hooks import warn_if_has_hooks

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of scales and high-precision weights, where the class leaves the choice."""
_NOT_A_TENSOR = (
    "accepted: plain dense tensors that need no gradient, each element in memory of its own"
)


class Pickling:
    """Mixin of LowbitTensor: pickling through `rebuild`, and `check_parts`."""

    caches: ClassVar[tuple[str, ...]] = ()
    """Attributes that a pickle leaves out, since they are computed anew where they are missing."""

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        warn_if_has_hooks(self)
        own = {*self.tensor_attrs, *self.meta_attrs, "flat_from", *self.caches}
        others = {name: value for name, value in self.__dict__.items() if name not in own}
        described = (tuple(self.shape), self.dtype, self.flat_from, self.requires_grad)
        return rebuild, (type(self), self.inner_tensors(), self.meta(), *described, others)

    def __setstate__(self: Any, state: Any) -> None:
        """Takes what torch pickled: a wrapper and its attributes. Raises ValueError as `check_parts`."""
        label = f"the pickled {type(self).__name__}"
        if not isinstance(state, dict):
            raise ValueError(f"{label} has the state {state!r}; expected its attributes by name")
        missing = [n for n in (*self.tensor_attrs, *self.meta_attrs) if n not in state]
        if missing:
            raise ValueError(f"{label} has no {' and no '.join(missing)}; it has {[*state]}")
        self.flat_from = state.get("flat_from")
        for name in (*self.tensor_attrs, *self.meta_attrs):
            setattr(self, name, state[name])
        own = {*self.tensor_attrs, *self.meta_attrs, "flat_from", *self.caches}
        _set_others(self, {name: value for name, value in state.items() if name not in own})
        self.check_parts()

    def check_parts(self: Any) -> None:
        """Raise ValueError, which names class, part, what it is and what is expected, unless the inner tensors are
        plain, on one device, and of the shapes and dtypes that this class, logical shape and metadata ask for."""
        label = f"the {type(self).__name__} of shape {tuple(self.shape)}"
        if not self.dtype.is_floating_point:
            raise ValueError(f"{label} has dtype {self.dtype}; accepted: floating dtypes")
        shape = _stored_shape(self, label)
        parts = {name: getattr(self, name) for name in self.tensor_attrs}
        for name, part in parts.items():
            if part is not None:
                _check_plain(f"{name} of {label}", part, self.device)
        self._check_meta(label)
        try:
            expected = self.inner_shapes(shape)
        except AttributeError as error:  # a part that is None has no dtype
            missing = [name for name, part in parts.items() if part is None]
            raise ValueError(f"{label} has no {' and no '.join(missing)}") from error
        for name, part in parts.items():
            _check_part(name, part, label, expected.get(name), self.numel() == 0)

    def check_meta(self: Any) -> None:
        """Raise ValueError, or another error that a damaged attribute leads to, for metadata that cannot be."""
        for value in self.meta().values():
            _check_flags(value)
        described = self.meta_to_json()
        again = {**self.meta(), **self.meta_from_json(described)}
        twin = self.from_inner(self.inner_tensors(), again, self.shape, self.dtype)
        if twin.meta_to_json() != described:
            raise ValueError(f"expected {again}")

    def _check_meta(self: Any, label: str) -> None:
        try:
            self.check_meta()
        except (
            *(ValueError, TypeError, LookupError, AttributeError),
            *(ArithmeticError, RuntimeError),
        ) as error:
            raise ValueError(
                f"{label} has metadata that cannot be: {self.meta()}: {error}"
            ) from error


def _stored_shape(t: Any, label: str) -> tuple[int, ...]:
    if t.flat_from is None:
        return tuple(t.shape)
    shape = t.flat_from
    if not isinstance(shape, tuple) or not all(type(s) is int and s >= 0 for s in shape):
        raise ValueError(f"{label} was flattened from {shape!r}, which is no shape")
    if t.ndim != 1 or torch.Size(shape).numel() != t.numel():
        raise ValueError(f"{label} was flattened from {shape}, which has other elements")
    return shape


def _check_plain(label: str, part: Any, device: torch.device) -> None:
    if not isinstance(part, Tensor):
        raise ValueError(f"{label} is a {type(part).__name__}; {_NOT_A_TENSOR}")
    is_plain = type(part) is Tensor or isinstance(part, FakeTensor)
    if not is_plain or part.requires_grad:
        kind = f"{type(part).__name__}, requires_grad={part.requires_grad}"
        raise ValueError(f"{label} is a {kind}; {_NOT_A_TENSOR}")
    if part.is_nested or part.layout is not torch.strided or part.is_quantized:
        raise ValueError(f"{label} is a {part.layout} tensor of {part.dtype}; {_NOT_A_TENSOR}")
    if part.is_neg() or any(
        step == 0 and size > 1 for size, step in zip(part.shape, part.stride(), strict=True)
    ):
        strides = tuple(part.stride())
        raise ValueError(
            f"{label} is a view of shape {tuple(part.shape)} with strides {strides}, negated: {part.is_neg()}; "
            f"{_NOT_A_TENSOR}"
        )
    if part.device != device:
        raise ValueError(f"{label} is on {part.device}; expected {device}, where the tensor is")


def _check_part(
    name: str,
    part: Tensor | None,
    label: str,
    expected: tuple[Sequence[int], torch.dtype] | None,
    is_empty: bool,
) -> None:
    if part is None or expected is None:
        if part is not None:
            raise ValueError(
                f"{name} of shape {tuple(part.shape)} does not fit {label}; expected none"
            )
        if expected is not None:
            raise ValueError(f"{label} has no {name}; expected {_said(*expected)}")
        return
    shape, dtype = expected
    # an empty slice keeps the scale that all rows share
    fits = len(part.shape) == len(shape) and all(
        size == wanted or (is_empty and wanted == 0 and size == 1)
        for size, wanted in zip(part.shape, shape, strict=True)
    )
    if not fits or part.dtype != dtype:
        raise ValueError(
            f"{name} of {_said(part.shape, part.dtype)} does not fit {label}; expected {_said(shape, dtype)}"
        )
    if name in ("scale", "weight") and dtype not in FLOATS:
        raise ValueError(f"{name} of {dtype} does not fit {label}; accepted: {FLOATS}")


def _said(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"shape {tuple(shape)}, {dtype}"


def _check_flags(value: Any) -> None:
    """A pickle restores a frozen dataclass without the checks of its constructor."""
    if not is_dataclass(value):
        return
    for each in fields(value):
        held = getattr(value, each.name)
        if each.type == "bool" and not isinstance(held, bool):
            raise ValueError(f"{each.name} must be True or False, got {held!r}")
        _check_flags(held)


def _set_others(t: Any, others: Mapping[str, Any]) -> None:
    """Attributes that a tensor was given from outside, such as the flag of a parameter."""
    for name, value in others.items():
        if hasattr(type(t), name):
            raise ValueError(
                f"the pickled {type(t).__name__} sets {name!r}, which every such tensor has"
            )
        setattr(t, name, value)


def rebuild(
    kind: Any,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    flat_from: tuple[int, ...] | None,
    requires_grad: bool,
    others: Mapping[str, Any],
) -> Any:
    """The low-bit tensor that was pickled, its inner tensors wherever `map_location` put them.

    Pickles name this function: its name, module and arguments stay. Raises ValueError as `check_parts`.
    """
    if not (isinstance(kind, type) and issubclass(kind, Pickling)):
        raise ValueError(f"{kind!r} is no class of low-bit tensors")
    cls: Any = kind
    unknown = {*tensors} - {*cls.tensor_attrs}
    if unknown or {*meta} != {*cls.meta_attrs} or not tensors:
        raise ValueError(
            f"the pickled {cls.__name__} has the parts {[*tensors]} and the metadata {[*meta]}; expected "
            f"{[*cls.tensor_attrs]}, of which some may be missing, and {[*cls.meta_attrs]}"
        )
    for name, part in tensors.items():
        if not isinstance(part, Tensor):
            raise ValueError(
                f"{name} of the {cls.__name__} is a {type(part).__name__}; {_NOT_A_TENSOR}"
            )
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the pickled {cls.__name__} has the dtype {dtype!r}")
    strides = cls._strides(tuple(shape), meta)
    t = cls.from_inner(tensors, meta, shape, dtype, strides=strides, flat_from=flat_from)
    _set_others(t, others)
    t.check_parts()
    if requires_grad:
        t.requires_grad_()
    return t


torch.serialization.add_safe_globals([rebuild])
