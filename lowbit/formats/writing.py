"""`lowbit.export`: writes a model, from memory or a folder, to a folder in a format that other programs read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import Schemes, check_schemes, underflow
from lowbit.formats.base import Format, FormatError, Parts, ScalesError, layer_of, weight_of
from lowbit.formats.experts import gathered, published
from lowbit.formats.folder import Folder, is_of_diffusers, read_json
from lowbit.formats.format_file import check_free_file, format_file
from lowbit.formats.gguf.file import GgufFile, GgufWriter
from lowbit.formats.gguf.format import Gguf
from lowbit.formats.gguf.mixes import gguf_mix
from lowbit.formats.heap import Trimmed
from lowbit.formats.layer_names import heads_without_weights, is_kept_in_float32
from lowbit.formats.like import MOST_REFUSED, Likeness, write_like
from lowbit.formats.merged import MergedLayers, Ready
from lowbit.formats.module import ModelSource, config_of, refuse_adapters
from lowbit.formats.programs.base import ProgramFormat
from lowbit.formats.programs.exporting import export_program
from lowbit.formats.quantizing import Quantizing
from lowbit.formats.reading import names_in_model, opened
from lowbit.formats.registry import target as target_of
from lowbit.formats.report import ExportReport
from lowbit.formats.scheme_grid import grid
from lowbit.formats.shards import (
    Shards,
    check_free,
    new_folder,
    same_values,
    size_in_bytes,
    write_json,
)
from lowbit.formats.sources import Item, Source
from lowbit.layers.cache_scales import settings_for
from lowbit.numerics.search import check_scales
from lowbit.numerics.settings import check_flag, device_of
from lowbit.numerics.snr import snr
from lowbit.progress import progress
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor

NOTHING_LOW = "no weight is in low bits: call lowbit.quantize_ first, or give a folder and scheme="


def export(
    model: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    scheme: Scheme | Mapping[str, Scheme | None] | str | None = None,
    scales: str | None = None,
    lossy: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = "500MB",
    tokenizer: Any = None,
    device: str | torch.device | None = "cpu",
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
) -> ExportReport:
    """Write a model with low-bit weights to the folder `out`, in a format that transformers and vLLM take as it is.

        lowbit.export(model, "model-int4")                                           # after lowbit.quantize_(model, …)
        lowbit.export("model-int4", "model-lowbit", format="lowbit")                 # another format, the same values
        lowbit.export("model-bf16", "model-int4", scheme=lowbit.Int4WeightOnly())    # quantize while writing
        lowbit.export(model, "model.onnx", "onnx", example_inputs=(tokens,))         # a program for another runtime
        lowbit.export(model, "tuned", like="openai/gpt-oss-20b")                     # back into a published folder

    Weights keep their values to the bit: each weight is decoded again before it is written, and each shard is read back
    and compared. `out` appears whole, at the end, or not at all. Memory: a shard and a few tensors, beyond a model that
    is in memory already.

    Args:
        model: a module, whose state dict is written, or the folder of a checkpoint in any format that lowbit reads, or
            a GGUF file.
        out: the folder to make; its parent exists. For "gguf" a file.
        format: a name of `lowbit.formats.names()`. None without `like` means "compressed-tensors", and "lowbit" for a
            model of diffusers, which does not read the former.
        like: a folder with low-bit weights from which `lowbit.load_pretrained` made the model. `out` gets its names,
            dtypes, shards, config.json and other files. A tensor that is equal to the folder's keeps its bytes, also a
            single expert of a stack. Other weights keep their values, in the format of the folder. Takes no `format`,
            `scheme`, `tokenizer` or `max_shard_size`.
        scheme: for a folder of plain weights: a Scheme, or a dict of name patterns to a Scheme or None. A bare Scheme
            and the pattern "*" leave embeddings, the output head and routers alone. Another pattern takes those that it
            matches, but a router only if it names the router outright, such as "*.mlp.gate". Scales have the dtype that
            the format stores (`lowbit.formats.grid`). For "gguf" also the name of a mix, such as "Q4_K_M"
            (`lowbit.formats.gguf_mix`), whose scales are searched unless `scales` says otherwise.
        scales: how `scheme` chooses scales, "minmax", "searched" or None, as in `lowbit.quantize_`.
        lossy: round a weight that the format cannot hold to the nearest scheme that it holds, or store the weight
            plainly if there is none. The report states each loss. False: such a weight raises an error.
        overwrite: replace an `out` that is a checkpoint, with all that lies in it, except an `out` with another
            checkpoint or a .git inside.
        max_shard_size: the largest size of a shard, in bytes or as "500MB". The tensors of one shard are in memory.
        tokenizer: for a module: an object with `save_pretrained`, or a folder whose files are copied. A folder's own
            files (tokenizer, chat template, code) are copied always.
        device: where `scheme` quantizes; None: on the CPU.
        example_inputs: for a program ("aoti", "executorch", "onnx"): the arguments of a call as a tuple, or its keyword
            arguments as a dict. torch.export traces the module with them, in eval mode. `out` is a file.
        dynamic_shapes: which sizes of them may change, as `torch.export.export` takes it. None: none may.

    Returns:
        What is stored in low bits and what is not, and the signal-to-noise ratio of each weight that was rounded.

    Raises:
        FormatError, a ValueError: a weight that the format cannot hold, with its name and the reason; a model with
            adapters of PEFT, which no loader finds; a source that is not a model, damaged or of another format than it
            says; an `out` that exists or cannot be written.
    """
    check_flag("lossy", lossy)
    check_flag("overwrite", overwrite)
    check_scales(scales)
    device = device_of("device", device)
    traced = {"example_inputs": example_inputs, "dynamic_shapes": dynamic_shapes}
    of_source = {"scheme": scheme, "scales": scales, "tokenizer": tokenizer}
    if like is not None:
        sizes = None if max_shard_size == "500MB" else max_shard_size
        given = {"format": format, **of_source, "max_shard_size": sizes, **traced}
        refuse_options(given, "like= takes the format and all files of a folder")
        if not isinstance(model, nn.Module):
            raise TypeError(f"like= writes an nn.Module, got {type(model).__name__}")
        refuse_adapters(model)
        folder = folder_like(like)
        own = ModelSource(model, target=folder.format)
        return export_like(own, Path(out), folder, lossy, overwrite)
    target, out = target_of(default_format(model) if format is None else format), Path(out)
    if isinstance(target, ProgramFormat):
        refuse_options(of_source, f"{target.name} holds a program of a module")
        return export_program(model, out, target, example_inputs, dynamic_shapes, lossy, overwrite)
    refuse_options(traced, f"{target.name} holds weights, not a program")
    largest = size_in_bytes(max_shard_size)
    source = _source_of(model, out, target, scheme, scales, tokenizer, device)
    if target.holds_experts:
        source = published(source)
    elif target.holds_stacks and isinstance(source, Folder | Quantizing):
        source = gathered(source, source.names())
    report = ExportReport(format=target.name, path=str(out), notes=[*source.left_out])
    if isinstance(target, Gguf):
        if isinstance(source, GgufFile):
            raise FormatError(f"{source.path} is a GGUF file already; copy it")
        with format_file(out, overwrite, target.name, ".gguf") as path:
            file = GgufWriter(path, source)
            _write_all(source, file, target, lossy, report)
            file.finish()
            report.nbytes = file.nbytes
        return report
    write_folder(source, out, target, report, lossy=lossy, overwrite=overwrite, largest=largest)
    return report


def default_format(model: Any) -> str:
    """The format in which `export` writes a module, or the model of a folder, where none is given."""
    config: Mapping[str, Any] = {}
    if isinstance(model, nn.Module):
        config = config_of(model)
    elif isinstance(model, str | os.PathLike) and (path := Path(model, "config.json")).is_file():
        config = read_json(path)
    return "lowbit" if is_of_diffusers(config) else "compressed-tensors"


def write_folder(
    source: Source,
    out: Path,
    target: Format,
    report: ExportReport,
    *,
    lossy: bool,
    overwrite: bool,
    largest: int,
) -> None:
    """Write a model to a folder.

    Args:
        source: the model.
        out: the folder, which takes its place once it is whole.
        target: the format.
        report: gets an entry for each tensor, and the bytes of all.
        lossy: True allows values that the format rounds again.
        overwrite: True replaces a folder that exists.
        largest: the most bytes of a shard.
    """
    with new_folder(out, overwrite) as folder:
        shards = Shards(folder, largest, target, source.config)
        weights, plain, scales = _write_all(source, shards, target, lossy, report)
        shards.finish()
        report.nbytes = shards.nbytes
        report.notes += target.notes(weights)
        settings = _settings(source, target, weights, plain) | settings_for(scales)
        write_json(folder / "config.json", {**source.config, "quantization_config": settings})
        source.copy_files(folder)
        _check_readable(folder, target, weights.keys())


def _settings(
    source: Source, target: Format, weights: dict[str, LowbitTensor], plain: set[str]
) -> dict[str, Any]:
    """The "quantization_config" of a folder.

    Args:
        source: the model.
        target: the format.
        weights: what is stored in low bits, by its name in the folder.
        plain: layers whose weight is stored plain.
    """
    layers = {layer_of(name) for name in weights}
    linears = source.linears()
    plain = plain | (linears - layers)
    heads = heads_without_weights(source.config, source.names())
    # readers look for entries in names, and take all layers inside of an entry for plain ones
    heads = {head for head in heads if not any(head in layer for layer in layers)}
    is_uniform = not plain - heads and len({w.stored_format() for w in weights.values()}) <= 1
    if not (linears or is_uniform or target.name == "lowbit"):
        # a folder, whose names transformers may change while it reads them
        names = {*weights, *map(weight_of, plain)}
        others = names_in_model(source.config, names)
        plain |= {layer_of(others[n]) for n in map(weight_of, plain) if n in others}
        weights = weights | {others[n]: w for n, w in weights.items() if n in others}
    return target.config(weights, plain | heads)


def check_writing(
    source: str | os.PathLike[str],
    out: Path,
    scheme: Schemes,
    format: str | None = None,
    *,
    lossy: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = "500MB",
) -> dict[str, Scheme | None]:
    """Check what `export` will get of a model in memory, before work of hours. Returns the patterns of
    `scheme` with the scales that the format stores.

    Args:
        source: the folder of the model as it is.
        scheme: for all weights, or by pattern.
        out, format, lossy, overwrite, max_shard_size: as `lowbit.export` takes them.

    Raises:
        FormatError: a format of programs, a scheme that the format does not hold, unless `lossy`, an `out` that exists
            or cannot be written, and a `max_shard_size` that is not a size.
    """
    check_flag("lossy", lossy)
    check_flag("overwrite", overwrite)
    target = target_of(default_format(source) if format is None else format)
    if isinstance(target, ProgramFormat):
        raise FormatError(f"{target.name} holds a program of a module; write it by lowbit.export")
    size_in_bytes(max_shard_size)
    _check_apart(Path(source), out)
    if isinstance(target, Gguf):
        check_free_file(out, overwrite, target.name, ".gguf")
    else:
        check_free(out, overwrite)
    return on_grid(target.name, scheme, lossy)


def on_grid(format: str, scheme: Schemes, lossy: bool) -> dict[str, Scheme | None]:
    """The patterns of `scheme` with the scales that the format stores. Raises FormatError for a scheme that the format
    does not hold, unless `lossy`."""
    target = target_of(format)
    check_schemes(scheme, Scheme)
    given = {"*": scheme} if isinstance(scheme, Scheme) else dict(scheme)
    if not lossy:
        return dict(grid(target.name, given))
    return {p: None if one is None else target.grid(one) for p, one in given.items()}


def _check_apart(source: Path, out: Path) -> None:
    """Raise FormatError if `out` is what is read, or holds it."""
    if out.exists() and out.resolve() == source.resolve():
        kind = "folder" if source.is_dir() else "file"
        raise FormatError(f"{out} is the {kind} that is read; give another name")
    if out.resolve() in source.resolve().parents:
        raise FormatError(f"{out} holds {source}, which is read; give another name")


def refuse_options(given: Mapping[str, Any], reason: str) -> None:
    if named := [f"{option}=" for option, value in given.items() if value is not None]:
        raise FormatError(f"{reason}, and takes no {', '.join(named)}")


def _source_of(
    model: nn.Module | str | os.PathLike[str],
    out: Path,
    target: Format,
    scheme: Scheme | Mapping[str, Scheme | None] | str | None,
    scales: str | None,
    tokenizer: Any,
    device: torch.device,
) -> Source:
    if isinstance(model, nn.Module):
        if scheme is not None:
            raise FormatError("scheme= is for a folder; for a module call lowbit.quantize_ first")
        refuse_adapters(model)
        return ModelSource(model, tokenizer, target)
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            f"export takes an nn.Module, a folder or a GGUF file, got {type(model).__name__}"
        )
    source = opened(model)
    _check_apart(source.path, out)
    if scheme is None:
        return source
    if not isinstance(source, Folder):
        raise FormatError(
            f"scheme= takes a folder of plain weights, got {source.path}: call lowbit.load_pretrained, then "
            "lowbit.quantize_"
        )
    if isinstance(scheme, str):
        if not isinstance(target, Gguf):
            raise FormatError(
                f"scheme={scheme!r} names a mix of gguf, got the format {target.name}; give a Scheme, such as "
                "lowbit.Int4WeightOnly()"
            )
        scheme, scales = gguf_mix(scheme, source.config), scales or "searched"
    return Quantizing(source, scheme, scales, device, target)


def folder_like(like: str | os.PathLike[str]) -> Folder:
    """The folder of `like=`. Raises FormatError for one without low-bit weights."""
    folder = opened(like)
    if not isinstance(folder, Folder) or folder.format is None:
        raise FormatError(
            f"{folder.path} has no low-bit weights in safetensors, and like= takes a folder that has; accepted: "
            "format=, or save_pretrained for a plain model"
        )
    return folder


def export_like(
    source: ModelSource,
    out: Path,
    folder: Folder,
    lossy: bool,
    overwrite: bool,
    leads: bool = True,
) -> ExportReport:
    """`lowbit.export(model, out, like=folder)` of a source. If ranks share its weights, all of them call this.

    Args:
        source: the model in training.
        out: the folder to write.
        folder: the one that the model came from, which has a format.
        lossy, overwrite: as `lowbit.export` takes them.
        leads: True on the rank that writes. The others gather with it.
    """
    assert folder.format is not None
    _check_apart(folder.path, out)
    report = ExportReport(format=folder.format.name, path=str(out))
    weights = {*folder.weights}
    likeness = Likeness(folder, source, lossy, report)
    shards = likeness.shards()
    if not leads:
        deque(shards, maxlen=0)
        return report
    try:
        with new_folder(out, overwrite) as place:
            write_like(likeness, shards, place)
            _check_readable(place, folder.format, weights)
    except BaseException:
        if source.is_shared:  # the other ranks gather on
            with suppress(Exception):  # the first error is the one to report
                deque(shards, maxlen=0)
        raise
    return report


def _write_all(
    source: Source, shards: Shards | GgufWriter, target: Format, lossy: bool, report: ExportReport
) -> tuple[dict[str, LowbitTensor], set[str], list[str]]:
    """Write all items. Returns the low-bit weights by name, on meta, the modules of linears that stay plain, and the
    names of the scales of a KV cache."""
    weights: dict[str, LowbitTensor] = {}
    plain: set[str] = set()
    scales: list[str] = []
    for item, stored, meta in walk(source, target, lossy, f"writing {target.name}"):
        if item.holder == "cache":
            scales.append(item.name)
            if not target.holds_cache_scales:
                continue
        if meta is not None:
            weights[item.name] = meta
        elif item.holder in ("linear", "float32"):
            plain.add(layer_of(item.name))
        shards.add(stored, item.name, meta)
        report.enter(item, sum(t.nbytes for t in stored.values()))
    if not weights:
        raise FormatError(NOTHING_LOW)
    if scales and not target.holds_cache_scales:
        report.notes.append(
            f"{len(scales)} scales of a KV cache, such as {scales[0]}, are left out: {target.name} has no place for "
            "them"
        )
        scales = []
    return weights, plain, scales


def walk(
    source: Source, target: Format, lossy: bool, title: str
) -> Iterator[tuple[Item, dict[str, Tensor], LowbitTensor | None]]:
    """Each item, its tensors by the names under which `target` stores them, and the low-bit weight, on meta.

    `title`: of the progress bar. Raises FormatError, with the names of the first weights that the format cannot hold.
    """
    refused: dict[str, FormatError] = {}
    heap, merged = Trimmed(), MergedLayers(target, lossy, source.names())
    with progress(title, source.nbytes) as advance:
        for name, size, ready in _ready(source, target, lossy, merged):
            try:
                found = ready()
            except FormatError as error:
                found = []
                refused[name] = error
                if len(refused) == MOST_REFUSED:
                    break
            if not refused:
                yield from (_stored(item, parts, target) for item, parts in found)
            del found, ready  # so that the next item is not read beside this one
            advance(size)
            heap.advance(size)
    if refused:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        remedy = "" if lossy else _remedy(target, refused.values())
        raise FormatError(f"{target.name} cannot hold {reasons}{remedy}")


def _stored(
    item: Item, parts: Parts, target: Format
) -> tuple[Item, dict[str, Tensor], LowbitTensor | None]:
    if not isinstance(item.value, LowbitTensor):
        return item, {item.name: item.value}, None
    meta = item.value._map(lambda t: t.detach().to("meta"))
    return item, {target.stored_name(item.name, p): t for p, t in parts.items()}, meta


def _ready(
    source: Source, target: Format, lossy: bool, merged: MergedLayers
) -> Iterator[tuple[str, int, Callable[[], list[Ready]]]]:
    """For each item its name, its size, and a call that gives all that can now be written, or raises FormatError."""

    def of(item: Item) -> list[Ready]:
        if is_kept_in_float32(source.config, layer_of(item.name)) and item.holder == "linear":
            item = replace(item, holder="float32")
        try:
            found, parts = _in_format(item, target, lossy)
        except FormatError:
            merged.take(item, None)
            raise
        return merged.take(found, parts)

    for item in source.items():
        yield item.name, item.nbytes, partial(of, item)
    for name, waiting in merged.rest():
        yield name, 0, waiting


def _remedy(target: Format, errors: Iterable[FormatError]) -> str:
    remedy = ". lossy=True rounds such weights to what the format holds, and states the loss"
    if target.name != "lowbit":
        remedy += '; format="lowbit" holds every scheme'
    if target.scale_dtype is not None and any(isinstance(e, ScalesError) for e in errors):
        remedy += (
            f"; lowbit.formats.grid({target.name!r}, scheme) gives a scheme whose scales it holds"
        )
    return remedy


def _in_format(item: Item, target: Format, lossy: bool) -> tuple[Item, Parts]:
    """The item as the format holds it, and its parts. Raises FormatError if the format does not hold it."""
    weight = item.value
    if not isinstance(weight, LowbitTensor):
        return item, {}
    try:
        return item, _encoded(item, weight, target)
    except FormatError as error:
        if not lossy:
            raise
        reason = str(error)
    values = weight.dequantize()
    scheme = target.nearest(weight) if _has_place(item, target) else None
    if scheme is None:
        return Item(item.name, values, item.holder, f"stored plainly: {reason}", item.snr), {}
    rounded = target.rounded(values, scheme)
    ratio = snr(values, rounded.dequantize())
    note = f"{scheme.describe(rounded.shape)}; rounded, as {reason}"
    note = "; ".join(filter(None, (note, underflow(values, rounded))))
    other = Item(item.name, rounded, item.holder, note, ratio)
    return other, _encoded(other, rounded, target)


def _check_place(item: Item, target: Format) -> None:
    """Raise FormatError for a tensor that no scheme makes one of the format's weights."""
    if item.holder == "embedding" and not target.holds_embeddings:
        raise FormatError(
            f"it is the weight of an embedding, which loaders of {target.name} take in high precision, as they take an "
            "output head that is tied to it"
        )
    if item.holder == "custom" and not target.holds_custom:
        raise FormatError(
            f"it belongs not to an nn.Linear but to a module of transformers, such as Conv1D or a router, and loaders "
            f"of {target.name} would leave it random; lowbit.export(…, format='lowbit') holds it"
        )
    if item.holder == "float32" and not target.holds_float32:
        raise FormatError(
            f"transformers keeps this layer in float32 in such a model, and its loader of {target.name} takes it in "
            "high precision; leave it out by a pattern"
        )
    target.stored_name(item.name, "weight")  # refuses names that the format has no place for


def _has_place(item: Item, target: Format) -> bool:
    try:
        _check_place(item, target)
    except FormatError:
        return False
    return True


def _encoded(item: Item, weight: LowbitTensor, target: Format) -> Parts:
    """The parts of a weight, after they were decoded again and compared."""
    _check_place(item, target)
    parts = target.encode(weight)
    for part in parts:
        target.stored_name(item.name, part)  # refuses names that the format has no place for
    alone = {item.name: weight}
    settings = target.settings(target.config(alone, ()), target.metadata(alone, ()))
    again = target.read(parts, settings, item.name, weight.dtype)
    if not same_values(weight, again):
        raise FormatError("it would be read back with other values; please report it")
    return parts


def _check_readable(folder: Path, target: Format, weights: Collection[str]) -> None:
    """Read the new folder. Raises FormatError unless it has the same weights, and all tensors the bytes that were
    written."""
    found = Folder(folder)
    try:
        for _ in found.in_order():
            pass
    except FormatError as error:
        raise FormatError(
            f"read back after it was written: {error}. Check the disk and memory"
        ) from error
    if found.format is not target or found.weights.keys() != {*weights}:
        raise FormatError(f"the folder would be read as another one: {sorted(found.weights)[:3]}")
