"""Builds the model of transformers that a config.json names, without memory for weights and no larger than its folder.

A config.json may come from a stranger: building 10⁹ layers would never end. The headers give the number of tensors,
so `check_config` compares counts of layers with it before the model is built, and building ends with an error when it
has made more parameters than the folder can fill.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowbit import optional
from lowbit.formats.base import FormatError, brief, damage_of
from lowbit.formats.folder import Folder
from lowbit.formats.gguf.file import GgufFile

SPARE = 1000
"""Layers and parameters that a model may have beyond the number of tensors in its folder: a default of a config such as
28 `max_window_layers`, tied weights, and parameters that the folder lacks, which another message then names."""
MOST_LABELS = 10**6
MOST_CONSTANT = 2**30
"""Bytes of a tensor that a model makes by itself, such as frequencies of rotary embeddings."""
_OF_LAYERS = ("layer", "block", "depth", "stage")
"""Words that names of counts of layers contain."""
_OF_SIZES = ("size", "channel")
"""Words that mark other names, such as the `vocab_size_per_layer_input` of Gemma 3n."""
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""What transformers writes as {"__float__": "Infinity"}, such as the `time_step_limit` of Mamba 2."""
_MAKERS = (torch.arange, torch.zeros, torch.ones, torch.full, torch.linspace, torch.eye)


def check_config(config: Mapping[str, Any], tensors: int = 0) -> None:
    """Raise FormatError if config.json counts more layers or labels than a model of so many tensors has, or names code
    of the Hub that transformers would run."""
    for key, value in _values(config):
        is_count = not any(part in key for part in _OF_SIZES)
        is_of_layers = is_count and any(part in key for part in _OF_LAYERS)
        most = tensors + SPARE if is_of_layers else MOST_LABELS if "label" in key else None
        if most is not None and isinstance(value, int) and value > most:
            known = f", for {tensors} tensors" if tensors else ""
            raise FormatError(f"config.json has {key} {value:.6g}; accepted: up to {most}{known}")
        if "attn_implementation" in key and "/" in str(value):
            raise FormatError(
                f"config.json has {key} {value!r:.80}, code that lowbit does not load; accepted: a name of transformers"
            )


def _values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _values(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, key)
    else:
        yield key, value


def _with_floats(value: Any) -> Any:
    """A value of config.json with the floats that JSON does not have."""
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and isinstance(tag := value["__float__"], str):
        return _FLOATS.get(tag, value)
    return {key: _with_floats(one) for key, one in value.items()}


class EmptyOnMeta(TorchFunctionMode):
    """Makes uninitialised tensors on meta. Parameters of layers begin as such tensors. All other tensors, such as
    buffers with the frequencies of rotary embeddings, keep their values.

    Raises FormatError beyond `most` uninitialised tensors, and for a constant of absurd size.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._made = most, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
            self._made += 1
            if self._made > self._most:
                raise FormatError(f"config.json describes more than {self._most} parameters")
        elif func in _MAKERS:
            nbytes = func(*args, **{**kwargs, "device": "meta"}).nbytes
            if nbytes > MOST_CONSTANT:
                raise FormatError(
                    f"config.json describes a constant of {nbytes} bytes; accepted: {MOST_CONSTANT}"
                )
        return func(*args, **kwargs)


def built(folder: Folder | GgufFile) -> nn.Module:
    """The model of transformers that config.json names, with parameters on meta.

    Raises FormatError if config.json names no architecture, or transformers lacks or cannot build it.
    """
    model = skeleton(folder.config, len(folder.names()), f"{folder.path}")
    _compute(model, {*folder.names()}, getattr(folder, "dtype", None))
    if (folder.path / "generation_config.json").is_file():
        transformers: Any = importlib.import_module("transformers")
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder.path)
        except Exception as error:  # wrong fields may raise any error
            raise FormatError(
                f"{folder.path}: transformers does not read generation_config.json ({brief(error)})"
            ) from error
    return model


def skeleton(settings: Mapping[str, Any], count: int, path: str) -> nn.Module:
    """The model of transformers that a config.json names, without values.

    Args:
        settings: config.json.
        count: of the tensors that the model gets.
        path: of the folder, for messages.

    Raises FormatError as `built` does.
    """
    names = settings.get("architectures")
    if not isinstance(names, list) or not names:
        raise FormatError(
            f"{path}: config.json names no architecture of transformers, which would build the model; in Python "
            "give the module to fill, model="
        )
    with damage_of(path):
        check_config(settings, count)
    transformers = optional.imported(
        "transformers",
        f"{path} is a {names[0]}: give the module to fill, model=, or install what it needs,",
        "hf",
        FormatError,
    )
    kind = getattr(transformers, str(names[0]), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise FormatError(
            f"{path}: transformers {transformers.__version__} has no {names[0]:.80}; give model="
        )
    architecture: Any = kind
    try:
        config = architecture.config_class.from_dict(_with_floats(settings))
        with EmptyOnMeta(2 * count + SPARE):
            model: nn.Module = architecture(config)
    except FormatError as error:
        raise FormatError(f"{path}: {error}, for {count} tensors in the folder") from error
    except Exception as error:  # wrong fields may raise any error
        raise FormatError(
            f"{path}: transformers cannot build the {names[0]} of config.json ({brief(error)}); give model="
        ) from error
    return model


def _compute(model: Any, stored: set[str], dtype: torch.dtype | None) -> None:
    """Make the parameters that transformers never stores and computes at each load, such as the sinusoidal positions
    of Marian. `dtype`: of the weights; None: float32."""
    for name in {*(model._keys_to_ignore_on_save or ())} - stored:
        layer, _, attribute = name.rpartition(".")
        module = model.get_submodule(layer)
        if attribute in module._parameters and module._parameters[attribute].is_meta:
            module.to_empty(device="cpu").to(dtype)
            model._init_weights(module)
