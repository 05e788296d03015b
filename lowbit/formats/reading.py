"""`lowbit.load_pretrained`: a folder in any format that lowbit reads, as a model with low-bit weights."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import check_module, joined_name, tell, watch_joined
from lowbit.convert.side_by_side import lay_side_by_side
from lowbit.formats import building
from lowbit.formats.base import FormatError, layer_of, weight_of
from lowbit.formats.experts import Joined, Renamed, joined, moved
from lowbit.formats.folder import Folder
from lowbit.formats.gguf.file import GgufFile
from lowbit.layers.cache_scales import make_room
from lowbit.layers.frozen import show_frozen
from lowbit.numerics.settings import device_of
from lowbit.progress import progress
from lowbit.tensor.core.base import LowbitTensor


def tensors(
    path: str | os.PathLike[str], *, device: str | torch.device | None = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint's folder one after another: (name, low-bit or plain tensor).

    On the CPU plain tensors are views of the file. A tied weight that is stored under two names comes once, under the
    name of the embedding.

    Args:
        path: a folder that `load_pretrained` takes.
        device: where the tensors go; None: to the CPU.

    Raises FormatError as `load_pretrained` does.
    """
    return _tensors(opened(path), device_of("device", device))


def opened(path: str | os.PathLike[str]) -> Folder | GgufFile:
    """A checkpoint whose tensors are read one at a time. Raises FormatError as `load_pretrained` does."""
    return GgufFile(path) if Path(path).suffix == ".gguf" else Folder(path)


