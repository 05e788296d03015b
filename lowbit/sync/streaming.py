"""A model in training as named, packed tensors: one after another, to a folder, and into a module.

The tensors and their names are those of `lowbit.export`, whose walk `stream` goes. Tensors that stand for one weight
follow each other. What a receiver has already is left out: `known` maps each name to dtype, shape and a digest
(`lowbit.files.digests.fingerprint`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import check_module
from lowbit.files import digests
from lowbit.files.tensor_file import TensorFile
from lowbit.formats.base import Format, FormatError
from lowbit.formats.experts import published
from lowbit.formats.folder import Folder, open_shard
from lowbit.formats.gguf.format import Gguf
from lowbit.formats.like import Likeness
from lowbit.formats.programs.base import ProgramFormat
from lowbit.formats.registry import FORMATS
from lowbit.formats.registry import target as target_of
from lowbit.formats.report import ExportReport
from lowbit.formats.shards import size_in_bytes
from lowbit.formats.sources import Source
from lowbit.formats.writing import export_like, folder_like, refuse_options, walk, write_folder
from lowbit.numerics.settings import check_flag
from lowbit.sync.source import TrainedModel
from lowbit.tensor.core.base import LowbitTensor

Known = digests.Entries
"""What a receiver holds: for each stored name {"dtype", "shape", "sha256"}, or "mixed" in place of "sha256" where the
trainer is on a GPU. JSON."""
Stored = dict[str, Tensor]
"""The tensors that stand for one weight, by the names under which a server takes them."""


def stream(
    model: nn.Module,
    format: str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    lossy: bool = False,
    known: Known | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model in training, one after another, as `lowbit.export` would write them: (name, tensor).

        llm.load_weights(lowbit.sync.stream(model, "fp8"))         # a server in this process
        llm.load_weights(lowbit.sync.stream(model, like="openai/gpt-oss-20b"))    # one that loaded this folder

    Weights that are prepared for QAT have the bits of `lowbit.qat.convert_`, and the model stays as it is. Memory: a
    few tensors beside the model. Under FSDP2 this is a collective: every rank runs the loop to its end, and each gets
    every tensor.

    Args:
        model: plain, prepared by `lowbit.qat.prepare_` or `lowbit.train.prepare_`, or quantized; sharded or not.
        format: a name of `lowbit.formats.names()` whose weights are written to folders; None, without `like`, for
            "compressed-tensors".
        like: the folder from which the model was loaded, and the server too, as in `lowbit.export`: all tensors in its
            names and dtypes. Every rank reads it.
        lossy: as in `lowbit.export`.
        known: what the receiver holds. Weights that are in it are left out. The others enter it, each when the next
            one is asked for. None: everything is given, and nothing hashed.

    Raises:
        FormatError, a ValueError: a weight that the format cannot hold, by name; another format; adapters of PEFT.
        ValueError: NaN or infinite values of a weight that is rounded.
    """
    check_flag("lossy", lossy)
    written = chosen(format, like)
    for stored, _, differs in changed(weights(TrainedModel(model), written, lossy), known):
        if differs:
            yield from stored.items()


def chosen(format: str | None, like: str | os.PathLike[str] | None) -> Format | Folder:
    """The format of this name, or the folder of `like`. Raises FormatError for both, for a format that is not written
    as named tensors, and for a folder without low-bit weights."""
    if like is None:
        return folder_format(format)
    refuse_options({"format": format}, "like= takes the format of a folder")
    return folder_like(like)


def folder_format(name: str | None) -> Format:
    """The format of this name. Raises FormatError for one that is not written as named tensors."""
    found = target_of(name or "compressed-tensors")
    if isinstance(found, ProgramFormat | Gguf):
        accepted = ", ".join(f.name for f in FORMATS if not isinstance(f, Gguf))
        raise FormatError(
            f"{name} is one file, not a stream of named tensors; accepted: {accepted}"
        )
    return found


def named(source: Source, target: Format) -> Source:
    """`source` in the names that servers take."""
    return published(source) if target.holds_experts else source


def weights(source: TrainedModel, written: Format | Folder, lossy: bool) -> Iterator[Stored]:
    """The tensors of each weight of `source`, contiguous, in a format or as in a folder."""
    if isinstance(written, Folder):
        assert written.format is not None
        report = ExportReport(format=written.format.name, path=str(written.path))
        yield from Likeness(written, source, lossy, report).weights()
        return
    for _, stored, _ in walk(named(source, written), written, lossy, f"packing {written.name}"):
        yield {name: t.detach().contiguous() for name, t in stored.items()}


def changed(
    found: Iterable[Stored], known: Known | None
) -> Iterator[tuple[Stored, Known | None, bool]]:
    """Each weight, the entries of its tensors, and True if it differs from `known`, which then has them (`stream`). No
    entries where `known` is None."""
    check_known(known)
    for stored in found:
        if known is None:
            yield stored, None, True
            continue
        entries = {n: digests.layout(t) | digests.fingerprint(t) for n, t in stored.items()}
        differs = any(known.get(name) != entry for name, entry in entries.items())
        if differs:
            # while they are loaded, and after an error, nobody knows what the receiver holds
            for name in entries:
                known.pop(name, None)
        yield stored, entries, differs
        known |= entries


def check_known(known: Any) -> None:
    """Raise TypeError unless `known` is a dict or None."""
    if not isinstance(known, dict | None):
        raise TypeError(
            f"known must be a dict, which enters what the receiver holds, got {known!r:.60}; start with an empty one, "
            "known = {}, or leave it None"
        )


