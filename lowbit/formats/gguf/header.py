"""Checks the header of a GGUF file before the package `gguf` reads it.

The package believes a header: it would never finish an array of 2⁶⁰ elements, and keep some 300 bytes for each
element. `check` compares every size with that of the file first.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from lowbit.formats.base import FormatError

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the scalar types."""
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES, _MOST_ELEMENTS = 2**17, 2**22
"""Tensors or fields, and elements of all arrays. A vocabulary of 256,000 tokens takes about a million elements."""
_MOST_DIMENSIONS = 8


def check(path: Path) -> None:
    """Raise FormatError for a header with impossible sizes, and for another byte order than this machine's."""
    with path.open("rb") as file:
        try:
            _Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).check()
        except (struct.error, ValueError, OverflowError) as error:
            raise FormatError(
                f"{path} cannot be read: it is damaged or not a GGUF file ({error})"
            ) from error


class _Header:
    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._size = content, len(content)
        self._at = self._elements = 0

    def check(self) -> None:
        if self._content[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ValueError(
                "it has the byte order of another machine, and lowbit does not swap the bytes of its blocks"
            )
        if version < 2:
            raise ValueError(f"version {version}; accepted: 2 and 3")
        tensors, fields = self._number("Q"), self._number("Q")
        if max(tensors, fields) > _MOST_ENTRIES:
            raise ValueError(f"it counts {tensors} tensors and {fields} fields")
        for _ in range(fields):
            self._skip_string()
            self._skip_value(self._number("I"))
        for _ in range(tensors):
            self._skip_string()
            dimensions = self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            shape = [self._number("Q") for _ in range(dimensions)]
            if math.prod(shape) > 8 * self._size:  # no type takes less than a bit an element
                raise ValueError(f"a tensor has the shape {shape}, more than the file holds")
            self._skip(4 + 8)

    def _number(self, kind: str) -> int:
        (found,) = struct.unpack_from(f"<{kind}", self._content, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return int(found)

    def _skip(self, nbytes: int) -> None:
        if nbytes > self._size - self._at:
            raise ValueError(f"its header names {nbytes} bytes, more than the file holds")
        self._at += nbytes

    def _skip_string(self) -> None:
        self._skip(self._number("Q"))

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind != _ARRAY:
            self._skip(self._size_of(kind))
        else:
            inner, count = self._number("I"), self._number("Q")
            self._elements += count
            if self._elements > _MOST_ELEMENTS:
                raise ValueError(f"its arrays have {self._elements} elements")
            if inner == _STRING:
                for _ in range(count):
                    self._skip_string()
            else:
                self._skip(count * self._size_of(inner))

    def _size_of(self, kind: int) -> int:
        if kind not in _SIZES:
            raise ValueError(f"a field is of type {kind}")
        return _SIZES[kind]
