"""The mixes of tensor types that users of llama.cpp name, such as "Q4_K_M", as schemes for the weights of a Llama.

A mix has one type for most weights, and others where rounding costs most. In a model of n layers, with h query heads
for each key head:

| mix    | most | attn_v                                | ffn_down                                 | attn_output |
|--------|------|---------------------------------------|------------------------------------------|-------------|
| Q2_K   | Q2_K | Q3_K; Q4_K if h ≥ 4                   | Q3_K                                     | Q3_K        |
| Q2_K_S | Q2_K | Q2_K; Q4_K if h ≥ 4                   | Q4_K in the first n / 8 layers           |             |
| Q3_K_S | Q3_K |                                       |                                          |             |
| Q3_K_M | Q3_K | Q5_K in the first 2 layers, then Q4_K | Q5_K in the first n / 16, then Q4_K      | Q4_K        |
| Q3_K_L | Q3_K | Q5_K                                  | Q5_K                                     | Q5_K        |
| Q4_K_S | Q4_K | Q5_K in the first 4 layers            | Q5_K in the first n / 8                  |             |
| Q4_K_M | Q4_K | Q6_K in some layers                   | Q6_K in the same layers                  |             |
| Q5_K_S | Q5_K |                                       |                                          |             |
| Q5_K_M | Q5_K | Q6_K in some layers                   | Q6_K in the same layers                  |             |

"Some layers" are the first and the last eighth, and every third one between. The output head, or the embedding that it
shares, is Q6_K; in Q8_0 and MXFP4 it is Q8_0. In what llama.cpp takes for a 70B model, attn_v is Q5_K where it would
be Q3_K or Q4_K: 80 layers, in a Qwen2, or in a Llama whose key heads are fewer than its query heads. Q6_K, Q4_0, Q4_1,
Q5_0, Q5_1, Q8_0 and MXFP4 are the type of all other weights. A weight whose inputs are not a multiple of 256 takes the
type with blocks of 32 that `lowbit.formats.gguf.blocks` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lowbit.formats.base import FormatError
from lowbit.formats.gguf.blocks import SMALL
from lowbit.formats.gguf.format import SCHEMES, gguf_scheme
from lowbit.formats.gguf.llama import architecture_of, given, head_size
from lowbit.numerics.super_blocks import INPUTS
from lowbit.schemes.scheme import Scheme

MIXES = (
    *("Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M"),
    *("Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"),
)
"""The names that `gguf_mix` takes."""
_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LARGEST_LAYERS = 80
"""Layers of a 70B model."""


def gguf_mix(name: str, model: nn.Module | Mapping[str, Any]) -> dict[str, Scheme]:
    """Patterns and schemes for `lowbit.quantize_`, `lowbit.calibrate` and `lowbit.export`, whose weights a GGUF file
    holds in the types of this mix.

        schemes = lowbit.formats.gguf_mix("Q4_K_M", model)
        lowbit.calibrate(model, schemes, batches)
        lowbit.export(model, "model.gguf", "gguf", tokenizer=tokenizer)

    Args:
        name: one of the module's table, as llama.cpp's quantizer names it.
        model: a model of transformers that `lowbit.export` writes to GGUF, or its config.json.

    Raises FormatError for another name or model, and for inputs that are not a multiple of 32.
    """
    if name not in MIXES:
        alone = f"; gguf_scheme({name!r}) is that type for all weights" if name in SCHEMES else ""
        raise FormatError(f"unknown mix {name!r}; accepted: {', '.join(MIXES)}{alone}")
    config = model if isinstance(model, Mapping) else _config_of(model)
    own = architecture_of(config)
    hidden, layers = int(given(config, "hidden_size")), int(given(config, "num_hidden_layers"))
    heads = int(given(config, "num_attention_heads"))
    sharing = heads // int(config.get("num_key_value_heads") or heads)
    is_largest = layers == _LARGEST_LAYERS and (own == "qwen2" or (own == "llama" and sharing > 1))
    inner = {
        "self_attn.o_proj": heads * head_size(config),
        "mlp.down_proj": int(given(config, "intermediate_size")),
    }
    head = "Q8_0" if name in ("Q8_0", "MXFP4") else "Q6_K"
    found = {"lm_head": _fitting(head, hidden, "lm_head")}
    embedding = "Q8_0" if name == "MXFP4" else _most(name)
    if config.get("tie_word_embeddings"):
        found, embedding = {}, head
    found["model.embed_tokens"] = _fitting(embedding, hidden, "model.embed_tokens")
    for i in range(layers):
        for module in _MODULES:
            kind = _type_of(name, module, i, layers, sharing)
            if is_largest and module == "self_attn.v_proj" and kind in ("Q3_K", "Q4_K"):
                kind = "Q5_K"
            own = f"model.layers.{i}.{module}"
            found[own] = _fitting(kind, inner.get(module, hidden), own)
    return found


_MODULES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def _config_of(model: nn.Module) -> Mapping[str, Any]:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise FormatError(
            f"gguf_mix was given a {type(model).__name__}; accepted: a model of transformers, whose config says how "
            "many layers and heads there are, or its config.json as a dict"
        )
    found: Mapping[str, Any] = config.to_dict()
    return found


def _most(name: str) -> str:
    """The type of most weights of a mix."""
    return name[: name.index("_K") + 2] if "_K" in name else name


def _type_of(name: str, module: str, layer: int, layers: int, sharing: int) -> str:
    """The type of a weight in the layers, by the module's table."""
    most, part = _most(name), module.rpartition(".")[2]
    if part == "v_proj":
        return _of_values(name, layer, layers, sharing)
    if part == "down_proj":
        return _of_down(name, layer, layers)
    if part == "o_proj":
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(name, most)
    return most


def _of_values(name: str, layer: int, layers: int, sharing: int) -> str:
    if name in ("Q2_K", "Q2_K_S") and sharing >= 4:
        return "Q4_K"
    if name == "Q2_K":
        return "Q3_K"
    if name == "Q3_K_M":
        return "Q5_K" if layer < 2 else "Q4_K"
    if name == "Q3_K_L" or (name == "Q4_K_S" and layer < 4):
        return "Q5_K"
    return "Q6_K" if _has_more_bits(name, layer, layers) else _most(name)


def _of_down(name: str, layer: int, layers: int) -> str:
    if name == "Q2_K":
        return "Q3_K"
    if name == "Q3_K_M":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    if name == "Q3_K_L" or (name == "Q4_K_S" and layer < layers // 8):
        return "Q5_K"
    if name == "Q2_K_S" and layer < layers // 8:
        return "Q4_K"
    return "Q6_K" if _has_more_bits(name, layer, layers) else _most(name)


def _has_more_bits(name: str, layer: int, layers: int) -> bool:
    eighth = layers // 8
    chosen = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return name in ("Q4_K_M", "Q5_K_M") and chosen


def _fitting(kind: str, inputs: int, name: str) -> Scheme:
    """The scheme of a type, or of the one that takes its place for this number of inputs."""
    if inputs % SMALL:
        raise FormatError(
            f"{name} has {inputs} inputs, which are not a multiple of {SMALL}, as every type of GGUF needs"
        )
    return gguf_scheme(_FALLBACKS[kind] if inputs % INPUTS and kind in _FALLBACKS else kind)