# ---- files -----------------------------------------------------------------------------------------------------------


def write(
    model: nn.Module,
    out: str | os.PathLike[str],
    format: str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    lossy: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = "500MB",
    tokenizer: Any = None,
) -> ExportReport | None:
    """`lowbit.export` of a model in training: the folder that a server starts from, or loads again.

    Under FSDP2 every rank calls it. The first one writes, and the others take part in the gathers.

    Args:
        model, format, like, lossy: as for `stream`.
        out, overwrite, max_shard_size, tokenizer: as for `lowbit.export`.

    Returns the report of the export on the rank that writes, None on the others.

    Raises FormatError as `lowbit.export` does.
    """
    check_flag("lossy", lossy)
    check_flag("overwrite", overwrite)
    if like is not None:
        sizes = None if max_shard_size == "500MB" else max_shard_size
        given = {"format": format, "tokenizer": tokenizer, "max_shard_size": sizes}
        refuse_options(given, "like= takes the format and all files of a folder")
        whole = TrainedModel(model)
        made = export_like(whole, Path(out), folder_like(like), lossy, overwrite, whole.leads)
        return made if whole.leads else None
    target, largest = folder_format(format), size_in_bytes(max_shard_size)
    source = TrainedModel(model, tokenizer)
    if not source.leads:
        source.take_part_in_the_rest()
        return None
    report = ExportReport(format=target.name, path=str(out))
    own = named(source, target)
    try:
        write_folder(
            own, Path(out), target, report, lossy=lossy, overwrite=overwrite, largest=largest
        )
    except BaseException:
        source.take_part_in_the_rest()
        raise
    return report


def read(
    folder: str | os.PathLike[str], *, known: Known | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder that `write` or `lowbit.export` wrote, as they are stored: (name, view of the file).

    Layers that are in `known` are not read: the shards hold the digests. The others are compared with them, and enter
    `known` as in `stream`.

    Args:
        folder: holds *.safetensors. Those of other programs have no digests, and are read without `known`.
        known: what the receiver holds, as for `stream`.

    Raises FormatError for a folder without shards, a shard without digests while `known` is given, and a damaged one.
    """
    check_known(known)
    path = Path(folder)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FormatError(
            f"{path} has no *.safetensors; give a folder that lowbit.sync.write wrote"
        )
    for file in files:
        shard = open_shard(file)
        try:
            entries = digests.taken(dict(shard.metadata))
        except ValueError as error:
            raise FormatError(f"{file}: {error}; write the folder anew") from error
        if entries is None and known is not None:
            raise FormatError(
                f"{file} has no digests, by which known= leaves tensors out; accepted: folders of lowbit, or known=None"
            )
        together: dict[str, list[str]] = {}
        for name in shard.entries:
            together.setdefault(_layer_of(name), []).append(name)
        for names in together.values():
            own = {} if entries is None else {name: entries.get(name) for name in names}
            if known is None or any(known.get(name) != own[name] for name in names):
                yield from _read(shard, names, own, known)


def _layer_of(name: str) -> str:
    """The layer of a stored tensor, of whatever part: `layer.weight_packed`, `layer.weight.codes`, `layer.bias`."""
    layer, found, _ = name.rpartition(".weight")
    return layer if found else name.rpartition(".")[0]


def _read(
    shard: TensorFile, names: list[str], entries: dict[str, Any], known: Known | None
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        t, entry = shard.tensor(name), entries.get(name)
        if entry is not None and digests.of_tensor(t) != entry.get("sha256"):
            raise FormatError(f"{shard.path}: {name} has other bytes than were written")
        if known is not None:
            known.pop(name, None)
        yield name, t
        if known is not None and entry is not None:
            known[name] = entry


# ---- into a module ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Copy tensors into the parameters and buffers of `model` that have their names, in place; returns their number.

    For models whose own loader takes no stream: transformers' quantized classes while their weights are packed, models
    in lowbit's own weights with the format "lowbit", and plain ones. vLLM and SGLang have `load_weights`.

    Args:
        model: the server's module. Its tensors keep their memory.
        tensors: names and tensors, as `stream`, `receive` and `read` give them: those of one weight follow each other.

    Raises:
        TypeError: `model` is not a module.
        FormatError: a name that the model lacks, or another shape. Tensors before it are loaded already.
    """
    check_module(model)
    modules = dict(model.named_modules())

    def place(pair: tuple[str, Tensor]) -> str:
        layer = pair[0].rpartition(".")[0]
        while layer and layer not in modules:
            layer = layer.rpartition(".")[0]
        return layer

    count = 0
    for layer, pairs in groupby(tensors, place):
        own = {name.removeprefix(f"{layer}." if layer else ""): t for name, t in pairs}
        kind = type(modules[layer]).__name__
        try:
            _, unknown = modules[layer].load_state_dict(own, strict=False)
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise FormatError(f"{layer or 'the model'}, a {kind}: {why}") from error
        if unknown:
            held = modules[layer].parameters(recurse=False)
            own_format = any(isinstance(t, LowbitTensor) for t in held)
            raise FormatError(
                f"{layer or 'the model'}, a {kind}, has no {', '.join(unknown[:3])}: "
                + (
                    'its weight is lowbit\'s own, so send the format "lowbit"'
                    if own_format
                    else "send the format from which the server was built, while its weights are packed"
                )
            )
        count += len(own)
    return count
