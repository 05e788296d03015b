"""Pickling of low-bit tensors, and the check of the inner tensors that one is assembled from.

A pickle holds a call of `rebuild` on plain inner tensors and metadata. torch's own pickling of wrapper subclasses
records the device of the wrapper beside the storages of the inner tensors. It refuses a `map_location` that is a
function, and it checks nothing.

Code that assembles a tensor from parts of another origin (a pickle, `lowbit.load`, an optimizer's state dict) calls
`check_parts`. Without it, codes of the wrong shape are broadcast, or read as zeros.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.hooks import warn_if_has_hooks

from lowbit.files import digests
from lowbit.linear.frozen import registered_sources
from lowbit.numerics.code_range import FLOATS
from lowbit.numerics.granularity import Granularity

_NOT_A_TENSOR = (
    "accepted: plain dense tensors that need no gradient, each element in memory of its own"
)


@functools.cache
def _digest_of_sources(kinds: frozenset[type]) -> str:
    """A digest of lowbit's Python sources, and of the files that define `kinds`. A compiled graph that torch keeps on
    disk computes what the sources said when it was made, so later sources must not find it."""
    return digests.of_pieces(_sources(kinds))


def _sources(kinds: frozenset[type]) -> Iterator[bytes]:
    for package in ("lowbit", "lowbit_kernels"):
        folder = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            yield path.read_bytes()
    for name in sorted({kind.__module__ for kind in kinds}):
        if name.partition(".")[0] not in ("lowbit", "torch", "builtins"):
            file = getattr(sys.modules.get(name), "__file__", None)
            # a class without a file, as in a notebook: no other process takes its graphs
            yield Path(file).read_bytes() if file else os.urandom(16)


class Pickling:
    """Mixin of LowbitTensor: pickling through `rebuild`, and `check_parts`."""

    caches: ClassVar[tuple[str, ...]] = ("shown_in",)
    """Attributes that a pickle leaves out. The class computes them again where they are missing."""

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        warn_if_has_hooks(self)
        own = {*self.tensor_attrs, *self.meta_attrs, "flat_from", "shares", *self.caches}
        others = {name: value for name, value in self.__dict__.items() if name not in own}
        described = (tuple(self.shape), self.dtype, self.flat_from, self.requires_grad)
        parts = self.inner_tensors()
        if any(isinstance(part, FakeTensor) for part in parts.values()):
            # torch 2.11 keys its caches of compiled graphs by pickles, later ones by `_stable_hash_for_caching`
            others["_sources"] = self.digest_of_sources()
        return rebuild, (type(self), parts, self.meta(), *described, others)

    def digest_of_sources(self: Any) -> str:
        """The part of the keys of compiled graphs beside the layout: the code that dispatches the tensor."""
        return self.digest_of_code(self.meta().values())

    @classmethod
    def digest_of_code(cls, meta: Iterable[Any]) -> str:
        """`digest_of_sources` of tensors of this class with these values of their metadata."""
        kinds = frozenset({*cls.__mro__, *map(type, meta), *Granularity.kinds.values()})
        return f"{_digest_of_sources(kinds)}{registered_sources()}"

    def check_parts(self: Any) -> None:
        """Raise ValueError unless the inner tensors are plain, on one device, and of the shapes and dtypes that the
        class, the logical shape and the metadata require. The message names the class, the part, its shape and the
        expected one."""
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
        except AttributeError as error:  # of a part that is None
            missing = [name for name, part in parts.items() if part is None]
            raise ValueError(f"{label} has no {' and no '.join(missing)}") from error
        for name, part in parts.items():
            _check_part(name, part, label, expected.get(name), self.numel() == 0)
            if part is not None and self.is_floating(name) and part.dtype not in FLOATS:
                raise ValueError(f"{name} of {part.dtype} does not fit {label}; accepted: {FLOATS}")

    def is_floating(self: Any, name: str) -> bool:
        """True if the inner tensor of this name may have any dtype of `lowbit.numerics.code_range.FLOATS`."""
        return name in ("scale", "weight")

    def check_meta(self: Any) -> None:
        """Raise ValueError, or another error that a damaged attribute causes, for impossible metadata."""
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
            raise ValueError(f"{label} has impossible metadata: {self.meta()}: {error}") from error


def _stored_shape(t: Any, label: str) -> tuple[int, ...]:
    if t.flat_from is None:
        return tuple(t.shape)
    shape = t.flat_from
    if not isinstance(shape, tuple) or not all(type(s) is int and s >= 0 for s in shape):
        raise ValueError(f"{label} was flattened from {shape!r}, which is not a shape")
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
    steps = zip(part.shape, part.stride(), strict=True)
    repeats = part.numel() > 0 and any(step == 0 and size > 1 for size, step in steps)
    if part.is_neg() or repeats:
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
            raise ValueError(f"{label} has no {name}; expected {describe_part(*expected)}")
        return
    shape, dtype = expected
    # an empty slice keeps the scale that all rows of the original share
    fits = len(part.shape) == len(shape) and all(
        size == wanted or (is_empty and wanted == 0 and size == 1)
        for size, wanted in zip(part.shape, shape, strict=True)
    )
    if not fits or part.dtype != dtype:
        raise ValueError(
            f"{name} of {describe_part(part.shape, part.dtype)} does not fit {label}; expected "
            f"{describe_part(shape, dtype)}"
        )


def describe_part(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Shape and dtype of an inner tensor, for messages."""
    return f"shape {tuple(shape)}, {dtype}"


def _check_flags(value: Any) -> None:
    """Raise ValueError for a wrong bool: a pickle restores a dataclass without the checks of its constructor."""
    if not is_dataclass(value):
        return
    for each in fields(value):
        held = getattr(value, each.name)
        if each.type == "bool" and not isinstance(held, bool):
            raise ValueError(f"{each.name} must be True or False, got {held!r}")
        _check_flags(held)


def _set_others(t: Any, others: Mapping[str, Any]) -> None:
    """Restore attributes that were set on a tensor from outside, such as torch's flag of a parameter."""
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
    """The pickled low-bit tensor, on the device where `map_location` put its inner tensors.

    Pickles refer to this function by name. So its name, module and arguments must not change.

    Args:
        kind: the class of the tensor.
        tensors, meta: its inner tensors and its metadata, by name.
        shape, dtype: of the tensor.
        flat_from: the shape of which it is a flattened view, or None.
        requires_grad: of the tensor.
        others: attributes that a user gave it.

    Raises ValueError as `check_parts`.
    """
    if not (isinstance(kind, type) and issubclass(kind, Pickling)):
        raise ValueError(f"{kind!r} is not a class of low-bit tensors")
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
