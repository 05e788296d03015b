"""Files of tensors, *.safetensors: written with each byte hashed on its way, and read as views of the mapped file.

    header length, uint64 | header, JSON, padded to 8 bytes | the tensors' bytes, without holes

    {"__metadata__": {text: text}, "name": {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}, …}

The file holds the digests beside the tensors. A copy of each piece of a tensor is hashed and written, so a digest is
that of the bytes in the file even if another thread changes the tensor meanwhile. Memory: a piece of
`lowbit.files.digests.PIECE` bytes a thread.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import digests

Describe = Callable[[digests.Entries], dict[str, str]]
"""The texts that the file holds beside the tensors, made from the entries of the tensors with their digests."""

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2},
    **{"BOOL": torch.bool, "C64": torch.complex64},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_HEADER = 10**8
"""Bytes of a header, as the package safetensors limits them."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(path: Path, tensors: Mapping[str, Tensor], describe: Describe) -> None:
    """Write a new file.

    Args:
        path: of the file, which does not exist.
        tensors: contiguous tensors by name, on any device.
        describe: gives the file's own metadata, once before and once after the tensors are written: all digests have
            one length, so the header keeps its size.

    Raises:
        ValueError: a name or a dtype that such a file does not hold.
        OSError: the system refuses to write.
    """
    for name, t in tensors.items():
        if name == "__metadata__" or not _is_utf8(name):
            raise ValueError(f"{name!r} cannot be the name of a tensor in a file; rename it")
        if t.dtype not in _NAMES:
            raise ValueError(f"{name} is {t.dtype}, which no *.safetensors file holds; convert it")
    # Wide elements first, so that each tensor begins at a multiple of its element.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    places: dict[str, int] = {}
    end = 0
    for name in order:
        places[name], end = end, end + tensors[name].nbytes

    def header(entries: digests.Entries) -> bytes:
        listed: dict[str, Any] = {"__metadata__": describe(entries)}
        for name in order:
            t, begin = tensors[name], places[name]
            shape = [*t.shape]
            if t.dtype is torch.float4_e2m1fn_x2:
                shape[-1] *= 2
            own = {"dtype": _NAMES[t.dtype], "shape": shape}
            listed[name] = {**own, "data_offsets": [begin, begin + t.nbytes]}
        text = json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    first = header(digests.entries(tensors, {}))
    lock = threading.Lock()
    with path.open("xb") as file:
        file.write(first)

        def write_one(name: str, t: Tensor) -> str:
            at = len(first) + places[name]

            def put(piece: memoryview) -> None:
                nonlocal at
                with lock:
                    file.seek(at)
                    file.write(piece)
                at += len(piece)

            return digests.while_written(t, put)

        last = header(digests.entries(tensors, digests.each(write_one, tensors, "writing")))
        assert len(last) == len(first)
        file.seek(0)
        file.write(last)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """The header's entry of a tensor. `begin`, `end`: of its bytes, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class ReplacedFileError(ValueError):
    """The file is not the one whose header was read."""


class TensorFile:
    """The header of a file of safetensors, and the tensors as views of the mapped file. A file that changes between the
    two is refused.

    Attributes:
        metadata: the texts beside the tensors.
        entries: those of all tensors, by name.

    Raises ValueError, or another error of the code that reads it, for a file that is truncated, damaged or not of
    safetensors, and OSError if the system refuses to read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: Any = None
        with path.open("rb") as file:
            self._identity = _identity(os.fstat(file.fileno()))
            self._size = self._identity[2]
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(self._size - 8, _MOST_HEADER):
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(file.read(length))
        self._begin = 8 + length
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        if not all(isinstance(text, str) for text in self.metadata.values()):
            raise ValueError("its metadata are not texts")
        self.entries = {name: _entry(name, given) for name, given in header.items()}
        end = 0
        for entry in sorted(self.entries.values(), key=lambda e: (e.begin, e.end)):
            if entry.begin != end:
                raise ValueError("its tensors overlap, or leave a hole")
            end = entry.end
        if end != self._size - self._begin:
            raise ValueError(f"its tensors end at byte {self._begin + end} of {self._size}")

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name, on the CPU, a view of the file: its values are read when they are used.

        Raises ReplacedFileError if it is another file than that of the header."""
        entry = self.entries[name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        mapped = self._mapped  # another thread may unmap it
        if mapped is None:
            mapped = self._mapped = self._map()
        first = self._begin + entry.begin
        own = mapped[first : first + entry.nbytes]  # a storage of its own, as torch.save writes it
        piece = torch.empty(0, dtype=torch.uint8).set_(own)
        if first % entry.dtype.itemsize:  # as other programs may write it
            piece = piece.clone()
        return piece.view(entry.dtype).view(entry.shape)

    def _map(self) -> Any:
        try:
            return torch.UntypedStorage.from_file(str(self.path), False, self._size)
        finally:
            if not self.path.exists() or _identity(self.path.stat()) != self._identity:
                raise ReplacedFileError(
                    f"{self.path} was replaced or changed after its header was read; read it again, once "
                    "nothing writes to it"
                )

    def unmap(self) -> None:
        """Map the file anew at the next tensor: the pages of a mapping leave memory when no tensor holds it."""
        self._mapped = None


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _entry(name: str, given: Any) -> StoredTensor:
    dtype, shape, (begin, end) = _DTYPES[given["dtype"]], given["shape"], given["data_offsets"]
    sizes = [*shape, begin, end]
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{name} has the shape {shape} and the place {begin} to {end}")
    if dtype is torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{name} has the shape {shape}, in which half a byte is left")
        shape = [*shape[:-1], shape[-1] // 2]
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{name} has the shape {shape} and {end - begin} bytes")
    return StoredTensor(dtype, tuple(shape), begin, end)
