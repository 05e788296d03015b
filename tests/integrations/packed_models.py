"""Tiny folders as models are published: the real classes of transformers, packed in each format."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Int4WeightOnly,
    MXFP4WeightOnly,
    NVFP4WeightOnly,
    PerBlock,
)
from tests.integrations.models import SIZES

LAYERS = {"num_hidden_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MLA = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
BLOCKS = Float8DynamicActivationFloat8Weight(PerBlock(128, 128))
KINDS: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "gpt-oss MXFP4": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
            "layer_types": ["full_attention"] * 2,
        },
        "mxfp4",
        {"*.experts": MXFP4WeightOnly()},
    ),
    "DeepSeek-V3 float8": (
        "DeepseekV3",
        {
            **{**WIDE, **MLA, "moe_intermediate_size": 128, "n_group": 2, "topk_group": 1},
            **{"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 128},
            **{"qk_nope_head_dim": 32, "v_head_dim": 32},
        },
        "fp8",
        BLOCKS,
    ),
    "Kimi K2 int4": (
        "DeepseekV3",
        {
            **{**MLA, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_group": 1},
            **{"topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
            **{"qk_nope_head_dim": 16, "v_head_dim": 16},
        },
        "compressed-tensors",
        {"*.mlp.experts.*": Int4WeightOnly(32), "*": None},
    ),
    "Qwen3-MoE float8": (
        "Qwen3Moe",
        {**WIDE, **EXPERTS, "head_dim": 32, "moe_intermediate_size": 128},
        "fp8",
        BLOCKS,
    ),
    "Qwen3-MoE int4": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "moe_intermediate_size": 32},
        "compressed-tensors",
        Int4WeightOnly(32),
    ),
    "Qwen3 NVFP4": ("Qwen3", {"head_dim": 16}, "compressed-tensors", NVFP4WeightOnly()),
}
"""Class of transformers, changes of its config, format, and scheme."""


def publish(kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A new folder of this kind with random weights, in several shards."""
    import transformers

    name, own, format, scheme = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **LAYERS, **own, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain = folder.with_name(f"{folder.name}-plain")
    model.save_pretrained(plain, max_shard_size="100KB")
    lowbit.export(plain, folder, format, scheme=scheme, max_shard_size="100KB")
    return folder


def stored(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """The shard and the tensor of each stored name, by the package safetensors."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: (path.name, file.get_tensor(name)) for name in list(file.keys())}
    return found


def sums(folder: Path) -> dict[str, tuple[str, str, tuple[int, ...], str]]:
    """Shard, dtype, shape and SHA-256 of each stored tensor."""
    return {
        name: (file, str(t.dtype), tuple(t.shape), hashlib.sha256(_bytes(t)).hexdigest())
        for name, (file, t) in stored(folder).items()
    }


def _bytes(t: Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
