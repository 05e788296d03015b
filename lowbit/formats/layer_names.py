"""What the names of modules say: which are embeddings, output heads and routers, and which of them a pattern takes.

A bare scheme and the pattern "*" mean the linears of the blocks: they leave embeddings, the output head and routers
alone. Any other pattern takes the embeddings and the head that it matches. Only a pattern that names a router outright,
such as "*.mlp.gate", takes it. "model.layers.*" does not mean the router, whose errors change which experts run.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from lowbit.convert import matches, patterns

_EMBEDDINGS = {"wte", "wpe", "shared", "word_embeddings", "position_embeddings"}
_HEADS = {"lm_head", "embed_out", "output", "score", "classifier"}
_ROUTERS = {"gate", "router", "shared_expert_gate"}
_CACHED = {f"{which}_{part}" for which in "qkv" for part in ("scale", "zero_point", "global_scale")}
_CACHED |= {"kv_scale", "prob_scale"}

TRANSPOSED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
"""Models whose linears are Conv1D, which store [K, N], so that groups would run along the outputs."""


def is_embedding(layer: str) -> bool:
    """Whether a module of this name is an embedding, by the names that published models give them."""
    last = layer.rpartition(".")[2]
    return ("embed" in last and last != "embed_out") or last in _EMBEDDINGS


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of the keys and values that a cache holds, or of the queries beside them, as
    llm-compressor, AutoFP8 and ModelOpt name them: `….self_attn.k_scale`, `….k_proj.k_scale`."""
    layer, _, last = name.rpartition(".")
    module = layer.rpartition(".")[2]
    return last in _CACHED and ("attn" in module or "attention" in module or module[1:] == "_proj")


def is_head(layer: str) -> bool:
    """Whether it computes the logits."""
    return layer.rpartition(".")[2] in _HEADS and layer.count(".") <= 1


def is_router(layer: str) -> bool:
    """Whether it chooses experts."""
    return layer.rpartition(".")[2] in _ROUTERS


def begins_with(expression: str, layer: str) -> bool:
    """Whether a regular expression of a folder's config.json matches the beginning of a name.

    Raises `lowbit.convert.patterns.PatternError`, a ValueError, for one that may take for ever.
    """
    return patterns.matches(expression, layer)


def is_listed(layer: str, entries: Any) -> bool:
    """Whether a list of modules that stay plain has this one: by "re:" and an expression, by a pattern with "*", or by
    a part of its name, as programs read such lists."""
    if not isinstance(entries, list | tuple | None):
        raise TypeError(f"{entries!r:.60} is no list of modules")
    return any(
        begins_with(entry[3:], layer)
        if entry.startswith("re:")
        else entry in layer or fnmatchcase(layer, f"{entry}*")
        for entry in entries or ()
    )


def settings_of(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The settings of a layer in a folder of GPTQModel: those of the first expression of "dynamic" that its name begins
    with, over those of all."""
    dynamic = config.get("dynamic")
    for pattern, changes in (dynamic if isinstance(dynamic, Mapping) else {}).items():
        if begins_with(pattern.removeprefix("+:"), layer) and isinstance(changes, Mapping):
            return {**config, **changes}
    return config


def left_out_by(config: Mapping[str, Any], layer: str) -> bool:
    """Whether "dynamic" has an expression of layers that stay plain, "-:…", for this one."""
    dynamic = config.get("dynamic")
    without = [p[2:] for p in dynamic if p[:2] == "-:"] if isinstance(dynamic, Mapping) else []
    return any(begins_with(pattern, layer) for pattern in without)


def names_outright(pattern: str, layer: str) -> bool:
    """Whether a pattern that matches `layer`, or its weight, names this module: it matches no longer name."""
    longer = f"{layer}_"
    return not (matches(pattern, longer) or matches(pattern, f"{longer}.weight"))


def why_left_alone(
    layer: str, pattern: str | None, embedding: bool = False, head: bool = False
) -> str | None:
    """Why the pattern that matches `layer`, or its weight, does not take it; None where it does.

    Args:
        pattern: None where no pattern matches. Then the answer is that for "*".
        embedding: whether the module is an embedding, beyond what its name says; `head` likewise.
    """
    everything = pattern is None or pattern == "*"
    if is_router(layer) and (everything or not names_outright(pattern or "*", layer)):
        kind = "a router"
    elif everything and (embedding or is_embedding(layer)):
        kind = "an embedding"
    elif everything and (head or is_head(layer)):
        kind = "the output head"
    else:
        return None
    return f"{kind}: a pattern that names it quantizes it"
