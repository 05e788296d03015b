"""A tied weight that a folder stores twice: an output head beside the embedding.

config.json says `"tie_word_embeddings": true`, and the shards hold both `model.embed_tokens.weight` and
`lm_head.weight`. transformers compares the two, ties equal tensors, and keeps both if they differ. So does a `Folder`:
equal tensors are one weight, with the name of the embedding. If they differ, the config of the `Folder` no longer ties
them, so that every reader keeps both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.base import layer_of
from lowbit.formats.layer_names import is_embedding, is_head
from lowbit.tensor.core.base import LowbitTensor

KEY = "tie_word_embeddings"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Further names of the `shared.weight` of T5, BART and their like."""


def places_of(config: Mapping[str, Any]) -> list[Any]:
    """The parts of a config.json with settings of weights: the whole, and the config of its language model."""
    return [place for place in (config, config.get("text_config")) if isinstance(place, Mapping)]


def is_tied(config: Mapping[str, Any]) -> bool:
    """True if a model with this config.json may tie its output head to its embedding.

    Files of older releases leave the key out if it has the default of the architecture. Then the tensors decide, except
    for a model with code of its own.
    """
    named = [bool(place[KEY]) for place in places_of(config) if KEY in place]
    return any(named) if named else "auto_map" not in config


def second_names(
    config: dict[str, Any], names: Collection[str], read: Callable[[str], Tensor]
) -> dict[str, str]:
    """For each name of `names` that is a second name of a tied weight, the first name.

    Changes `config` to say what the tensors show: tied if the two are equal, not tied if they differ. `read`: the
    tensor of a name, low-bit or plain, as a view of the file.
    """
    if not is_tied(config):
        return {}
    own = [name for name in names if name.endswith("weight")]
    heads = [name for name in own if is_head(layer_of(name))]
    embeddings = sorted((n for n in own if is_embedding(layer_of(n))), key=lambda n: (len(n), n))
    shared = [name for name in embeddings if layer_of(name).rpartition(".")[2] == "shared"]
    copies = [name for name in embeddings if shared and name.endswith(_COPIES)]
    if not embeddings or not (heads or copies):
        return {}
    values = {name: read(name) for name in (*heads, *embeddings)}
    found: dict[str, str] = {}
    for second in (*copies, *heads):
        alike = [
            n for n in embeddings if n not in copies and values[n].shape == values[second].shape
        ]
        first = next((n for n in alike if _is_equal(values[n], values[second])), None)
        if first is not None:
            found[second] = first
        if alike and second in heads:
            _say(config, first is not None)
    return found


def _say(config: dict[str, Any], tied: bool) -> None:
    """Set the key to `tied` in every part of config.json that has it; if none has it, in the first."""
    places = places_of(config)
    for place in [p for p in places if KEY in p] or places[:1]:
        place[KEY] = tied


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """True if both have equal values and, in low bits, are stored alike."""
    if isinstance(a, LowbitTensor) or isinstance(b, LowbitTensor):
        return type(a) is type(b) and a.dtype is b.dtype and torch.equal(a, b)
    if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
        return False
    step = max(1, 2**22 // max(1, a[0].numel() if len(a) else 1))
    wide = torch.promote_types(a.dtype, b.dtype)
    pairs = zip(a.split(step), b.split(step), strict=True)
    return all(torch.equal(x.to(wide), y.to(wide)) for x, y in pairs)
