"""A folder with config.json and *.safetensors shards, as Hugging Face lays it out, read a tensor at a time.

Only headers are read before a tensor is asked for, except a tied weight that is stored twice (`lowbit.formats.tied`). A
tensor is compared with its SHA-256 if its shard has digests, as `lowbit.export` writes them. One shard is mapped at a
time, and mapped again after every `MOST_MAPPED` bytes: the pages of a mapping leave memory when no tensor holds it.
Otherwise a whole shard would stay in memory, and two while a loop still holds the last tensor of the shard before.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert import routers_among
from lowbit.files import digests
from lowbit.files.tensor_file import ReplacedFileError, TensorFile
from lowbit.formats.auto_round import translated
from lowbit.formats.base import Format, FormatError, damage_of, layer_of, weight_of
from lowbit.formats.layer_names import (
    TRANSPOSED,
    is_cache_scale,
    is_embedding,
    is_head,
    why_left_alone,
)
from lowbit.formats.registry import FORMATS, by_config
from lowbit.formats.sources import Holder, Item
from lowbit.formats.tied import places_of, second_names
from lowbit.layers import cache_scales
from lowbit.numerics.code_range import FLOATS

STEMS = "model", "diffusion_pytorch_model"
"""How the names of shards begin in folders of transformers, and in those of diffusers."""
MOST_MAPPED = 2**27
"""Bytes of tensors that one mapping of a file gives."""
MOST_AHEAD = 2**25
"""Bytes of tensors that are compared with their digests together."""
_NUMBERED = re.compile(r"(.*-)(\d+)-of-(\d+)(\..*)")
_WAY_OUT = "copy the folder anew from where it came from"
_MOST_JSON, _MOST_LEVELS = 2**28, 100
"""Bytes and levels of a file of JSON."""
_NO_CODES = (*FLOATS, torch.int64, torch.uint64, torch.bool, torch.complex64)
"""Dtypes in which no format stores codes; models store indices and masks in some of them."""
WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt")
}
"""Ends of the names of files with weights."""
HF_QUANT_CONFIG = "hf_quant_config.json"
_SETTINGS_OF_WEIGHTS = {
    *("config.json", "quantize_config.json", "quant_config.json", HF_QUANT_CONFIG)
}
"""Files that describe the weights beside them, also those of AutoGPTQ, AutoAWQ and ModelOpt. Copied beside new weights
they would be wrong."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FormatError if the file cannot be read, or is too large or too deep for
    settings or names."""
    try:
        if (size := path.stat().st_size) > _MOST_JSON:
            raise FormatError(f"{path} has {size} bytes of JSON; accepted: {_MOST_JSON}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FormatError:
        raise
    except RecursionError as error:
        raise FormatError(f"{path} is nested too deep; accepted: {_MOST_LEVELS} levels") from error
    except (OSError, ValueError, MemoryError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path} holds a {type(found).__name__}; accepted: a JSON object")
    level: list[Any] = [found]
    for _ in range(_MOST_LEVELS):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    if level:
        raise FormatError(f"{path} is nested too deep; accepted: {_MOST_LEVELS} levels")
    return found


def is_of_diffusers(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a model of diffusers."""
    return "_class_name" in config


def names_of_shards(config: Mapping[str, Any]) -> tuple[str, str]:
    """The names of a shard that is alone and of the index of several, for a model with this config.json."""
    single = f"{STEMS[is_of_diffusers(config)]}.safetensors"
    return single, f"{single}.index.json"


