"""A GGUF file: one file with weights, settings and tokenizer.

`lowbit.formats.gguf.llama` lists the models and the names of their tensors, `lowbit.formats.gguf.tokenizer` how the
file stores the tokenizer. The package `gguf` reads and writes the file.
"""

from __future__ import annotations

import os
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit import optional
from lowbit.formats.base import FormatError, damage_of
from lowbit.formats.folder import holder_of
from lowbit.formats.gguf import blocks as gguf_blocks
from lowbit.formats.gguf import header as gguf_header
from lowbit.formats.gguf import rope as gguf_rope
from lowbit.formats.gguf.llama import (
    architecture_of,
    check_layers,
    config_of,
    halved,
    head_size,
    heads_of,
    in_gguf,
    in_transformers,
    interleaved,
    settings_of,
)
from lowbit.formats.gguf.tokenizer import add_tokenizer
from lowbit.formats.sources import Item, Source
from lowbit.tensor.core.base import LowbitTensor

_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {kind: dtype for dtype, kind in _PLAIN.items()}


def package() -> Any:
    """The package. Raises FormatError if it is not installed, or older than the extra `gguf` allows."""
    found = optional.imported("gguf", "gguf files need", "gguf", FormatError)
    if optional.version("gguf") is not None:  # a source tree of llama.cpp has no version
        optional.check("gguf files need", ["gguf"], "gguf", FormatError)
    return found


# ---- writing ---------------------------------------------------------------------------------------------------------


class GgufWriter:
    """Writes a GGUF file, by the methods of `lowbit.formats.shards.Shards`."""

    def __init__(self, path: Path, source: Source) -> None:
        self._gguf, self._path, self._config = package(), path, source.config
        whole, floats, texts = settings_of(source.config)
        # Tensors wait in a temporary file: the header with all their names comes first.
        kind = architecture_of(source.config)
        self._writer = self._gguf.GGUFWriter(path, kind, use_temp_file=True)
        for key, number in whole.items():
            self._writer.add_uint32(key, number)
        for key, value in floats.items():
            self._writer.add_float32(key, value)
        for key, text in texts.items():
            self._writer.add_string(key, text)
        self._writer.add_quantization_version(self._gguf.GGML_QUANT_VERSION)
        with tempfile.TemporaryDirectory() as folder:
            source.copy_files(Path(folder))
            add_tokenizer(self._writer, Path(folder), source.config, self._gguf)
        self.nbytes = 0
        self._sums: dict[str, int] = {}
        factors = gguf_rope.factors_of(source.config, head_size(source.config))
        if factors is not None:
            self._add(gguf_rope.TENSOR, factors.view(torch.uint8), "F32")

    def add(self, tensors: Mapping[str, Tensor], name: str, weight: LowbitTensor | None) -> None:
        ((stored, t),) = tensors.items()
        # A copy, which no other thread trains between its checksum and its writing.
        t = interleaved(t.detach().cpu(), heads_of(name, self._config)).clone()
        if weight is None:
            t = t.float() if t.ndim < 2 else t  # llama.cpp takes norms in float32 only
            if t.dtype not in _PLAIN:
                raise FormatError(f"gguf holds no {t.dtype}, which {name} has")
            kind, t = _PLAIN[t.dtype], t.contiguous().view(torch.uint8)
        else:
            kind = stored.removeprefix(f"{name}.")
        self._add(in_gguf(name), t, kind)

    def _add(self, own: str, rows: Tensor, kind: str) -> None:
        data = rows.numpy()
        self._writer.add_tensor(own, data, raw_dtype=self._gguf.GGMLQuantizationType[kind])
        self._sums[own] = zlib.crc32(data.data)
        self.nbytes += data.nbytes

    def finish(self) -> None:
        """Write the file, read it back and compare. Raises FormatError if bytes differ."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        read = self._gguf.GGUFReader(self._path)
        sums = {t.name: zlib.crc32(t.data.data) for t in read.tensors}
        if sums != self._sums:
            bad = [name for name, own in self._sums.items() if sums.get(name) != own]
            raise FormatError(
                f"{', '.join(bad[:3])} were read back with other values: check the disk and memory"
            )


# ---- reading ---------------------------------------------------------------------------------------------------------


class GgufFile:
    """A GGUF file of a Llama, with what `lowbit.formats.folder.Folder` offers to readers.

    Raises FormatError: no such file, a damaged file, another architecture, or types that lowbit does not read.
    """

    left_out = ()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"there is no file {self.path}; give a GGUF file")
        gguf = package()
        gguf_header.check(self.path)
        try:
            self._read = gguf.GGUFReader(self.path)
            fields = {n: f.contents() for n, f in self._read.fields.items() if len(f.parts) < 64}
        except FormatError:
            raise
        except Exception as error:  # the package raises what numpy, struct or the file system raise
            raise FormatError(
                f"{self.path} cannot be read: it is damaged or not a GGUF file ({error})"
            ) from error
        stored = {t.name: t for t in self._read.tensors}
        if "token_embd.weight" not in stored:
            raise FormatError(
                f"{self.path} has no token_embd.weight, so it is not a language model"
            )
        rows = int(stored["token_embd.weight"].shape[1])
        factors = stored.pop(gguf_rope.TENSOR, None)
        with damage_of(f"{self.path}"):
            given = None if factors is None else torch.from_numpy(factors.data.copy()).flatten()
            self.config = config_of(fields, stored.keys(), rows, given)
            check_layers(self.config, stored.keys())
            self._tensors = {in_transformers(name): t for name, t in stored.items()}
        self.dtype = (
            torch.bfloat16
            if "BF16" in {t.tensor_type.name for t in stored.values()}
            else torch.float16
        )
        self.config["dtype"] = str(self.dtype).removeprefix("torch.")
        self.nbytes = sum(int(t.n_bytes) for t in stored.values())

    def names(self) -> list[str]:
        """Names of all tensors, as in transformers."""
        return [*self._tensors]

    def read(self, name: str) -> Tensor:
        """The tensor of this name, low-bit or plain."""
        t = self._tensors[name]
        kind, data = t.tensor_type.name, torch.from_numpy(t.data.copy())
        data = halved(data, heads_of(name, self.config))
        if kind not in _DTYPES:
            return gguf_blocks.decode(kind, data, self.dtype)
        plain = data.view(_DTYPES[kind]) if data.dtype is torch.uint8 else data
        return plain.to(self.dtype)

    def items(self) -> Iterator[Item]:
        for name in self._tensors:
            with damage_of(f"{self.path}: {name}"):
                value = self.read(name)
            yield Item(name, value, holder_of(name, value))

    def linears(self) -> set[str]:
        return set()

    def copy_files(self, folder: Path) -> None:
        """Write the tokenizer, which transformers takes out of the file. Warns if it does not."""
        own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            transformers = optional.imported("transformers", "that needs", "hf")
            found = transformers.AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, **own
            )
            found.init_kwargs.pop("local_files_only", None)  # else the new file gets this option
            found.save_pretrained(folder)
        except Exception as error:  # transformers raises many classes
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(
                f"{self.path}: its tokenizer is not written ({reason}): copy that of the original model",
                stacklevel=2,
            )