def _tensors(
    folder: Folder | Joined | GgufFile, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    with progress(f"reading {folder.path.name}", folder.nbytes) as advance:
        for item in folder.items():
            yield item.name, moved(item.value, device)
            advance(item.nbytes)


def load_pretrained(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    device: str | torch.device | None = "cpu",
) -> nn.Module:
    """A model with the low-bit weights of a folder, which run in lowbit's kernels.

        model = lowbit.load_pretrained("model-int4", device="cuda")     # a model of transformers, by its config.json
        lowbit.load_pretrained("model-int4", my_model)                  # any module with these names

    Args:
        path: a folder with config.json and *.safetensors, in one of `lowbit.formats.names()` or plain; or a GGUF file,
            model.gguf, of a Llama.
        model: the module to fill, in place, on any device or on meta; its parameters are replaced, so make the
            optimizer afterwards. None builds the model of transformers that config.json names, without memory for its
            weights.
        device: where the tensors go; None: to the CPU.

    Returns:
        The model; a model of transformers in evaluation mode.

    Raises FormatError for a path that is not a folder of a model; a missing or damaged shard, with the tensors whose
    bytes differ from those that `lowbit.export` wrote; a format that lowbit does not read or config.json does not name;
    names that do not fit the model, which is then as it was; shapes that do not fit; more layers in config.json than
    the folder has tensors for.
    """
    folder = opened(path)
    made = building.built(folder) if model is None else model
    _fill(made, folder, device_of("device", device))
    tell(made)
    if model is None:
        made.eval()
    return made


# ---- a module ------------------------------------------------------------------------------------------------------


def matched(
    model: nn.Module, folder: Folder | GgufFile, device: torch.device
) -> tuple[Folder | Joined | GgufFile, dict[str, Places]]:
    """The folder in the names of the model, and for each of its tensors the places that it fills. Stacks of experts
    are made on `device`.

    Raises FormatError for names that do not fit, as `load_pretrained` does.
    """
    check_module(model)
    if isinstance(folder, Folder):
        _make_room(model, folder)
    owners = _places(model)
    own: Folder | Joined | GgufFile = folder
    if isinstance(folder, Folder):
        folder.keep(owners)
        folder.leave_out(unused_by(model, folder.names(), owners))
        folder.leave_out(zeros_beside_codes(folder, owners, renamed_by(model)))
        for note in folder.left_out:
            warnings.warn(f"{folder.path}: {note}", stacklevel=4)
        own = joined(folder, owners.keys(), renamed_by(model), device)
    seconds = _second_places(own, owners)
    _check_names(model, own, owners, seconds)
    return own, {name: [*owners[name], *seconds.get(name, [])] for name in own.names()}


def _make_room(model: nn.Module, folder: Folder) -> None:
    """Give the attention layers of the model buffers for the scales of a KV cache that the folder has. Those for which
    the model has no layer are left out."""
    renamed = renamed_by(model)
    lost = [n for n in folder.cache_scales if not make_room(model, [n, *renamed(n)])]
    folder.leave_out_scales(lost)


def check_shape(folder: Path, name: str, t: Tensor, held: Tensor) -> None:
    """Raise FormatError if the tensor `t` of the folder has another shape than `held` of the model."""
    if held.shape != t.shape:
        raise FormatError(
            f"{folder}: {name} has the shape {tuple(t.shape)}, and the model takes {tuple(held.shape)}"
        )


def place_computed(model: nn.Module, folder: Path, device: torch.device) -> None:
    """Move what no checkpoint holds, such as frequencies of rotary embeddings. Raises FormatError for tensors that are
    left on meta."""
    for module in model.modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[attribute] = buffer.to(device)
        for parameter in module._parameters.values():
            if type(parameter) is nn.Parameter and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
    on_meta = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if on_meta:
        raise FormatError(f"{folder} leaves {', '.join(on_meta[:3])} of the model on meta")


def _fill(model: nn.Module, given: Folder | GgufFile, device: torch.device) -> None:
    """Replace the parameters and buffers of `model` by the tensors of the folder."""
    folder, filled = matched(model, given, device)
    for name, t in _tensors(folder, device):
        places = filled[name]
        module, attribute = places[0]
        old = getattr(module, attribute)
        check_shape(folder.path, name, t, old)
        is_low = isinstance(t, LowbitTensor)
        if isinstance(old, nn.Parameter):
            own = t if is_low else t.clone() if t.device.type == "cpu" else t
            trains = old.requires_grad and not is_low and own.is_floating_point()
            new = nn.Parameter(own, requires_grad=trains)
            for module, attribute in places:
                module.register_parameter(attribute, new)
        else:
            for module, attribute in places:
                module._buffers[attribute] = t.clone()
    show_frozen(model.modules())
    lay_side_by_side(model)
    watch_joined(model)
    place_computed(model, folder.path, device)


def unused_by(model: nn.Module, names: Iterable[str], wanted: Container[str]) -> list[str]:
    """The tensors with these names that the class of a model of transformers does not use, such as the layers for
    multi-token prediction of DeepSeek-V3. `wanted`: the names that the model has."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [n for n in names if n not in wanted and any(re.search(p, n) for p in ignored)]


def zeros_beside_codes(folder: Folder, wanted: Collection[str], renamed: Renamed) -> list[str]:
    """The tensors of zeros beside low-bit weights for which the model has no place among its names, `wanted`.

    AutoGPTQ and Neural Compressor store a bias of zeros for each layer that has none. Neural Compressor also stores a
    `scale_bf16_to_fp8`, which is 0 unless inputs are rounded to float8.
    """
    places = Joined(folder, wanted, renamed).places()
    return [
        name
        for name, (place, _) in places.items()
        if place not in wanted
        and name.endswith((".bias", ".scale_bf16_to_fp8"))
        and weight_of(layer_of(name)) in folder.weights
        and not folder.read(name).any()
    ]


def _makes(model: nn.Module, name: str, places: Places) -> bool:
    """True for a tensor that a class of transformers makes by itself where a folder lacks it."""
    module, attribute = places[0]
    saved = getattr(model, "_keys_to_ignore_on_save", None) or ()
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    makes = name in saved or any(re.search(pattern, name) for pattern in ignored)
    return makes and not getattr(module, attribute).is_meta


def renamed_by(model: nn.Module) -> Renamed:
    """The names that a class of transformers gives the tensors of published checkpoints, such as `layers.0.attn.wq_a`
    of DeepSeek-V4."""
    prefix = getattr(model, "base_model_prefix", "")

    @cache
    def rules() -> list[Any]:
        """Made for the first name that the model does not have: most folders have none."""
        if hasattr(model, "config") and prefix:
            with suppress(ImportError):
                from transformers.conversion_mapping import get_model_conversion_mapping
                from transformers.core_model_loading import WeightRenaming

                found = get_model_conversion_mapping(model, add_legacy=False)
                return [rule for rule in found if isinstance(rule, WeightRenaming)]
        return []

    def renamed(name: str) -> list[str]:
        for rule in rules():
            name, _ = rule.rename_source_key(name)
        return [name, joined_name(prefix, name)] if prefix else [name]

    return renamed


def names_in_model(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """For the names of a folder's weights those in the model that transformers makes of it, where they differ, as
    `vision_tower.…` of LLaVA does. Empty where transformers is not installed or cannot build the model.

    Args:
        config: config.json.
        names: of linears, `….weight`.
    """
    try:
        model = building.skeleton(config, len(names), "the folder")
    except (FormatError, ImportError):
        return {}
    renamed, own = renamed_by(model), {name for name, _ in model.named_parameters()}
    found = {n: next((o for o in renamed(n) if o in own), n) for n in names if n not in own}
    return {name: other for name, other in found.items() if other != name}


Places = list[tuple[nn.Module, str]]
"""Modules, and the attribute of each, that hold one tensor."""


def _places(model: nn.Module) -> dict[str, Places]:
    """For every name of the state dict, each module and attribute that holds that tensor."""
    by_id: dict[int, Places] = {}
    names: dict[str, int] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        held = {**module._parameters, **module._buffers}
        for attribute, t in held.items():
            if t is None or attribute in module._non_persistent_buffers_set:
                continue
            names[joined_name(prefix, attribute)] = id(t)
            places = by_id.setdefault(id(t), [])
            if not any(m is module and a == attribute for m, a in places):
                places.append((module, attribute))
    return {name: by_id[key] for name, key in names.items()}


def _second_places(
    folder: Folder | Joined | GgufFile, owners: dict[str, Places]
) -> dict[str, Places]:
    """For the first name of a tied weight that the folder stores twice, the places of the second names in a model that
    does not tie them."""
    tied = folder.tied if isinstance(folder, Folder | Joined) else {}
    found: dict[str, Places] = {}
    for second, first in tied.items():
        if second in owners and owners[second] is not owners.get(first):
            found.setdefault(first, []).extend(owners[second])
    return found


def _check_names(
    model: nn.Module,
    folder: Folder | Joined | GgufFile,
    owners: dict[str, Places],
    seconds: dict[str, Places],
) -> None:
    """Raise FormatError for names that the model lacks, tensors of the model for which the folder has no name, and two
    tensors for one that the model ties."""
    given = {*folder.names()}
    unknown = sorted(given - owners.keys())
    filled: dict[int, str] = {}
    for name, places in owners.items():
        if name in given and filled.setdefault(id(places), name) != name:
            raise FormatError(
                f"{folder.path} holds two different tensors, {filled[id(places)]} and {name}, and "
                f"{type(model).__name__} ties them to one; give a model= that does not tie them"
            )
    also = {id(place[0]) for places in seconds.values() for place in places}
    missing = sorted(
        name
        for name, places in owners.items()
        if id(places) not in filled
        and not all(id(place[0]) in also for place in places)
        and not _makes(model, name, places)
    )
    for what, names in (("holds", unknown), ("lacks", missing)):
        if names:
            raise FormatError(
                f"{folder.path} {what} {len(names)} tensors that {type(model).__name__} "
                f"{'lacks' if what == 'holds' else 'has'}, such as {', '.join(names[:3])}; give the model= whose names "
                "they are"
            )
