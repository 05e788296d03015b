"""Llama-like models in GGUF: names of tensors, settings, and the order of rows of query and key.

GGUF interleaves the two halves of each head of q_proj and k_proj, as llama.cpp rotates neighbours:

    row (h, i, j) of [heads, 2, half] becomes row (h, j, i) of [heads, half, 2]
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit.formats.base import FormatError

ARCHITECTURES = {"llama", "mistral"}
"""The "model_type" of config.json that GGUF calls "llama"."""
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
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SETTINGS = {
    "max_position_embeddings": "llama.context_length",
    "hidden_size": "llama.embedding_length",
    "num_hidden_layers": "llama.block_count",
    "intermediate_size": "llama.feed_forward_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "vocab_size": "llama.vocab_size",
}
_ACTIVATIONS = ("silu", "swish")
EPSILON, THETA = "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"


def in_gguf(name: str) -> str:
    """The name in GGUF of a tensor of transformers' Llama. Raises FormatError for another one."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    head, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, last = rest.rpartition(".")
    if name.startswith("model.layers.") and head.isdigit() and module in _INSIDE:
        return f"blk.{head}.{_INSIDE[module]}.{last}"
    raise FormatError(f"gguf has no place for {name} in a Llama")


def in_transformers(name: str) -> str:
    """The inverse of `in_gguf`."""
    if name == "rope_freqs.weight":
        raise FormatError(
            "its rotary frequencies are scaled (rope_freqs.weight), which lowbit does not read from gguf"
        )
    for own, theirs in _OUTSIDE.items():
        if theirs == name:
            return own
    parts = name.split(".")
    for own, theirs in _INSIDE.items():
        if len(parts) == 4 and parts[0] == "blk" and parts[2] == theirs:
            return f"model.layers.{parts[1]}.{own}.{parts[3]}"
    raise FormatError(f"{name} is no tensor of a Llama")


def heads_of(name: str, config: Mapping[str, Any]) -> int:
    """The heads whose rows are interleaved in a tensor of this name (transformers'); 0: none are."""
    heads = int(given(config, "num_attention_heads"))
    if ".q_proj." in name:
        return heads
    return int(config.get("num_key_value_heads") or heads) if ".k_proj." in name else 0


def given(config: Mapping[str, Any], key: str) -> Any:
    """The value of a setting that GGUF needs. Raises FormatError where config.json lacks it."""
    if config.get(key) is None:
        raise FormatError(f"config.json has no {key}, which gguf needs: add it")
    return config[key]


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows [N, …] of q_proj or k_proj as GGUF has them."""
    if not heads:
        return rows
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def halved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `interleaved`."""
    if not heads:
        return rows
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def settings_of(config: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, float]]:
    """The integers and the floats of GGUF for a config.json. Raises FormatError for a model that is no Llama."""
    if config.get("model_type") not in ARCHITECTURES:
        raise FormatError(
            f"gguf is written for the model types {', '.join(sorted(ARCHITECTURES))}, got {config.get('model_type')!r}"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise FormatError(f"gguf is written with plain rotary embeddings, got {kind!r}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise FormatError("gguf is written for a Llama without biases")
    if (act := config.get("hidden_act", "silu")) not in _ACTIVATIONS:
        raise FormatError(
            f"hidden_act is {act!r}; llama.cpp computes {', '.join(_ACTIVATIONS)} in a Llama"
        )
    _warn_of_window(config)
    whole = {key: int(config[own]) for own, key in _SETTINGS.items() if config.get(own) is not None}
    inputs, heads = given(config, "hidden_size"), given(config, "num_attention_heads")
    size = int(config.get("head_dim") or inputs // heads)
    whole |= {"llama.rope.dimension_count": size, "llama.attention.value_length": size}
    whole |= {"llama.attention.key_length": size}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return whole, {EPSILON: float(given(config, "rms_norm_eps")), THETA: float(theta)}


def _warn_of_window(config: Mapping[str, Any]) -> None:
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if window and (longest is None or window < longest):
        warnings.warn(
            f"config.json has sliding_window {window}; llama.cpp attends to all tokens of a Llama, so longer texts get "
            "other results there",
            stacklevel=2,
        )


def config_of(fields: Mapping[str, Any], is_tied: bool, vocabulary: int) -> dict[str, Any]:
    """config.json of transformers' Llama for the metadata of a GGUF file.

    Raises FormatError for another architecture, for sizes that are missing, and for other rotary embeddings.
    """
    if fields.get("general.architecture") != "llama":
        raise FormatError(
            f"its architecture is {fields.get('general.architecture')!r}; accepted: 'llama'"
        )
    kind = fields.get("llama.rope.scaling.type", "none")
    if (factor := fields.get("llama.rope.scale_linear", 1.0)) != 1.0:  # in older files
        kind = f"linear, {factor:g}"
    if kind != "none":
        raise FormatError(
            f"its rotary embeddings are scaled ({kind}), which lowbit does not read from gguf"
        )
    config = {own: fields[key] for own, key in _SETTINGS.items() if key in fields}
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        if type(config.get(key)) is not int or config[key] < 1:
            raise FormatError(f"its {_SETTINGS[key]} is {config.get(key)!r}; accepted: 1 or more")
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if (rotated := fields.get("llama.rope.dimension_count", size)) != size:
        raise FormatError(
            f"{rotated} of {size} elements of a head are rotated; lowbit reads files with all of them rotated"
        )
    return {
        **config,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "rms_norm_eps": fields.get(EPSILON, 1e-6),
        "rope_theta": fields.get(THETA, 10000.0),
        "tie_word_embeddings": is_tied,
    }
