"""A model in memory as a source of `lowbit.export`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import identity
from lowbit.convert import Owner, find_owners, is_tuner
from lowbit.formats.base import Format, FormatError
from lowbit.formats.folder import copy_beside_weights, is_of_diffusers
from lowbit.formats.sources import Holder, Item
from lowbit.layers.cache_scales import held_in
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.trained.bitnet import BitNetTensor
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.trainable import TrainableTensor

_UNFINISHED = {FakeQuantizedTensor: "lowbit.qat.convert_", BitNetTensor: "lowbit.train.convert_"}
"""Weights that are still trained, and the function that turns each into the weight that products see."""


class ModelSource:
    """The state dict of a module, without second names of tied tensors, and its config.json (transformers, diffusers).

    Args:
        model: the module.
        tokenizer: an object with `save_pretrained`, a folder whose files are copied, or None.
        target: the format in which the values are stored.

    Attributes:
        tensors: by their first names, detached.
        is_shared: ranks share the weights, and each value is a collective of all of them.
        first: for every name of the state dict, the first name of the same tensor.

    Raises FormatError for weights that are sharded, on meta, or prepared for training and not converted, and for
    another tokenizer.
    """

    is_shared = False

    def __init__(
        self, model: nn.Module, tokenizer: Any = None, target: Format | None = None
    ) -> None:
        self.left_out = ()
        self._freezes = target is not None and not target.holds_training
        self.model = getattr(model, "_orig_mod", model)
        self.tokenizer = tokenizer
        is_folder = isinstance(tokenizer, str | PathLike) and Path(tokenizer).is_dir()
        if not (tokenizer is None or hasattr(tokenizer, "save_pretrained") or is_folder):
            raise FormatError(
                f"tokenizer is {tokenizer!r:.80}; accepted: an object with save_pretrained, or a folder that exists"
            )
        self.first = _first_names(self.model)
        state = self.model.state_dict(keep_vars=True)
        names = dict.fromkeys(self.first.values())
        self.tensors = {name: self.taken(name, state[name]) for name in names}
        self._cache_scales = held_in(self.model).keys()
        self.config = config_of(self.model)
        dtypes = [t.dtype for t in self.tensors.values() if t.is_floating_point()]
        if dtypes and not is_of_diffusers(self.config):
            most = max(dict.fromkeys(dtypes), key=dtypes.count)
            self.config.setdefault("dtype", str(most).removeprefix("torch."))
        if getattr(self.model, "config", None) is not None and "lm_head.weight" in self.tensors:
            self.config["tie_word_embeddings"] = False  # the tied head has no tensor of its own
        self.nbytes = sum(
            t.nbytes_stored() if isinstance(t, LowbitTensor) else t.nbytes
            for t in self.tensors.values()
        )

    def taken(self, name: str, value: Any) -> Tensor:
        """What `tensors` holds for an entry of the state dict. Raises FormatError for one that has no place there."""
        return _own(name, value)

    def value(self, name: str) -> Tensor:
        """The tensor of an item, made when its turn comes."""
        value = self.tensors[name]
        return value.frozen() if self._freezes and isinstance(value, TrainableTensor) else value

    def items(self) -> Iterator[Item]:
        for name in self.tensors:
            yield Item(name, self.value(name), self._holder(name))

    def names(self) -> list[str]:
        return [*self.tensors]

    def _holder(self, name: str) -> Holder:
        if name in self._cache_scales:
            return "cache"
        return holder_of(name, self._owners.get(name, ()), self.tensors[name].ndim)

    @functools.cached_property
    def _owners(self) -> dict[str, list[Owner]]:
        """What holds a parameter, by the first name of the parameter."""
        return {owners[0].fqn: owners for owners in find_owners(self.model).values()}

    def linears(self) -> set[str]:
        """The names of all nn.Linear, even if their weight has the name of another module that shares it."""
        return {name for name, m in self.model.named_modules() if isinstance(m, nn.Linear)}

    def copy_files(self, folder: Path) -> None:
        """Write the tokenizer, and the generation_config.json of the model if it has one."""
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(folder)
        elif self.tokenizer is not None:
            copy_beside_weights(Path(self.tokenizer), folder)
        generation: Any = getattr(self.model, "generation_config", None)
        if hasattr(generation, "to_json_string"):
            text = generation.to_json_string()
            (folder / "generation_config.json").write_text(text, encoding="utf-8")


_UNMERGED = (
    "and loaders of a folder have other names for them: export what merge_and_unload() or unload() gives; "
    "save_pretrained of the PeftModel writes the adapters"
)


def refuse_adapters(model: nn.Module, why: str = _UNMERGED) -> None:
    """Raise FormatError for a model with adapters of PEFT. `why`: the end of the message."""
    if adapted := [name for name, module in model.named_modules() if is_tuner(module)]:
        others = f"{adapted[0]} and {len(adapted) - 1} other layers"
        raise FormatError(f"{others} have adapters of PEFT, {why}")


def holder_of(name: str, owners: Sequence[Owner], ndim: int) -> Holder:
    """The kind of module that holds a weight of `ndim` dimensions. An embedding comes before a linear that shares its
    weight."""
    modules = [owner.module for owner in owners]
    if any(isinstance(m, nn.Embedding) for m in modules):
        return "embedding"
    if name.rpartition(".")[2] != "weight" or not modules:
        return "other"
    if all(isinstance(m, nn.Linear) for m in modules):
        return "linear"
    is_custom = any(type(m).__module__.startswith("transformers.") for m in modules)
    return "custom" if is_custom and ndim == 2 else "other"


def _first_names(model: nn.Module) -> dict[str, str]:
    """For every name of the state dict, the first name of the same tensor."""
    seen: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        own = held_locally(value)
        key = identity(own) if isinstance(own, Tensor) and not own.is_meta else id(own)
        found[name] = seen.setdefault(key, name)
    return found


def check_stored(name: str, value: Any) -> None:
    """Raise FormatError for an entry of the state dict that is not a tensor with values."""
    if not isinstance(value, Tensor):
        raise FormatError(
            f"{name} of the state dict is a {type(value).__name__}; a folder of safetensors holds tensors only"
        )
    if value.is_meta:
        raise FormatError(
            f"{name} is on the meta device and has no values: load them first; accelerate.hooks."
            "remove_hook_from_module(model, recurse=True) loads those that accelerate offloads"
        )


def _own(name: str, value: Any) -> Tensor:
    check_stored(name, value)
    if is_dtensor(value):
        raise FormatError(
            f"{name} is sharded over ranks: gather the model's weights first, or call lowbit.sync.write on all ranks"
        )
    for kind, remedy in _UNFINISHED.items():
        if isinstance(value, kind):
            raise FormatError(
                f"{name} is a {type(value).__name__}, still in training; {remedy}(model) makes the weight that it "
                "computes with"
            )
    if not isinstance(value, LowbitTensor):
        return value.detach()
    with torch.no_grad():
        plain = value.updated_in_place()
    return value.detach() if plain is None else plain.detach()


def config_of(model: nn.Module) -> dict[str, Any]:
    """The config.json of a model of transformers or diffusers; {} for any other module."""
    config: Any = getattr(model, "config", None)
    # A model of diffusers writes its config itself.
    writer: Any = config if hasattr(config, "to_json_string") else model
    if not hasattr(writer, "to_json_string"):
        return {}
    found: dict[str, Any] = json.loads(writer.to_json_string())
    found.pop("quantization_config", None)
    return found if is_of_diffusers(found) else {**found, "architectures": [type(model).__name__]}
