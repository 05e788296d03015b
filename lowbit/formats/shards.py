"""Writing a folder: shards of a largest size, each read back and compared, under a temporary name until all is done."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import digests, new_path, tensor_file
from lowbit.formats.base import Format, FormatError
from lowbit.formats.folder import WEIGHT_SUFFIXES, names_of_shards
from lowbit.tensor.core.base import LowbitTensor

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(size: int | str, option: str = "max_shard_size") -> int:
    """Bytes of 5_000_000, 5e6 or "5MB". Raises FormatError for anything else, with the name of the `option`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)?\s*", str(size).upper())
    is_size = isinstance(size, str) or (isinstance(size, Real) and float(size).is_integer())
    value = int(float(found[1]) * _UNITS[found[2] or ""]) if found and is_size else 0
    if value < 1:
        raise FormatError(f"{option} is {size!r}; accepted: bytes, or a text such as '2GB'")
    return value


@contextmanager
def new_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder that takes the place of `out` at the end; after an error nothing of the folder is left.

    Raises FormatError if `out` exists and may not be replaced, or cannot be written.
    """
    check_free(out, overwrite)
    try:
        with new_path.workplace(out) as place:
            folder = place / out.name
            folder.mkdir()
            yield folder
            check_free(out, overwrite)  # again: another program may have written `out` meanwhile
            new_path.put_folder(folder, out)
    except OSError as error:
        raise FormatError(f"{out} cannot be written: {error.strerror or error}") from error


def check_free(out: Path, overwrite: bool) -> None:
    """Remove what killed processes left beside `out`. Raises FormatError if `new_folder` would, except for a folder
    that cannot be written."""
    if not out.parent.is_dir():
        raise FormatError(f"{out.parent} is not a folder; make it first")
    new_path.clear(out)
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FormatError(f"{out} is not a folder; give the name of a new one")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise FormatError(f"{out} exists already; give another name, or overwrite=True")
    if not (out / "config.json").is_file():
        raise FormatError(
            f"{out} is not a checkpoint, which overwrite=True could replace: no config.json"
        )
    if kept := _kept_folder(out):
        raise FormatError(
            f"{out} holds {kept.relative_to(out)}, which overwrite=True would delete too; give another name"
        )


def _kept_folder(out: Path) -> Path | None:
    """A path that an export never writes into its folder: a checkpoint inside, or the history of a repository."""
    for inner in sorted(path for path in out.iterdir() if path.is_dir()):
        if inner.name == ".git":
            return inner
        if found := next((p for p in inner.rglob("*") if p.suffix in WEIGHT_SUFFIXES), None):
            return found
    return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Shards:
    """The shards of a folder, each written when the next tensors would make it larger than `largest` bytes.

    The tensors of a shard are in memory until it is written. `config`: that of the model, which says how its loader
    names the shards.
    """

    def __init__(
        self, folder: Path, largest: int, format: Format, config: Mapping[str, Any]
    ) -> None:
        self._folder, self._largest, self._format = folder, largest, format
        self._single, self._index = names_of_shards(config)
        self._stem = self._single.removesuffix(".safetensors")
        self._tensors: dict[str, Tensor] = {}
        self._weights: dict[str, LowbitTensor] = {}
        self._plain: list[str] = []
        self._waiting = 0
        self._files: list[Path] = []
        self._names: dict[str, int] = {}
        """The number of the shard of each tensor."""
        self.nbytes = 0

    def add(self, tensors: Mapping[str, Tensor], name: str, weight: LowbitTensor | None) -> None:
        """Add the tensors that stand for `name`, which stay in one shard. `weight`: the low-bit tensor, on meta."""
        size = sum(t.nbytes for t in tensors.values())
        if self._tensors and self._waiting + size > self._largest:
            self._write()
        for stored, t in tensors.items():
            if stored in self._names or stored in self._tensors:
                raise FormatError(f"two tensors would be stored as {stored}; rename one")
            own = t.detach().cpu().contiguous()
            storage = own.untyped_storage()
            # A view of a mapped file keeps the whole file in memory. Its storage cannot be resized.
            is_view = storage.nbytes() != own.nbytes or not storage.resizable()
            self._tensors[stored] = own.clone() if is_view else own
        if weight is None:
            self._plain.append(name)
        else:
            self._weights[name] = weight
        self._waiting += size
        self.nbytes += size

    def _write(self) -> None:
        path = self._folder / f"{self._stem}-{len(self._files) + 1:05d}.safetensors"
        beside = self._format.metadata(self._weights, self._plain)

        def describe(entries: digests.Entries) -> dict[str, str]:
            return {**beside, **digests.texts(entries)}

        try:
            tensor_file.write(path, self._tensors, describe)
        except ValueError as error:
            raise FormatError(str(error)) from error
        self._names.update(dict.fromkeys(self._tensors, len(self._files)))
        self._files.append(path)
        self._tensors, self._waiting = {}, 0

    def finish(self) -> None:
        """Write the last shard, give all shards their names, and write the index if there are several."""
        if self._tensors:
            self._write()
        count = len(self._files)
        if count == 1:
            os.rename(self._files[0], self._folder / self._single)
            return
        final = [f"{self._stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for path, name in zip(self._files, final, strict=True):
            os.rename(path, self._folder / name)
        write_json(
            self._folder / self._index,
            {
                "metadata": {"total_size": self.nbytes},
                "weight_map": {name: final[i] for name, i in sorted(self._names.items())},
            },
        )


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """True if both have one shape, dtype and the same bytes. NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*as_bytes)


def same_values(a: LowbitTensor, b: LowbitTensor) -> bool:
    """True if both have the same parts of one meaning, or the same bits of values."""
    own, other = a.inner_tensors(), b.inner_tensors()
    alike = type(a) is type(b) and (a._is_stored_like(b) or a._takes_meta_of(b))
    alike = alike and own.keys() == other.keys()
    if alike and all(equal_bits(t, other[name]) for name, t in own.items()):
        return True
    return equal_bits(a.dequantize(), b.dequantize())
