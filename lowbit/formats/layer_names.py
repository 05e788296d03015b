"""The names of modules: which are embeddings, output heads and routers, and which of them a pattern takes.

A bare scheme and the pattern "*" mean the linears of the blocks: they leave embeddings, the output head and routers
alone. Any other pattern takes the embeddings and the head that it matches. Only a pattern that names a router outright,
such as "*.mlp.gate", takes the router. "model.layers.*" does not: errors of a router change which experts run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from lowbit.convert import NAMED, names_outright, patterns

_EMBEDDINGS = {"wte", "wpe", "shared", "relative_attention_bias", "codebook", "pe_k"}
_EMBEDDINGS |= {"query_feat", "queries_features"}
"""Names of tables without the word "embed"; others end like these:"""
_ENDS_OF_EMBEDDINGS = ("_emb", "_token", "_tokens")
_LINEARS_OF_EMBEDDINGS = ("project", "proj_layer", "mapping", "transformation", "dense")
"""Parts of the names of linears behind an embedding, such as the `embedding_hidden_mapping_in` of ALBERT."""
_HEADS = {
    *("lm_head", "embed_out", "output", "score", "classifier", "lm_loss", "vocab_projector"),
    *("generator_lm_head", "output_projection"),
}
_OUTERMOST_HEADS = {"head", "decoder"}
_NESTED_HEADS = ("predictions.decoder", "lm_head.decoder", "lm_head.out_proj", "pred_layer.proj")
"""The ends of the names of heads in a module of their own: BERT's, RoBERTa's, T5Gemma's, XLM's."""
_CACHED = {f"{which}_{part}" for which in "qkv" for part in ("scale", "zero_point", "global_scale")}
_CACHED |= {"kv_scale", "prob_scale"}

TRANSPOSED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
"""Models whose linears are Conv1D. These store [K, N], so groups would run along the outputs."""

_FLOAT32 = dict.fromkeys(("t5", "mt5", "umt5", "udop", "pop2piano"), "wo") | {"blip-2": "qformer"}
"""The modules with linears that transformers keeps in float32 in models of a type (`_keep_in_fp32_modules`)."""


def is_embedding(layer: str) -> bool:
    """True if a module of this name is an embedding in published models, also one of a list of them."""
    last = layer.rstrip(".0123456789").rpartition(".")[2].lower()
    if "embed" in last and last != "embed_out":
        return not any(part in last for part in _LINEARS_OF_EMBEDDINGS)
    return last in _EMBEDDINGS or last.endswith(_ENDS_OF_EMBEDDINGS)


def is_kept_in_float32(config: Mapping[str, Any], layer: str) -> bool:
    """True for a layer that transformers keeps in float32 in a model of this config.json, as the `wo` of T5."""
    return _FLOAT32.get(str(config.get("model_type"))) in layer.split(".")


def is_cache_scale(name: str) -> bool:
    """True for a scale of the keys and values of a cache, or of the queries beside them, as llm-compressor, AutoFP8 and
    ModelOpt name it: `….self_attn.k_scale`, `….k_proj.k_scale`."""
    layer, _, last = name.rpartition(".")
    module = layer.rpartition(".")[2]
    return last in _CACHED and ("attn" in module or "attention" in module or module[1:] == "_proj")


def is_head(layer: str) -> bool:
    """True if the layer computes the logits."""
    is_outer = layer.rpartition(".")[2] in _HEADS and layer.count(".") <= 1
    return is_outer or layer in _OUTERMOST_HEADS or _is_nested_head(layer)


def _is_nested_head(layer: str) -> bool:
    return any(f".{layer}".endswith(f".{head}") for head in _NESTED_HEADS)


def heads_without_weights(config: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Names that the head of a model may have whose folder lacks its weight, which is tied to an embedding: "lm_head",
    what the tensors beside a head show, and what encoder-decoders have.

    Args:
        config: config.json.
        names: of the tensors.
    """
    found = {"lm_head"}
    if config.get("is_encoder_decoder"):
        found |= {"proj_out", "lm_head.out_proj", "decoder.lm_head", "decoder.output_projection"}
    if config.get("model_type") in ("biogpt", "trocr"):
        found.add("output_projection")
    for layer in {name.rpartition(".")[0] for name in names}:
        if is_head(layer):
            found.add(layer)
        path = layer.split(".")
        parents = (".".join(path[:end]) for end in range(1, len(path)))
        found |= {f"{p}.decoder" for p in parents if _is_nested_head(f"{p}.decoder")}
    return found


def is_listed(layer: str, entries: Any) -> bool:
    """True if a list of modules that stay plain has `layer`: by "re:" and an expression, by a pattern with "*", or by a
    part of its name, as other programs read such lists."""
    if not isinstance(entries, list | tuple | None):
        raise TypeError(f"{entries!r:.60} is not a list of modules")
    return any(
        patterns.matches(entry[3:], layer)
        if entry.startswith("re:")
        else entry in layer or fnmatchcase(layer, f"{entry}*")
        for entry in entries or ()
    )


def settings_of(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The settings of a layer in a folder of GPTQModel: those of all layers, changed by the first expression of
    "dynamic" that matches the beginning of the name."""
    dynamic = config.get("dynamic")
    for pattern, changes in (dynamic if isinstance(dynamic, Mapping) else {}).items():
        if patterns.matches(pattern.removeprefix("+:"), layer) and isinstance(changes, Mapping):
            return {**config, **changes}
    return config


def left_out_by(config: Mapping[str, Any], layer: str) -> bool:
    """True if "dynamic" has an expression of layers that stay plain, "-:…", for `layer`."""
    dynamic = config.get("dynamic")
    without = [p[2:] for p in dynamic if p[:2] == "-:"] if isinstance(dynamic, Mapping) else []
    return any(patterns.matches(pattern, layer) for pattern in without)


def why_left_alone(
    layer: str,
    pattern: str | None,
    *,
    embedding: bool = False,
    head: bool = False,
    router: bool = False,
) -> str | None:
    """Why the pattern that matches `layer`, or its weight, does not take the layer; None: it does.

    Args:
        layer: the name of the module.
        pattern: None if no pattern matches. Then the answer is that for "*".
        embedding, head: True if the module is one, even if its name does not say so.
        router: True if the module is one (`lowbit.convert.routers_among`).
    """
    everything = pattern is None or pattern == "*"
    if router and (everything or not names_outright(pattern or "*", layer)):
        kind = "a router"
    elif everything and (embedding or is_embedding(layer)):
        kind = "an embedding"
    elif everything and (head or is_head(layer)):
        kind = "the output head"
    else:
        return None
    return f"{kind}: {NAMED}"
