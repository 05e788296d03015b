"""The entry "quantization_config" of a model of transformers or diffusers whose weights became low-bit in memory.

transformers writes two things: the model's state dict, which holds the parts of each low-bit weight, and its config.
Without a description of the parts `from_pretrained` would fill those weights with random values. `describe` puts an
`InMemory` into the config. `InMemory` describes the weights when a function writes config.json:
`save_pretrained`, the Trainer's `save_model`, or `config.save_pretrained` beside accelerate's `save_model`. Weights
that are trained in high precision have no parts: transformers writes their values, which need no description.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lowbit.formats.base import FormatError
from lowbit.formats.registry import by_name
from lowbit.interop.hf import experts as experts  # registers what stock experts need
from lowbit.interop.hf.config import METHOD, LowbitConfig, Method
from lowbit.interop.hf.quantizer import LowbitQuantizer, check_saved_name
from lowbit.layers.cache_scales import held_in, settings_for
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.core.parts import split


class InMemory(LowbitConfig):
    """Describes the low-bit weights of the model that is being saved; otherwise those of `model`.

    Args:
        model: the model with this config. None: the config alone was copied.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.quant_method = Method.LOWBIT
        self.scheme, self.scales, self.experts = {}, "minmax", True
        self._model = None if model is None else weakref.ref(model)

    @property
    def model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    @property
    def stored(self) -> dict[str, Any] | None:  # type: ignore[override]
        saved = _being_saved()
        model = self.model if saved is None else saved
        if model is None:
            return None
        weights = dict(in_parts(model, saved is not None))
        own = by_name(METHOD).config(weights, ()) if weights else None
        return own and own | settings_for(held_in(model))

    def to_dict(self) -> Any:
        """The entry of config.json; None if all weights are plain."""
        return self.stored

    def get(self, key: str, default: Any = None) -> Any:
        """transformers reads the config that `from_pretrained` gets like a dict."""
        return (self.stored or {}).get(key, default)

    def __bool__(self) -> bool:
        return self.stored is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> InMemory:
        """A copy of the model gets its own `InMemory`. A copy of the config alone describes nothing."""
        model = self.model
        return InMemory(None if model is None else memo.get(id(model)))

    def __reduce__(self) -> Any:
        return InMemory, ()


def describe(model: nn.Module) -> None:
    """Let the config of `model` describe its low-bit weights. If the model has none, remove the description.

    Args:
        model: a model of transformers, or a module that holds such models. A part of a model is described once the
            state dict of the model is made (`lowbit.interop.pretrained.follow_save`).
    """
    for top in models_in(model, PreTrainedModel):
        has_parts = any(in_parts(top, False))
        _attach(top.config, top, has_parts)
        if not has_parts:
            _convert_names_again(top)
            quantizer = getattr(top, "hf_quantizer", None)
            if isinstance(quantizer, LowbitQuantizer):
                quantizer.remove_quantization_config(top)


def models_in(model: nn.Module, kind: type) -> Iterator[Any]:
    """The modules of this class in `model` that lie in no other one."""
    if isinstance(model, kind):
        yield model
        return
    for child in model.children():
        yield from models_in(child, kind)


def _attach(config: PreTrainedConfig, model: PreTrainedModel, has_parts: bool) -> None:
    held = getattr(config, "quantization_config", None)
    own = held if isinstance(held, InMemory) else None
    if has_parts and (held is None or (own is not None and own.model is not model)):
        config.quantization_config = InMemory(model)
    elif not has_parts and own is not None and own.model in [*model.modules()]:
        del config.quantization_config


def in_parts(model: nn.Module, is_saved: bool) -> Iterator[tuple[str, LowbitTensor]]:
    """The weights whose parts the state dict holds, by name and in their whole shape; a tied weight once.

    Raises FormatError for a model that is being saved, with weights that no reader would find.
    """
    for name, param in model.named_parameters():
        own = local(param)
        if not isinstance(own, LowbitTensor) or own.updated_in_place() is not None:
            continue
        if is_saved:
            check_saved_name(name)
        if is_saved and split(param) is None:
            raise FormatError(
                f"{name} is a {type(own).__name__} whose parts alone do not describe it, as of a flattened view or of "
                "shards that share scales: write the folder by lowbit.export(model, folder, format='lowbit')"
            )
        yield name, own._with(shape=tuple(param.shape))


def _being_saved() -> nn.Module | None:
    """The model, of transformers or diffusers, whose `save_pretrained` is running.

    transformers does not tell a config which model it is written for. Models that share a config, such as a decoder and
    the language model around it, name their weights differently.
    """
    mixin = getattr(
        sys.modules.get("diffusers.models.modeling_utils"), "ModelMixin", PreTrainedModel
    )
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        is_saver = frame.f_code.co_name == "save_pretrained"
        owner = frame.f_locals.get("self") if is_saver else None
        if isinstance(owner, (PreTrainedModel, mixin)):
            if frame.f_locals.get("state_dict") is None:
                _check_values(owner)
            if isinstance(owner, PreTrainedModel) and any(in_parts(owner, False)):
                _keep_names(owner)
            return owner
    return None


def _check_values(model: nn.Module) -> None:
    """Raise FormatError for a low-bit weight without values, whose model is being saved by its own state dict."""
    for name, param in model.named_parameters():
        if param.is_meta and isinstance(local(param), LowbitTensor):
            raise FormatError(
                f"{name} is on meta, as accelerate leaves weights that it offloads: call accelerate.hooks."
                "remove_hook_from_module(model, recurse=True) first, or give save_pretrained of transformers "
                "state_dict=accelerate.utils.modeling.get_state_dict_offloaded_model(model)"
            )


_CONVERSIONS = "_conversions_of_plain_weights"


def _keep_names(model: Any) -> None:
    """Let transformers write the names that the model has. Its conversions to the names of published checkpoints, which
    also split experts, take plain weights only."""
    if _CONVERSIONS not in model.__dict__:
        setattr(model, _CONVERSIONS, getattr(model, "_weight_conversions", None))
        model._weight_conversions = []


def _convert_names_again(model: Any) -> None:
    """Undo `_keep_names`, since all weights are plain again."""
    if _CONVERSIONS in model.__dict__:
        model._weight_conversions = model.__dict__.pop(_CONVERSIONS)
