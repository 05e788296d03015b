"""How lowbit describes models of transformers and diffusers for saving, and reads them, without importing either.

- A flow that changes such a model in memory lets its config describe the low-bit weights
  (`lowbit.interop.hf.in_memory`), so that `from_pretrained` reads what `save_pretrained` writes. So does
  `load_state_dict(…, assign=True)`. If a flow gets a part of a model, or a program sets a weight, the model is found
  when its state dict is made.
- transformers knows the format "lowbit" as soon as both packages are imported, in any order. Without that, transformers
  fills the weights of such a folder with random values, and only logs a warning. So does diffusers.

`lowbit.hf` and `lowbit.interop.diffusers` do the work. This module imports them at the first such model or folder.
"""

from __future__ import annotations

import importlib
import sys
import traceback
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from lowbit import convert
from lowbit.layers import invariant
from lowbit.tensor.core import state_dict
from lowbit_kernels.runtime.when_imported import when_imported

METHOD = "lowbit"
_TABLE = "transformers.quantizers.auto"
"""The module with transformers' table of formats."""
_TABLES = (_TABLE, "diffusers.quantizers.auto")
_TRANSFORMERS = "transformers.modeling_utils", "PreTrainedModel"
_DIFFUSERS = "diffusers.models.modeling_utils", "ModelMixin"
_STATE_DICT = nn.Module.state_dict.__code__


def listen() -> None:
    """Follow the changes of every flow, and enter the format into both tables, now or at their import."""
    for followers in (convert.followers, state_dict.followers):
        followers.append(follow)
    state_dict.readers.append(follow_save)
    invariant.attention_setters.append(set_invariant_attention)
    for table in _TABLES:
        when_imported(table, _enter)


def follow(model: nn.Module) -> None:
    """Let the configs of models of transformers and diffusers in `model`, which has changed, describe the low-bit
    weights."""
    for name in _describers(model):
        try:
            describer = importlib.import_module(name)
        except ImportError as error:
            # An old transformers can still compute with such weights.
            warnings.warn(
                f"from_pretrained will not find the low-bit weights of a folder that save_pretrained writes: {error}. "
                "lowbit.export writes one for other programs, lowbit.save the weights",
                stacklevel=1,
            )
            return
        describer.describe(model)


def _describers(model: nn.Module) -> Iterator[str]:
    """The modules of lowbit whose `describe` takes `model`, or of which a part of a model needs the import."""
    config = _loaded_class("transformers.configuration_utils", "PreTrainedConfig")
    if config and any(isinstance(getattr(m, "config", None), config) for m in model.modules()):
        yield "lowbit.interop.hf.in_memory"
    mixin = _loaded_class(*_DIFFUSERS)
    if mixin and any(isinstance(m, mixin) for m in model.modules()):
        yield "lowbit.interop.diffusers"


def _loaded_class(module: str, name: str) -> Any:
    """A class of a module that is imported already, or None."""
    return getattr(sys.modules.get(module), name, None)


def follow_save() -> None:
    """`follow` the model whose state dict is being made, unless its config describes it: a flow got only a part of the
    model, or a weight was set by hand. `save_pretrained` has written the config before, so write it again."""
    kinds = tuple(filter(None, (_loaded_class(*_TRANSFORMERS), _loaded_class(*_DIFFUSERS))))
    found: list[Any] = []
    saved: dict[str, Any] = {}
    for frame, _ in traceback.walk_stack(sys._getframe(1)) if kinds else ():
        is_saver = frame.f_code.co_name == "save_pretrained"
        names = frame.f_locals if is_saver or frame.f_code is _STATE_DICT else {}
        if isinstance(names.get("self"), kinds):
            found.append(names["self"])
            # not those of a subclass's method that calls the method of transformers or diffusers
            if {"save_directory", "is_main_process"} <= names.keys():
                saved = names
    if not found:
        return
    model = found[-1]
    held = getattr(model.config, "quantization_config", None)
    if held is not None and getattr(held, "model", model) is model:
        return
    follow(model)
    is_saved = bool(saved) and saved["self"] is model
    if is_saved and saved.get("save_on_this_rank", saved["is_main_process"]):
        write = getattr(model.config, "save_pretrained", None) or model.save_config
        write(saved["save_directory"])


def set_invariant_attention(model: nn.Module) -> None:
    """Give models of transformers in `model` the attention of `lowbit.inference.invariant_`."""
    known = _loaded_class(*_TRANSFORMERS)
    if known is not None and any(isinstance(module, known) for module in model.modules()):
        importlib.import_module("lowbit.interop.hf.invariant").set_attention(model)


class Announced:
    """Stands in the tables of formats for `lowbit.hf.LowbitConfig`, until the first folder asks for it."""

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """`LowbitConfig.from_dict`. `LowbitConfig` then takes the place of this class in transformers' table."""
        importlib.import_module("lowbit.interop.hf")
        return _configs(_TABLE)[METHOD].from_dict(*args, **kwargs)


def make_room() -> None:
    """Remove `Announced` from transformers' table, so that `LowbitConfig` can enter itself under the same name."""
    if _configs(_TABLE).get(METHOD) is Announced:
        del _configs(_TABLE)[METHOD]


def _enter(table: ModuleType) -> None:
    _configs(table.__name__).setdefault(METHOD, Announced)
    if table.__name__ != _TABLE:
        table.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, _diffusers_quantizer)


def _diffusers_quantizer(config: Any, **kwargs: Any) -> Any:
    """`LowbitDiffusersQuantizer`, imported at the first folder."""
    own = importlib.import_module("lowbit.interop.diffusers")
    return own.LowbitDiffusersQuantizer(config, **kwargs)


def _configs(table: str) -> dict[str, Any]:
    module = importlib.import_module(table)
    found: dict[str, Any] = getattr(module, "AUTO_QUANTIZATION_CONFIG_MAPPING", {})
    return found
