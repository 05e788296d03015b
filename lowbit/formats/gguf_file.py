"""A GGUF file: one file with weights, settings and tokenizer.

`lowbit.formats.gguf_llama` tells how a Llama is named there. The package `gguf` reads and writes the file. Written are
Llama-like models with a byte-level BPE tokenizer; read are those whose rotary embeddings are plain.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import gguf_blocks
from lowbit.formats.base import FormatError, damage_of
from lowbit.formats.folder import holder_of
from lowbit.formats.gguf_llama import (
    config_of,
    given,
    halved,
    heads_of,
    in_gguf,
    in_transformers,
    interleaved,
    settings_of,
)
from lowbit.formats.sources import Item, Source
from lowbit.tensor.base import LowbitTensor

_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {kind: dtype for dtype, kind in _PLAIN.items()}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens."""
_SPLITS = {"(?i:'s|'t|'re|'ve|'m|'ll|'d)": "llama-bpe", "|\\p{N}|": "qwen2"}
"""A part of the pre-tokenizer's pattern, and what llama.cpp calls it."""


FIRST = (0, 16)
"""The first release of the package whose reader gives the contents of fields."""


def package() -> Any:
    """The package. Raises FormatError where it is not installed, or older than `FIRST`."""
    needed = f"gguf files need gguf >= {'.'.join(map(str, FIRST))}"
    try:
        import gguf
    except ImportError as error:
        raise FormatError(
            f"{needed}, which is not installed: pip install 'lowbit[gguf]'"
        ) from error
    try:
        version = importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError:  # a source tree of llama.cpp
        return gguf
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < FIRST:
        raise FormatError(
            f"{needed}, and {version} is installed: pip install --upgrade 'lowbit[gguf]'"
        )
    return gguf


# ---- writing ---------------------------------------------------------------------------------------------------------


class GgufWriter:
    """A file that is written. It has the methods of `lowbit.formats.shards.Shards`."""

    def __init__(self, path: Path, source: Source) -> None:
        self._gguf, self._path, self._config = package(), path, source.config
        whole, floats = settings_of(source.config)
        # Tensors wait in a temporary file, as the header with all their names comes first.
        self._writer = self._gguf.GGUFWriter(path, "llama", use_temp_file=True)
        for key, number in whole.items():
            self._writer.add_uint32(key, number)
        for key, value in floats.items():
            self._writer.add_float32(key, value)
        self._writer.add_quantization_version(self._gguf.GGML_QUANT_VERSION)
        with tempfile.TemporaryDirectory() as folder:
            source.copy_files(Path(folder))
            _add_tokenizer(self._writer, Path(folder), source.config, self._gguf)
        self.nbytes = 0
        self._sums: dict[str, int] = {}

    def add(self, tensors: Mapping[str, Tensor], name: str, weight: LowbitTensor | None) -> None:
        ((stored, t),) = tensors.items()
        t = t.detach().cpu()
        if weight is None:
            t = t.float() if t.ndim < 2 else t  # llama.cpp takes norms in float32 only
            if t.dtype not in _PLAIN:
                raise FormatError(f"gguf holds no {t.dtype}, which {name} has")
            kind, t = _PLAIN[t.dtype], t.contiguous().view(torch.uint8)
        else:
            kind = stored.removeprefix(f"{name}.")
        own, data = in_gguf(name), interleaved(t, heads_of(name, self._config)).numpy()
        self._writer.add_tensor(own, data, raw_dtype=self._gguf.GGMLQuantizationType[kind])
        self._sums[own] = zlib.crc32(data.data)
        self.nbytes += data.nbytes

    def finish(self) -> None:
        """Write the file, read it back and compare. Raises FormatError for other bytes than were given."""
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


def _add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any], gguf: Any) -> None:
    """The tokenizer of tokenizer.json, byte-level BPE. Rows of the embedding without a token get an unused one."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    model = found.get("model") or {}
    if model.get("type") != "BPE" or not model.get("merges") or model.get("byte_fallback"):
        raise FormatError(
            "llama.cpp needs a tokenizer, and lowbit writes byte-level BPE ones: give a tokenizer.json with merges "
            "beside the model, or tokenizer="
        )
    size = int(given(config, "vocab_size"))
    tokens = {i: (text, NORMAL) for text, i in model["vocab"].items()}
    for entry in found.get("added_tokens", ()):
        kind = CONTROL if entry.get("special") else USER_DEFINED
        tokens[entry["id"]] = (entry["content"], kind)
    if max(tokens) >= size:
        raise FormatError(
            f"its tokenizer has the token {max(tokens)}, and its vocabulary is {size}"
        )
    listed = [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    pattern = json.dumps(found.get("pre_tokenizer"), ensure_ascii=False)
    kinds = (name for part, name in _SPLITS.items() if json.dumps(part)[1:-1] in pattern)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(next(kinds, "gpt-2"))
    writer.add_token_list([text for text, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


# ---- reading ---------------------------------------------------------------------------------------------------------


class GgufFile:
    """A GGUF file of a Llama, with what `lowbit.formats.folder.Folder` offers to readers.

    Raises FormatError: no such file, a damaged one, another architecture, types that lowbit does not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"there is no file {self.path}; give a GGUF file")
        try:
            self._read = package().GGUFReader(self.path)
            fields = {n: f.contents() for n, f in self._read.fields.items() if len(f.parts) < 64}
        except FormatError:
            raise
        except Exception as error:  # the package raises what numpy, struct or the file system raise
            raise FormatError(
                f"{self.path} cannot be read: it is damaged or no GGUF file ({error})"
            ) from error
        if getattr(self._read, "byte_order", "I") != "I":
            raise FormatError(
                f"{self.path} has the byte order of another machine, and lowbit does not swap the bytes of its blocks"
            )
        stored = {t.name: t for t in self._read.tensors}
        if "token_embd.weight" not in stored:
            raise FormatError(f"{self.path} has no token_embd.weight, so it is no language model")
        rows = int(stored["token_embd.weight"].shape[1])
        with damage_of(f"{self.path}"):
            self.config = config_of(fields, "output.weight" not in stored, rows)
            self._tensors = {in_transformers(name): t for name, t in stored.items()}
        self.dtype = (
            torch.bfloat16
            if "BF16" in {t.tensor_type.name for t in stored.values()}
            else torch.float16
        )
        self.config["dtype"] = str(self.dtype).removeprefix("torch.")
        self.nbytes = sum(int(t.n_bytes) for t in stored.values())

    def names(self) -> list[str]:
        """Names of all tensors, as transformers has them."""
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
        """See `lowbit.formats.sources.Source`."""
        for name in self._tensors:
            with damage_of(f"{self.path}: {name}"):
                value = self.read(name)
            yield Item(name, value, holder_of(name, value))

    def linears(self) -> set[str]:
        """Empty: names and shapes of tensors say what is a linear."""
        return set()

    def copy_files(self, folder: Path) -> None:
        """The tokenizer, which transformers takes out of the file. Warns where it does not."""
        own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            from transformers import AutoTokenizer

            found = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, **own)
            found.init_kwargs.pop("local_files_only", None)  # it would be written
            found.save_pretrained(folder)
        except Exception as error:  # transformers raises many classes
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(
                f"{self.path}: its tokenizer is not written ({reason}): copy that of the original model",
                stacklevel=2,
            )