def of_the_hub(path: Path) -> str:
    """How to get what may be a name of the Hub, "owner/model", to end an error about a path that does not exist."""
    is_file = path.suffix in (".json", ".gguf") or path.parts[:1] == ("..",)
    if is_file or path.exists() or path.is_absolute() or len(path.parts) != 2:
        return ""
    return (
        f"; lowbit downloads nothing: `hf download {path} --local-dir {path.name}` makes a folder"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or that no file can have
        return False


def _check_numbers(path: Path, files: Collection[str]) -> None:
    """Raise FormatError unless all shards are among `files`, whose names count them: "model-00001-of-00002"."""
    held = {*files}
    for name in files:
        if found := _NUMBERED.fullmatch(name):
            before, number, count, after = found.groups()
            names = (
                f"{before}{i:0{len(number)}}-of-{count}{after}" for i in range(1, int(count) + 1)
            )
            if lost := next((one for one in names if one not in held), None):
                raise FormatError(f"{path} lacks the shard {lost:.100}: copy it from its source")


def open_shard(path: str | os.PathLike[str]) -> TensorFile:
    """The file of safetensors, of which only the header is read. Raises FormatError if it cannot be read."""
    try:
        return TensorFile(Path(path))
    except (OSError, MemoryError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # JSON of any kind may stand in a damaged header
        raise FormatError(
            f"{path} cannot be read: it is truncated, damaged or not a safetensors file ({error})"
        ) from error


def holder_of(name: str, t: Tensor) -> Holder:
    """The kind of module that holds this tensor, by its name and shape."""
    layer, _, last = name.rpartition(".")
    if last != "weight" or t.ndim != 2:
        return "other"
    return "embedding" if is_embedding(layer) else "linear"


class Folder:
    """A checkpoint in a folder.

    Attributes:
        config: config.json without "quantization_config".
        settings: the "quantization_config"; None if all weights are plain.
        format: the format of the low-bit weights, or None.
        weights: the low-bit weights: for each weight the stored name of each part.
        plain: names of the plain tensors.
        cache_scales: names of the scales of a KV cache that lowbit keeps, which are in `plain` too.
        unread_scales: names of others, which it leaves out, since it keeps keys and values plain.
        tied: second names of tied weights that are stored twice, and the first name of each, which alone is in
            `weights` or `plain`.
        seconds: for each of these second names the stored name of each part, as `stored_names` gives them.
        unused: names of tensors that `leave_out` took away.
        dtype: the dtype that config.json names for the weights, or None.
        nbytes: bytes of all shards.

    Raises FormatError for a path that is not a folder of a model, a missing or damaged shard, a format that lowbit does
    not read, or one that config.json does not name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FormatError(
                f"{self.path} is not a folder; give that of a checkpoint, with config.json"
                f"{of_the_hub(self.path)}"
            )
        self.config = self._json("config.json")
        with damage_of(f"{self.path}"):
            own = _take_settings(self.config)
            self.settings = own or self._of_modelopt()
        self._described_in = "config.json" if own else HF_QUANT_CONFIG
        self.dtype = _dtype_of(self.config)
        self._metadata: dict[str, str] = {}
        """The text that all shards have beside their tensors, without digests."""
        self._unverified: digests.Entries = {}
        """The entries, with digests, of the tensors that were not yet compared with their digests."""
        self._shards = self._find_shards()
        """The file of each stored tensor."""
        self.nbytes = sum(f.path.stat().st_size for f in {*self._shards.values()})
        self._mapped_file: TensorFile | None = None
        self._mapped = 0
        """Bytes of tensors that its present mapping gave."""
        self.format: Format | None = None
        self.weights: dict[str, dict[str, str]] = {}
        with damage_of(f"{self.path}"):
            if self.settings is not None:
                self.settings = translated(self.settings)
                self.format = by_config(self.settings)
                self.settings = self.format.settings(self.settings, self._metadata)
                self.weights = self.format.find(self._shards.keys(), self.settings)
        parts = {name for own in self.weights.values() for name in own.values()}
        plain = [name for name in self._shards if name not in parts]
        is_foreign = self.format is not None and self.format.name != "lowbit"
        is_described = self.settings is not None and cache_scales.describes(self.settings)
        self.cache_scales = [n for n in plain if is_described and self._is_kept_scale(n)]
        others = [name for name in plain if is_foreign and is_cache_scale(name)]
        self.unread_scales = [name for name in others if name not in {*self.cache_scales}]
        self.plain = [name for name in plain if name not in {*self.unread_scales}]
        self._check_claims(is_foreign)
        with damage_of(f"{self.path}"):
            self.tied = second_names(self.config, self.names(), self.read)
        self.seconds = {name: self.stored_names(name) for name in self.tied}
        self.unused: list[str] = []
        self._take_out(self.tied)

    def _take_out(self, names: Collection[str]) -> None:
        """Remove tensors from `weights` and `plain`."""
        self.weights = {name: own for name, own in self.weights.items() if name not in names}
        self.plain = [name for name in self.plain if name not in names]

    def _is_kept_scale(self, name: str) -> bool:
        return cache_scales.is_named_so(name) and math.prod(self.plain_shape(name)) == 1

    # ---- what lies in it -----------------------------------------------------------------------------------------

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not _is_file(path):
            parts = sorted(p.parent.name for p in self.path.glob("*/config.json"))
            why = ", so it is not a folder of a model"
            if parts and _is_file(self.path / "model_index.json"):
                why = f": it is a pipeline of diffusers; give the folder of a part: {', '.join(parts)}"
            elif _is_file(self.path / "adapter_config.json"):
                why = ": it is an adapter of PEFT; merge it into its model (merge_and_unload), and save that"
            raise FormatError(f"{self.path} has no {name}{why}")
        return read_json(path)

    def _of_modelopt(self) -> Mapping[str, Any] | None:
        """The settings of a folder whose config.json has none, as ModelOpt wrote them at first. None: the file says
        nothing of weights, such as that of a plain model whose key-value cache is in float8."""
        if not _is_file(self.path / HF_QUANT_CONFIG):
            return None
        found = self._json(HF_QUANT_CONFIG).get("quantization") or {}
        return {"quant_method": "modelopt", **found} if found.get("quant_algo") else None

    def _find_shards(self) -> dict[str, TensorFile]:
        single, index = names_of_shards(self.config)
        if (self.path / index).is_file():
            listed = self._json(index).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise FormatError(f"{self.path / index} has no weight_map")
            if (self.path / single).is_file() and single not in listed.values():
                raise FormatError(
                    f"{self.path} holds {single}, and {index} that names other shards; keep those of one model only"
                )
            files = sorted({*map(str, listed.values())})
        else:
            listed = None
            whole = (self.path / single).is_file()
            files = [single] if whole else sorted(p.name for p in self.path.glob("*.safetensors"))
            _check_numbers(self.path, files)
        if not files:
            others = sorted(p.name for p in self.path.iterdir() if p.suffix in WEIGHT_SUFFIXES)
            hint = f"; convert {others[0]} to safetensors first" if others else ""
            raise FormatError(f"{self.path} has no *.safetensors, so it holds no weights{hint}")
        found: dict[str, TensorFile] = {}
        for file in files:
            if Path(file).name != file or not _is_file(self.path / file):
                raise FormatError(
                    f"{self.path} lacks the shard {file:.100}: copy it from its source"
                )
            opened = open_shard(self.path / file)
            for name in opened.entries:
                place = file if listed is None else listed.get(name, file)
                if place != file:
                    continue  # a remnant: the index names another shard for this tensor
                if name in found:
                    raise FormatError(
                        f"{self.path}: {name} is in {found[name].path.name} and in {file}; keep the shards of one "
                        "model only"
                    )
                found[name] = opened
            self._take_metadata(opened)
        if listed is not None and (lost := sorted(listed.keys() - found.keys())):
            raise FormatError(
                f"{self.path}: no shard holds {', '.join(lost[:3])} of the index where the index says"
            )
        return found

    def _take_metadata(self, file: TensorFile) -> None:
        metadata = dict(file.metadata)
        with damage_of(f"{file.path}"):
            stored = digests.taken(metadata)
        if stored is not None:
            if differs := sorted(stored.keys() ^ file.entries.keys()):
                raise FormatError(
                    f"{file.path} is damaged: it was written with other tensors than {', '.join(differs[:3])}; "
                    f"{_WAY_OUT}"
                )
            self._unverified |= stored
        self._metadata |= metadata

    def _check_claims(self, is_foreign: bool) -> None:
        """Raise FormatError for a folder that holds other weights than its config.json says.

        A folder without low-bit weights is a plain model if its config.json says so: every layer was skipped, or only
        the cache is in low bits. `is_foreign`: the folder has the format of another program.
        """
        if self.format is not None:
            mark = self.format.suffixes(self.settings or {})[0]
            codes = [name for name in self.plain if self._is_undescribed(name)]
            if not self.weights and (lost := codes or self._promised()):
                raise FormatError(
                    f"{self.path}: {self._described_in} says {self.format.name}, and no tensor is a {mark}; it claims "
                    f"another format than it has, such as for {lost[0]}"
                )
            if is_foreign and (lost := [name for name in codes if name.endswith(".weight")]):
                raise FormatError(
                    f"{self.path}: {lost[0]} holds codes, and has no {mark} of {self.format.name} beside it"
                )
        if self.format is None:
            own = [n for n in self.plain if n.endswith(".codes")]
            if own and own[0].removesuffix("codes") + "scale" in self._shards:
                raise FormatError(
                    f"{self.path} holds parts of lowbit's tensors, such as {own[0]}, and config.json does not describe "
                    "them; write the model by lowbit.export(model, out, format='lowbit')"
                )
            self._refuse_undescribed_parts()

    def _refuse_undescribed_parts(self) -> None:
        """Raise FormatError for codes of a format that config.json does not name: they would pass for values."""
        for format in FORMATS:
            try:
                weights = format.find(self.plain, {})
            except FormatError:
                continue
            for parts in weights.values():
                codes = [name for name in parts.values() if self._is_of_codes(name)]
                if len(parts) > 1 and codes:
                    raise FormatError(
                        f"{self.path} holds parts of {format.name} weights, such as {codes[0]}, and config.json has no "
                        "quantization_config: copy config.json from where the shards come from"
                    )

    def _promised(self) -> list[str]:
        """Plain weights of linears that should not be plain by config.json."""
        assert self.format is not None and self.settings is not None
        linears = [
            layer_of(name)
            for name in self.plain
            if name.endswith(".weight") and len(self.plain_shape(name)) == 2
        ]
        routers = routers_among(map(layer_of, self.names()))
        with damage_of(f"{self.path}"):
            return [
                weight_of(layer)
                for layer in linears
                if why_left_alone(layer, None, router=layer in routers) is None
                and not self.format.skips(self.settings, layer)
            ]

    def _is_undescribed(self, name: str) -> bool:
        """True if a plain tensor has the shape and dtype of codes."""
        stored = self._shards[name].entries[name]
        return stored.dtype not in _NO_CODES and len(stored.shape) > 1

    def _is_of_codes(self, name: str) -> bool:
        return self._shards[name].entries[name].dtype not in FLOATS

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of all tensors; a low-bit weight is one tensor."""
        return [*self.weights, *self.plain]

    def stored_names(self, name: str) -> dict[str, str]:
        """The stored name of each part of a tensor; a plain tensor is one part, named ""."""
        return self.weights.get(name, {"": name})

    def files(self) -> dict[TensorFile, list[str]]:
        """The stored names in each shard."""
        found: dict[TensorFile, list[str]] = {}
        for name, file in self._shards.items():
            found.setdefault(file, []).append(name)
        return found

    @property
    def left_out(self) -> list[str]:
        found = []
        if self.unread_scales:
            found.append(
                f"{len(self.unread_scales)} scales of a KV cache, such as {self.unread_scales[0]}, are left out: "
                "lowbit keeps keys and values in the dtype of the model"
            )
        if self.unused:
            found.append(
                f"{len(self.unused)} tensors, such as {self.unused[0]}, are left out: the model has no place for them"
            )
        return found

    def leave_out(self, names: Collection[str]) -> None:
        """Take these tensors for ones that no model of this folder has."""
        found = {*self.names()} & {*names}
        self.unused = sorted(found.union(self.unused))
        self._take_out(found)

    def keep(self, wanted: Collection[str]) -> None:
        """Take tensors with names of cache scales for plain ones if a model has them among its names, `wanted`."""
        self.plain += [name for name in self.unread_scales if name in wanted]
        self.unread_scales = [name for name in self.unread_scales if name not in wanted]

    def leave_out_scales(self, names: Collection[str]) -> None:
        """Take these scales of a KV cache for ones that lowbit does not keep."""
        self._take_out(names)
        self.cache_scales = [name for name in self.cache_scales if name not in names]
        self.unread_scales += names

    def stored(self, name: str) -> Tensor:
        """The tensor of this name in a shard, a view of the file, after it was compared with its digest."""
        found = self._as_read(name)
        if name in self._unverified:
            self._verify({name: found})
        return found

    def _verify(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare tensors with their digests, in several threads. Each tensor is compared once."""
        stored = {name: self._unverified[name] for name in tensors}
        misplaced = digests.misplaced(stored, tensors)
        if misplaced is not None:
            raise FormatError(f"{self.path}: {misplaced}; {_WAY_OUT}")
        if bad := sorted(digests.damaged(stored, tensors, tensors)):
            raise FormatError(
                f"{self.path}: {digests.listed(bad)} damaged: other bytes than the written ones; {_WAY_OUT}"
            )
        for name in tensors:
            self._unverified.pop(name, None)  # another thread may have compared it meanwhile

    def verified(self, names: Iterable[str]) -> Iterator[str]:
        """The names, each after its tensors were compared with their digests. Tensors of `MOST_AHEAD` bytes are
        compared together, on all cores."""
        waiting: dict[str, Tensor] = {}
        together: list[str] = []
        nbytes = 0
        for name in names:
            together.append(name)
            for part in self.weights[name].values() if name in self.weights else (name,):
                if part in self._unverified:
                    waiting[part] = self._as_read(part)
                    nbytes += waiting[part].nbytes
            if nbytes > MOST_AHEAD:
                self._verify(waiting)
                waiting, nbytes = {}, 0
                yield from together
                together = []
        self._verify(waiting)
        waiting = {}
        yield from together

    def _as_read(self, name: str) -> Tensor:
        file = self._shards[name]
        if self._mapped_file is not file or self._mapped > MOST_MAPPED:
            self._unmap()
            self._mapped_file, self._mapped = file, 0
        try:
            found = file.tensor(name)
        except ReplacedFileError as error:
            raise FormatError(str(error)) from error
        self._mapped += found.nbytes
        return found

    def _unmap(self) -> None:
        if self._mapped_file is not None:
            self._mapped_file.unmap()

    def plain_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a plain tensor, from the header."""
        return self._shards[name].entries[name].shape

    def plain_dtype(self, name: str) -> torch.dtype:
        """The dtype of a plain tensor, from the header."""
        return self._shards[name].entries[name].dtype

    def read(self, name: str) -> Tensor:
        """The tensor of this name, low-bit or plain, on the CPU; a plain tensor is a view of the file."""
        if name not in self.weights:
            return self.stored(name)
        assert self.format is not None and self.settings is not None
        parts = {part: self.stored(stored) for part, stored in self.weights[name].items()}
        with damage_of(f"{self.path}: {name}"):
            return self.format.read(parts, self.settings, name, self.dtype)

    def in_order(self) -> Iterator[str]:
        """All names, shard by shard; a low-bit weight counts to the shard of its first part. Raises FormatError for
        tensors that differ from their digests."""
        by_file: dict[TensorFile, list[str]] = {}
        for name, parts in self.weights.items():
            by_file.setdefault(self._shards[next(iter(parts.values()))], []).append(name)
        for name in self.plain:
            by_file.setdefault(self._shards[name], []).append(name)
        for file in sorted(by_file, key=lambda file: file.path.name):
            yield from self.verified(by_file[file])
            self._unmap()

    def items(self) -> Iterator[Item]:
        for name in self.in_order():
            value = self.read(name)
            yield Item(name, value, self.holder(name, value))

    def holder(self, name: str, t: Tensor) -> Holder:
        """The kind of module that holds this tensor, in a model of this config."""
        if name in self.cache_scales:
            return "cache"
        if self.config.get("model_type") in TRANSPOSED and not is_head(layer_of(name)):
            return "custom" if holder_of(name, t) == "linear" else holder_of(name, t)
        return holder_of(name, t)

    def copy_files(self, folder: Path) -> None:
        copy_beside_weights(self.path, folder)

    def linears(self) -> set[str]:
        """Empty: in a folder, names and shapes of tensors say what is a linear."""
        return set()


def copy_beside_weights(source: Path, folder: Path) -> None:
    """Copy all files except weights, indices, settings of weights and hidden files. Folders stay behind too."""
    for path in sorted(source.iterdir()):
        is_index = ".index." in path.name and path.suffix == ".json"  # also ".index.fp16.json"
        is_of_weights = path.suffix in WEIGHT_SUFFIXES or is_index
        skips = is_of_weights or path.name in _SETTINGS_OF_WEIGHTS or path.name[0] == "."
        if path.is_file() and not skips:
            shutil.copyfile(path, folder / path.name)


def copy_settings(source: Path, folder: Path) -> None:
    """Copy config.json, the index of the shards, and the other files that describe the weights."""
    indices = {f"{stem}.safetensors.index.json" for stem in STEMS}
    for name in sorted(_SETTINGS_OF_WEIGHTS | indices):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _take_settings(config: dict[str, Any]) -> Mapping[str, Any] | None:
    """Remove "quantization_config" from `config` and from the config of its language model, and return the first.

    Raises FormatError for a value that is not a JSON object.
    """
    taken: list[Mapping[str, Any]] = []
    for place in places_of(config):
        for key in ("quantization_config", "compression_config"):
            found = place.pop(key, None)
            if not isinstance(found, dict | None):
                raise FormatError(f"{key} of config.json is {found!r:.60}; accepted: a JSON object")
            if found is not None:
                taken.append(found)
    return taken[0] if taken else None


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    for place in places_of(config):
        for key in ("dtype", "torch_dtype"):
            dtype = getattr(torch, str(place.get(key)).removeprefix("torch."), None)
            if isinstance(dtype, torch.dtype):
                return dtype
    return None
