"""Writing tensors to a file, *.safetensors or *.pt, each byte hashed as it is written.

The file holds the digests beside the tensors. A copy of each piece of a tensor is hashed and written, so a digest is
that of the bytes in the file even if another thread changes the tensor meanwhile. Memory: a piece of
`lowbit.files.digests.PIECE` bytes a thread.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import struct
import threading
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import digests

Describe = Callable[[digests.Entries], dict[str, str]]
"""The texts that the file holds beside the tensors, made from the entries of the tensors with their digests."""

_ALIGNED = 64
"""Bytes at whose multiples tensors of a *.pt begin, as `torch.save` places them."""


def writer_of(path: Path) -> Callable[[Path, Mapping[str, Tensor], Describe], digests.Entries]:
    """The function that writes a file of this suffix."""
    return write_safetensors if path.suffix == ".safetensors" else write_pt


# ---- safetensors -----------------------------------------------------------------------------------------------------


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], describe: Describe
) -> digests.Entries:
    """Write a new file of safetensors, and return the entries of its tensors.

    Args:
        tensors: contiguous tensors by name, on any device.
        describe: gives the file's own metadata, once before and once after the tensors are written: all digests have
            one length, so the header keeps its size.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: a name or a dtype that such a file does not hold.
        OSError: the system refuses to write.
    """
    for name in tensors:
        if name == "__metadata__" or not _is_utf8(name):
            raise ValueError(
                f"{name!r} cannot be the name of a tensor in a *.safetensors file; rename it, or save as *.pt"
            )
    # Wide elements first, so that each tensor begins at a multiple of its element.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    places: dict[str, int] = {}
    end = 0
    for name in order:
        places[name], end = end, end + tensors[name].nbytes
    kinds = {t.dtype: _dtype_name(t.dtype) for t in tensors.values()}

    def header(entries: digests.Entries) -> bytes:
        listed: dict[str, Any] = {"__metadata__": describe(entries)}
        for name in order:
            t, begin = tensors[name], places[name]
            shape = [*t.shape[:-1], 2 * t.shape[-1]] if kinds[t.dtype] == "F4" else [*t.shape]
            own = {"dtype": kinds[t.dtype], "shape": shape}
            listed[name] = {**own, "data_offsets": [begin, begin + t.nbytes]}
        text = json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    first = header(digests.entries(tensors, {}))
    lock = threading.Lock()
    with path.open("xb") as file:
        file.write(first)

        def write(name: str, t: Tensor) -> str:
            at = len(first) + places[name]

            def put(piece: memoryview) -> None:
                nonlocal at
                with lock:
                    file.seek(at)
                    file.write(piece)
                at += len(piece)

            return digests.while_written(t, put)

        found = digests.entries(tensors, digests.each(write, tensors, "writing"))
        last = header(found)
        assert len(last) == len(first)
        file.seek(0)
        file.write(last)
    return found


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _dtype_name(dtype: torch.dtype) -> str:
    """The name of `dtype` in the package safetensors."""
    import safetensors.torch

    try:
        content = safetensors.torch.save({"t": torch.empty(0, dtype=dtype)})
    except KeyError as error:
        raise ValueError(
            f"no *.safetensors file holds {dtype}; convert it, or save as *.pt"
        ) from error
    return str(json.loads(content[8:])["t"]["dtype"])


# ---- torch -----------------------------------------------------------------------------------------------------------


def write_pt(path: Path, tensors: Mapping[str, Tensor], describe: Describe) -> digests.Entries:
    """Write a new file that `torch.load` reads: a dict of the texts of `describe`, and "tensors".

    Arguments, errors and result are those of `write_safetensors`. `torch.save` would write the texts before the
    tensors, whose digests they hold; this function writes them last. Tensors are stored as tensors of the CPU.
    """
    keys: dict[int, str] = {}

    def store(name: str, t: Tensor) -> str:
        storage = t.untyped_storage()
        key = keys[storage._cdata] = str(len(keys))
        with archive.open(_record(archive, f"data/{key}", t.nbytes), "w") as record:
            return digests.while_written(t, record.write)

    with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_record(archive, "version", 2), b"3\n")
        archive.writestr(_record(archive, "byteorder", 6), b"little")
        found = digests.entries(tensors, digests.each(store, tensors, "writing", most=1))
        content = BytesIO()
        _Pickler(content, keys).dump({**describe(found), "tensors": dict(tensors)})
        text = content.getbuffer()
        archive.writestr(_record(archive, "data.pkl", len(text)), text)
    return found


class _Pickler(pickle.Pickler):
    """Names the record of each storage, as `torch.save` does. `keys`: the records, by the storage."""

    def __init__(self, file: BytesIO, keys: Mapping[int, str]) -> None:
        super().__init__(file, protocol=2)
        self._keys = keys

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            storage, size = value._untyped_storage, value._size()
            kind = getattr(torch, value._pickle_storage_type())
        elif isinstance(value, torch.UntypedStorage):
            storage, size, kind = value, value.nbytes(), torch.UntypedStorage
        else:
            return None
        return "storage", kind, self._keys[storage._cdata], "cpu", size


def _record(archive: zipfile.ZipFile, name: str, size: int) -> zipfile.ZipInfo:
    """A record that is not compressed. An extra field that readers skip moves its content to a multiple of 64 bytes."""
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = size
    assert archive.fp is not None
    sizes_of_zip64 = 20 if 1.05 * size > zipfile.ZIP64_LIMIT else 0  # zipfile's own condition
    begin = archive.fp.tell() + 30 + len(info.filename) + sizes_of_zip64 + 4
    padding = -begin % _ALIGNED
    info.extra = struct.pack("<2sH", b"FB", padding) + b"\0" * padding
    return info


# ---- what a *.pt may hold --------------------------------------------------------------------------------------------

_CODES = {
    *("PROTO", "EMPTY_DICT", "MARK", "SETITEM", "SETITEMS", "STOP", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "NEWFALSE", "NEWTRUE", "GLOBAL", "BINPERSID", "REDUCE"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}  # fmt: skip
_CALLED = {
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"),
    *("collections OrderedDict", "torch.storage UntypedStorage"),
}
_MOST_CODES = 100
"""The most codes of the pickle for each tensor. About 40 are usual."""


def is_pt_of_tensors(path: Path) -> bool:
    """True if a file of torch holds only what `write_pt` writes, so that `torch.load` takes no more than its size.

    `torch.load` inflates compressed records before it looks at them, and makes any number of empty sets of a byte each.

    Raises ValueError or zipfile.BadZipFile for an archive that is damaged, compressed or not as large as it says.
    """
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        is_plain = all(r.compress_type == zipfile.ZIP_STORED for r in records)
        if not is_plain or sum(r.file_size for r in records) > path.stat().st_size:
            raise ValueError("its records are compressed, or larger than the file")
        found = [r for r in records if r.filename.endswith("/data.pkl")]
        if len(found) != 1:
            raise ValueError("it has no data.pkl, or several")
        file.seek(found[0].header_offset + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        return _is_of_tensors(file.read(found[0].file_size), _MOST_CODES * len(records))


def _is_of_tensors(pickled: bytes, most: int) -> bool:
    for i, (code, argument, _) in enumerate(pickletools.genops(pickled)):
        if i > most or code.name not in _CODES:
            return False
        if code.name == "GLOBAL" and argument not in _CALLED:
            module, _, name = str(argument).partition(" ")
            is_dtype = isinstance(getattr(torch, name, None), torch.dtype)
            if module != "torch" or not (is_dtype or name.endswith("Storage")):
                return False
    return True
