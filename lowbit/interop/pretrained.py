"""How lowbit describes models of transformers for saving, and reads them, without importing transformers.

- A flow that changes such a model in memory lets its config describe the low-bit weights
  (`lowbit.interop.hf.in_memory`), so that `from_pretrained` reads what `save_pretrained` writes. So does
  `load_state_dict(…, assign=True)`.
- transformers knows the format "lowbit" as soon as both packages are imported, in any order. Without that, transformers
  fills the weights of such a folder with random values, and only logs a warning.

`lowbit.hf` does the work. This module imports it at the first such model or folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.abc import MetaPathFinder
from typing import Any

from torch import nn

from lowbit import convert
from lowbit.layers import invariant
from lowbit.tensor.core import state_dict

METHOD = "lowbit"
_TABLE = "transformers.quantizers.auto"
"""The module with transformers' table of formats."""


def listen() -> None:
    """Follow the changes of every flow, and enter the format into transformers' table, now or at its import."""
    convert.followers.append(follow)
    state_dict.followers.append(follow_load)
    invariant.attention_setters.append(set_invariant_attention)
    if _TABLE in sys.modules:
        _enter()
    else:
        sys.meta_path.insert(0, _WhenImported())


def follow(model: nn.Module) -> None:
    """Let the configs of transformers' models in `model`, which has changed, describe the low-bit weights."""
    transformers = sys.modules.get("transformers.configuration_utils")
    known = getattr(transformers, "PreTrainedConfig", None)
    if known is None:
        return
    if any(isinstance(getattr(module, "config", None), known) for module in model.modules()):
        try:
            in_memory = importlib.import_module("lowbit.interop.hf.in_memory")
        except ImportError as error:
            # An old transformers can still compute with such weights.
            warnings.warn(
                f"from_pretrained will not find the low-bit weights of a folder that save_pretrained writes: {error}. "
                "lowbit.export writes one for other programs, lowbit.save the weights",
                stacklevel=1,
            )
            return
        in_memory.describe(model)


def follow_load() -> None:
    """`follow` the model that is being loaded, if one is: `load_state_dict(…, assign=True)` puts low-bit weights in the
    place of plain ones, and torch tells each module and not the model."""
    if "transformers.configuration_utils" not in sys.modules:
        return
    frame: Any = sys._getframe(1)
    model: Any = None
    while frame is not None:
        if frame.f_code is nn.Module.load_state_dict.__code__:
            model = frame.f_locals["self"]
        frame = frame.f_back
    if model is not None and _loaded not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(_loaded)


def _loaded(model: nn.Module, keys: Any) -> None:
    follow(model)


def set_invariant_attention(model: nn.Module) -> None:
    """Give models of transformers in `model` the attention of `lowbit.inference.invariant_`."""
    transformers = sys.modules.get("transformers.modeling_utils")
    known = getattr(transformers, "PreTrainedModel", None)
    if known is not None and any(isinstance(module, known) for module in model.modules()):
        importlib.import_module("lowbit.interop.hf.invariant").set_attention(model)


class Announced:
    """Stands in transformers' table for `lowbit.hf.LowbitConfig`, until the first folder asks for it."""

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """`LowbitConfig.from_dict`. `LowbitConfig` then takes the place of this class."""
        importlib.import_module("lowbit.interop.hf")
        return _configs()[METHOD].from_dict(*args, **kwargs)


def make_room() -> None:
    """Remove `Announced` from the table, so that `LowbitConfig` can enter itself under the same name."""
    if _configs().get(METHOD) is Announced:
        del _configs()[METHOD]


def _enter() -> None:
    _configs().setdefault(METHOD, Announced)


def _configs() -> dict[str, Any]:
    table = importlib.import_module(_TABLE)
    found: dict[str, Any] = getattr(table, "AUTO_QUANTIZATION_CONFIG_MAPPING", {})
    return found


class _WhenImported(MetaPathFinder):
    """Calls `_enter` after the import of the module with the table. A search for the module alone changes nothing."""

    def __init__(self) -> None:
        self._asks = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _TABLE or self._asks:
            return None
        self._asks = True  # the other finders
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def then_enter(module: Any) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _enter()

            loader.exec_module = then_enter
        return spec
