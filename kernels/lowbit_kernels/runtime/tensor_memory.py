"""Where many tensors are in memory, and how they are laid out, read by one call: about 50 ns a tensor.

An optimizer's step hands addresses to a kernel. So each step must know that every weight, state and gradient still has
the memory, dtype and shape that it had before. In Python one question about a tensor takes as long as
``tensor_memory.cpp`` takes for all of them. The machine's C++ compiler compiles that file at first use. Without a
compiler Python asks the same questions.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import weakref
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lowbit_kernels.runtime import host_compiler, launcher
from lowbit_kernels.runtime.sources import program

_DTYPE, _DEVICE, _SHAPE = map(operator.attrgetter, ("dtype", "device", "shape"))
_WORDS = 6
"""Words of a layout with three dimensions. There is room for these at first."""
_DESCRIBE = 5
"""The place of `dltensor_from_py_object_no_sync` among the 64-bit words of `DLPackExchangeAPI`, after the version, the
earlier API and three functions."""


class Memory(NamedTuple):
    """The memory of some tensors. Two are equal exactly if all three fields are."""

    addresses: bytes
    """int64 for each tensor; 0 for one without memory."""
    layouts: object
    """Device, dtype and shape of each tensor, to compare with those of another `Memory`."""
    are_contiguous: bool

    def numbers(self) -> np.ndarray:
        """The addresses, int64 [tensors]."""
        return np.frombuffer(self.addresses, np.int64)


def read(tensors: list[Any]) -> Memory | None:
    """The memory of the tensors; None if one of them has no address, as sparse tensors and those around other tensors,
    or is not a tensor."""
    compiled = _compiled()
    try:
        return _in_python(tensors) if compiled is None else compiled(tensors)
    except (RuntimeError, NotImplementedError, BufferError, TypeError, AttributeError):
        return None


def _in_python(tensors: list[Any]) -> Memory:
    addresses = np.array(list(map(Tensor.data_ptr, tensors)), np.int64)
    layouts = [list(map(name, tensors)) for name in (_DEVICE, _DTYPE, _SHAPE)]
    return Memory(addresses.tobytes(), layouts, all(map(Tensor.is_contiguous, tensors)))


class _Compiled:
    """`_in_python` by the library, with torch's function `describe`."""

    def __init__(self, library: ctypes.PyDLL, describe: int) -> None:
        self._read = library.read
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._read.argtypes = [
            *(address, address, ctypes.py_object, number),
            *(address, address, number, ctypes.POINTER(ctypes.c_int32)),
        ]
        self._read.restype = number
        self._functions = describe, _python_function("PyList_GetItem")

    def __call__(self, tensors: list[Any], room: int = _WORDS) -> Memory:
        count, flag = len(tensors), ctypes.c_int32()
        addresses = (ctypes.c_int64 * count)()
        layouts = (ctypes.c_int64 * (room * count))()
        used = self._read(*self._functions, tensors, count, addresses, layouts, len(layouts), flag)
        if used < 0:
            raise RuntimeError("torch does not describe one of the tensors")
        if used > len(layouts):  # more dimensions than expected
            return self(tensors, room=-(-used // count))
        return Memory(bytes(addresses), bytes(layouts)[: 8 * used], bool(flag.value))


class _Watched(ctypes.Structure):
    """`Watched` of the .cpp."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("next", "attribute", "release", "address")],
        *[(name, ctypes.c_int64) for name in ("dicts", "values", "names")],
        *[(name, ctypes.c_void_p) for name in ("is_watched", "kinds", "objects", "name", "inner")],
        *[(name, ctypes.c_void_p) for name in ("handles", "addresses")],
    )


class MemoryWatch:
    """Tells whether dicts still hold the same tensors, in the same memory, at about 15 ns a tensor.

    It keeps no tensor alive, and notes when one dies. Until then no other object can have its id.

    Args:
        owner: a dict of dicts.
        is_watched: for each of these dicts, whether to look into it.
        around: the class of tensors around other tensors, and the attributes that hold those.

    Raises:
        RuntimeError, AttributeError: it cannot be compiled, or torch lacks a function for it.
    """

    def __init__(
        self,
        owner: dict[Any, dict[str, Any]],
        is_watched: list[bool],
        around: tuple[type, tuple[str, ...]],
    ) -> None:
        outer, names = around
        self._names = [sys.intern(name) for name in names]
        dicts = [one for one, wanted in zip(owner.values(), is_watched, strict=True) if wanted]
        values = [value for one in dicts for value in one.values()]
        kinds = [2 if isinstance(v, outer) else int(isinstance(v, Tensor)) for v in values]
        parts = operator.attrgetter(*names)  # a tuple, because there are at least two
        inner: list[Tensor] = []
        tensors: list[Tensor] = []
        for value, kind in zip(values, kinds, strict=True):
            own = list(parts(value)) if kind == 2 else []
            inner += own
            tensors += own or [value] * kind
        self._lost: list[object] = []
        seen = [value for value, kind in zip(values, kinds, strict=True) if kind] + inner
        self._alive = [weakref.ref(tensor, self._lost.append) for tensor in seen]
        self._others = [value for value, kind in zip(values, kinds, strict=True) if not kind]
        torch_functions = launcher.torch_library("cpu")
        self._arrays = (
            *((ctypes.c_uint8 * len(flags))(*flags) for flags in (is_watched, kinds)),
            _pointers([id(value) for value in values]),
            _pointers([id(name) for name in self._names]),
            _pointers([id(tensor) for tensor in inner]),
            _pointers([tensor._cdata for tensor in tensors]),
            _pointers([tensor.data_ptr() for tensor in tensors]),
        )
        self._watched = _Watched(
            *map(_python_function, ("PyDict_Next", "PyObject_GetAttr", "Py_DecRef")),
            *launcher.addresses_of(torch_functions, ("aoti_torch_get_data_ptr",)),
            *(len(is_watched), len(values), len(names)),
            *map(ctypes.addressof, self._arrays),
        )
        self._unchanged = _library().unchanged
        self._unchanged.argtypes = [ctypes.POINTER(_Watched), ctypes.py_object]

    def holds(self, owner: dict[Any, dict[str, Any]]) -> bool:
        """True if nothing has changed."""
        try:
            return not self._lost and self._unchanged(self._watched, owner) == 1
        except AttributeError:  # one of `names` was deleted
            return False


def _pointers(values: list[int]) -> Any:
    return (ctypes.c_void_p * len(values))(*values)


def _python_function(name: str) -> int | None:
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value


def _library() -> ctypes.PyDLL:
    """The compiled file. Raises RuntimeError where it cannot be compiled."""
    found = _library_or_error()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@functools.cache  # also the error: each new plan of a step asks, and a compiler may take a second to fail
def _library_or_error() -> ctypes.PyDLL | str:
    try:
        library = host_compiler.library(program({}, "runtime/tensor_memory.cpp"))
    except RuntimeError as error:
        return str(error)
    # Unlike CDLL, PyDLL keeps the GIL, and raises the exception that Python has after a call.
    return ctypes.PyDLL("tensor_memory", handle=library._handle)


@functools.cache
def _compiled() -> _Compiled | None:
    """The compiled form of `read`; None where there is no compiler, or torch has no such function."""
    try:
        prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
        pointer = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
        capsule = Tensor.__dlpack_c_exchange_api__
        table = pointer(capsule, b"dlpack_exchange_api")
        major = ctypes.c_uint32.from_address(table).value
        describe = ctypes.c_uint64.from_address(table + 8 * _DESCRIBE).value
        return _Compiled(_library(), describe) if major == 1 and describe else None
    except (RuntimeError, OSError, AttributeError, ValueError):
        return None
