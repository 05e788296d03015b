"""Tiny folders as models are published: the real classes of transformers, packed in each format."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Int4WeightOnly,
    MXFP4WeightOnly,
    MXFP8WeightOnly,
    NVFP4WeightOnly,
    PerBlock,
)
from tests.integrations.models import SIZES

LAYERS = {"num_hidden_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MLA = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
KIMI = {
    **{**MLA, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 32},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
}
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
            **KIMI,
            "moe_intermediate_size": 32,
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
    "Qwen3 MXFP8": (
        "Qwen3",
        {"head_dim": 16},
        "compressed-tensors",
        MXFP8WeightOnly(),
    ),
    "Kimi K3 MXFP4": (
        "KimiLinear",
        {
            **{"num_key_value_heads": 4, "moe_intermediate_size": 32, "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
            **{"qk_nope_head_dim": 16, "v_head_dim": 16, "linear_head_dim": 16},
            **{"linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
        },
        "compressed-tensors",
        {"*.block_sparse_moe.experts.*": MXFP4WeightOnly(), "*": None},
    ),
    "ModelOpt NVFP4": ("Qwen3", {"head_dim": 16}, "modelopt", NVFP4WeightOnly()),
    "DeepSeek-V4 MXFP4 and float8": (
        "DeepseekV4",
        {
            **{"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128},
            **{"num_key_value_heads": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"head_dim": 128, "qk_rope_head_dim": 16, "q_lora_rank": 128, "o_groups": 2},
            **{"o_lora_rank": 128, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 4},
            **{"sliding_window": 8, "hc_mult": 2, "mlp_layer_types": ["hash_moe", "moe"]},
            "layer_types": ["sliding_attention", "compressed_sparse_attention"],
        },
        "fp8",
        None,
    ),
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
    if kind in OWN_PACKERS:
        OWN_PACKERS[kind](plain, folder)
        return folder
    lowbit.export(plain, folder, format, scheme=scheme, max_shard_size="100KB")
    CHANGES.get(kind, lambda folder: None)(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None], **settings: Any) -> Path:
    """Change the tensors of the first shard, and the "quantization_config" of config.json."""
    from safetensors.torch import load_file, save_file

    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    change(tensors)
    for file in [*files, index]:
        file.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= settings.pop("config", {})
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _as_modelopt(folder: Path) -> None:
    """With scales of inputs, and settings in hf_quant_config.json alone."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("weight_scale_2")]:
            tensors[name.replace("weight_scale_2", "input_scale")] = torch.tensor(0.01)

    rewrite(folder, change)
    config = json.loads((folder / "config.json").read_text())
    ignored = config.pop("quantization_config")["ignore"]
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ignored}
    producer = {"name": "modelopt", "version": "0.29.0"}
    text = json.dumps({"producer": producer, "quantization": settings})
    (folder / "hf_quant_config.json").write_text(text)


def _deepseek_v4(plain: Path, folder: Path) -> None:
    """The names and dtypes of DeepSeek-V4-Flash: experts in FP4, the linears of attention and shared experts in float8
    blocks, all scales powers of two named `scale`. transformers saves most names as they are published."""
    from safetensors.torch import save_file

    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config |= {"expert_dtype": "fp4"}
    config["quantization_config"] = {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        **{"scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    found: dict[str, Tensor] = {}
    for name, (_, t) in stored(plain).items():
        own = (
            name.removeprefix("model.")
            .replace("embed_tokens", "embed")
            .replace("hc_head.", "hc_head_")
        )
        own = own.replace("hc_head_hc", "hc_head")
        layer = own.removesuffix(".weight")
        if ".ffn.experts." in own:
            made: Any = lowbit.AffineTensor.from_float(t, MXFP4WeightOnly())
            parts = made.codes.view(torch.int8), made.scale.view(torch.float8_e8m0fnu)
        elif layer.rpartition(".")[2] in (
            "wq_a",
            "wq_b",
            "wo_a",
            "wo_b",
            "wkv",
            "w1",
            "w2",
            "w3",
        ) and ("compressor" not in own):
            blocks = t.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).log2().ceil().exp2()
            codes = (blocks / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            parts = codes, scale.squeeze(3).squeeze(1).to(torch.float8_e8m0fnu)
        else:
            found[own] = t.float() if FLOAT32.search(own) else t
            if own.endswith("tid2eid"):  # a class of transformers begins with zeros
                tokens = torch.arange(t.numel(), dtype=t.dtype)
                found[own] = (tokens * 3 % 4).view(t.shape)
            continue
        found[f"{layer}.weight"], found[f"{layer}.scale"] = (p.contiguous() for p in parts)
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def is_read_by_transformers(folder: Path) -> bool:
    """False for folders of ModelOpt, and for Kimi Linear in compressed-tensors, whose convolutions stop its loader."""
    config = json.loads((folder / "config.json").read_text())
    return "quantization_config" in config and config["model_type"] != "kimi_linear"


def unpacked(folder: Path, plain: Path) -> Path:
    """A folder of FP4 in bfloat16, by the formulas of the formats, for kinds of which transformers has no loader."""
    from safetensors.torch import save_file

    own = {name: t for name, (_, t) in stored(folder).items()}
    found = {n: t for n, t in own.items() if "_scale" not in n and "weight_packed" not in n}
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, scale in own.items():
        layer, end, _ = name.rpartition(".weight_scale")
        if not end or name.endswith("weight_scale_2"):
            continue
        packed = own.get(f"{layer}.weight_packed", own.get(f"{layer}.weight"))
        assert packed is not None
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        values = magnitudes[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
        second = own.get(f"{layer}.weight_scale_2")
        each = (scale.float() - 127).exp2() if second is None else scale.float() * second
        made = values.unflatten(1, (scale.shape[1], -1)) * each.unsqueeze(-1)
        found[f"{layer}.weight"] = made.flatten(1).bfloat16()
    plain.mkdir()
    save_file(found, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    return plain


FLOAT32 = re.compile(r"hc_|attn_sink|\.ape$|gate\.bias")
"""Tensors of DeepSeek-V4 that its class keeps in float32."""
OWN_PACKERS = {"DeepSeek-V4 MXFP4 and float8": _deepseek_v4}
CHANGES = {"ModelOpt NVFP4": _as_modelopt}
"""What a folder has besides."""


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
