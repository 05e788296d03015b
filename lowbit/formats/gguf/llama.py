"""Llama-like models in GGUF: names of tensors, settings, and the order of rows of query and key.

| model_type        | architecture of GGUF | beside the tensors of a Llama              |
|-------------------|----------------------|--------------------------------------------|
| llama, mistral    | llama                | biases, if the model has them              |
| qwen2             | qwen2                | biases of query, key and value             |
| qwen3             | qwen3                | norms of the heads of query and key        |

For "llama" GGUF interleaves the two halves of each head of q_proj and k_proj, because llama.cpp rotates neighbours:

    row (h, i, j) of [heads, 2, half] becomes row (h, j, i) of [heads, half, 2]

Rotary embeddings are plain, "linear" or "llama3", whose factors GGUF stores as a tensor (`lowbit.formats.gguf.rope`).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lowbit.formats.base import FormatError
from lowbit.formats.gguf import rope as gguf_rope

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The architecture in GGUF of each "model_type" of config.json."""
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SETTINGS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}
_ACTIVATIONS = ("silu", "swish")
EPSILON = "attention.layer_norm_rms_epsilon"


def in_gguf(name: str) -> str:
    """The name in GGUF of a tensor of transformers' Llama. Raises FormatError for any other tensor."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    head, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, last = rest.rpartition(".")
    if name.startswith("model.layers.") and head.isdigit() and module in _INSIDE:
        return f"blk.{head}.{_INSIDE[module]}.{last}"
    raise FormatError(f"gguf has no place for {name} in a Llama")


def in_transformers(name: str) -> str:
    """The inverse of `in_gguf`."""
    for own, theirs in _OUTSIDE.items():
        if theirs == name:
            return own
    parts = name.split(".")
    for own, theirs in _INSIDE.items():
        if len(parts) == 4 and parts[0] == "blk" and parts[2] == theirs:
            return f"model.layers.{parts[1]}.{own}.{parts[3]}"
    raise FormatError(f"{name} is not a tensor of a Llama")


def heads_of(name: str, config: Mapping[str, Any]) -> int:
    """The heads whose rows are interleaved in the tensor with this name in transformers; 0: none are."""
    if ARCHITECTURES.get(config.get("model_type", "")) != "llama":
        return 0
    heads = int(given(config, "num_attention_heads"))
    if ".q_proj." in name:
        return heads
    return int(config.get("num_key_value_heads") or heads) if ".k_proj." in name else 0


def given(config: Mapping[str, Any], key: str) -> Any:
    """The value of a setting that GGUF needs. Raises FormatError if config.json lacks it."""
    if config.get(key) is None:
        raise FormatError(f"config.json has no {key}, which gguf needs: add it")
    return config[key]


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows [N, …] of q_proj or k_proj in the order of GGUF."""
    if not heads:
        return rows
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def halved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `interleaved`."""
    if not heads:
        return rows
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def architecture_of(config: Mapping[str, Any]) -> str:
    """GGUF's name of the architecture. Raises FormatError for a model that is not like a Llama."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise FormatError(
            f"gguf is written for the model types {', '.join(sorted(ARCHITECTURES))}, got {kind!r}"
        )
    return ARCHITECTURES[kind]


def settings_of(
    config: Mapping[str, Any],
) -> tuple[dict[str, int], dict[str, float], dict[str, str]]:
    """The integers, floats and texts of GGUF for a config.json. Raises FormatError for a model that llama.cpp computes
    differently."""
    own = architecture_of(config)
    if (act := config.get("hidden_act", "silu")) not in _ACTIVATIONS:
        raise FormatError(
            f"hidden_act is {act!r}; llama.cpp computes {', '.join(_ACTIVATIONS)} in a Llama"
        )
    _warn_of_window(config)
    whole = {key: int(config[ours]) for ours, key in _SETTINGS.items() if config.get(ours)}
    size = head_size(config)
    whole |= {"rope.dimension_count": size, "attention.value_length": size}
    whole |= {"attention.key_length": size}
    floats, texts = gguf_rope.settings_of(config)
    floats[EPSILON] = float(given(config, "rms_norm_eps"))
    return _named(own, whole), _named(own, floats), _named(own, texts)


def head_size(config: Mapping[str, Any]) -> int:
    """Elements of a head."""
    inputs, heads = given(config, "hidden_size"), given(config, "num_attention_heads")
    return int(config.get("head_dim") or inputs // heads)


def _named(architecture: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{architecture}.{key}": value for key, value in settings.items()}


def _warn_of_window(config: Mapping[str, Any]) -> None:
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if not config.get("use_sliding_window", True):
        return
    if window and (longest is None or window < longest):
        warnings.warn(
            f"config.json has sliding_window {window}; llama.cpp attends to all tokens of such a model, so longer "
            "texts get other results there",
            stacklevel=2,
        )


def check_layers(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise FormatError if the tensors, by their names in GGUF, are those of another number of layers."""
    layers = {name.split(".")[1] for name in names if name.startswith("blk.")}
    if (count := config["num_hidden_layers"]) != len(layers):
        raise FormatError(
            f"its block_count is {count}, and its tensors are those of {len(layers)} layers"
        )


def config_of(
    fields: Mapping[str, Any], names: Collection[str], vocabulary: int, factors: Tensor | None
) -> dict[str, Any]:
    """config.json of transformers' model for the metadata of a GGUF file.

    Args:
        fields: the metadata.
        names: of the tensors, in GGUF.
        vocabulary: rows of the embedding.
        factors: the tensor rope_freqs.weight; None if the file has none.

    Raises FormatError for another architecture, missing sizes, and other rotary embeddings.
    """
    own = fields.get("general.architecture")
    if own not in _CLASSES:
        raise FormatError(f"its architecture is {own!r}; accepted: {', '.join(_CLASSES)}")
    stored = {key.removeprefix(f"{own}."): value for key, value in fields.items()}
    config = {ours: stored[key] for ours, key in _SETTINGS.items() if key in stored}
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        if type(config.get(key)) is not int or config[key] < 1:
            raise FormatError(
                f"its {own}.{_SETTINGS[key]} is {config.get(key)!r}; accepted: 1 or more"
            )
    size = head_size(config)
    if (rotated := stored.get("rope.dimension_count", size)) != size:
        raise FormatError(
            f"{rotated} of {size} elements of a head are rotated; lowbit reads files with all of them rotated"
        )
    config |= gguf_rope.config_of(stored, size, factors)
    if own == "llama":
        biases = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
        config |= {key: f"blk.0.{module}.bias" in names for key, module in biases.items()}
    return {
        **config,
        "model_type": own,
        "architectures": [_CLASSES[own]],
        "vocab_size": vocabulary,
        "rms_norm_eps": stored.get(EPSILON, 1e-6),
        "tie_word_embeddings": "output.weight" not in names,
    }
