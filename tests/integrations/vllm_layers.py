"""A decoder layer and an output head of vLLM's own parallel layers, filled from a folder in lowbit's format.

The tests run `check` in one process, and in two that share each layer.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit import formats

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 128, 256, 4, 2, 32, 96
SIZES = {
    "q_proj": (HEADS * HEAD, HIDDEN),
    "k_proj": (KV_HEADS * HEAD, HIDDEN),
    "v_proj": (KV_HEADS * HEAD, HIDDEN),
    "o_proj": (HIDDEN, HEADS * HEAD),
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
    "lm_head": (VOCABULARY, HIDDEN),
}
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
CUT_INPUTS = ("o_proj", "down_proj")


class Plain(nn.Module):
    """The weights as a checkpoint has them, each by itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Module()
        for i, (name, (n, k)) in enumerate(SIZES.items()):
            linear = nn.Linear(k, n, bias=False, dtype=dtype)
            values = torch.randn(n, k, generator=torch.Generator().manual_seed(i)) * 0.1
            linear.weight = nn.Parameter(values.to(dtype))
            (self if name == "lm_head" else self.layer).add_module(name, linear)


def served(settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """vLLM's layers for a folder with this "quantization_config", not filled yet."""
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.utils import configure_quant_config
    from vllm.model_executor.models.llama import LlamaModel

    class Layers(nn.Module):
        hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper
        packed_modules_mapping = MERGED

        def __init__(self, quant_config: Any) -> None:
            super().__init__()
            self.quant_config = quant_config
            own = {"quant_config": quant_config, "params_dtype": dtype, "bias": False}
            self.layer = nn.Module()
            self.layer.qkv_proj = QKVParallelLinear(
                HIDDEN, HEAD, HEADS, KV_HEADS, prefix="layer.qkv_proj", **own
            )
            self.layer.o_proj = RowParallelLinear(
                HEADS * HEAD, HIDDEN, prefix="layer.o_proj", **own
            )
            self.layer.gate_up_proj = MergedColumnParallelLinear(
                HIDDEN, [INNER, INNER], prefix="layer.gate_up_proj", **own
            )
            self.layer.down_proj = RowParallelLinear(INNER, HIDDEN, prefix="layer.down_proj", **own)
            self.lm_head = ParallelLMHead(VOCABULARY, HIDDEN, prefix="lm_head", **own)

    config = get_quantization_config(settings["quant_method"]).from_config(settings)
    configure_quant_config(config, Layers)
    return Layers(config)


def filled(model: Any, tensors: dict[str, Tensor]) -> None:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    loaded = AutoWeightsLoader(model).load_weights(tensors.items(), mapper=model.hf_to_vllm_mapper)
    assert loaded >= {name for name, _ in model.named_parameters()}
    for module in model.modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)


def here(name: str, values: Tensor, rank: int, world: int) -> Tensor:
    """The part of a weight that this process holds. vLLM pads the head's outputs to a multiple of 64."""
    if name == "lm_head":
        rows = -(-VOCABULARY // 64) * 64 // world
        return values[rank * rows : (rank + 1) * rows]
    return values.chunk(world, 1 if name in CUT_INPUTS else 0)[rank]


def stored_name(name: str) -> str:
    return name if name == "lm_head" else f"layer.{name}"


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The "quantization_config" of a folder, and its tensors as the shards name them."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors: dict[str, Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    return settings, tensors


def compare(model: Any, weights: dict[str, Any], rank: int, world: int, dtype: Any) -> None:
    """Each layer of vLLM has the values of the folder's weights, and multiplies by them."""
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"):
        layer = model.get_submodule(stored_name(name))
        parts = [weights[f"{stored_name(one)}.weight"] for one in MERGED.get(name, [name])]
        if not isinstance(parts[0], lowbit.LowbitTensor):
            assert name == "lm_head" and not isinstance(layer.weight, lowbit.LowbitTensor)
            continue
        values = torch.cat([here(name, p.dequantize(), rank, world) for p in parts])
        held = layer.quant_method.dequantize_weight(layer)[: len(values)]
        assert torch.equal(held, values), name
        x = torch.randn(3, values.shape[1], generator=torch.Generator().manual_seed(9)).to(dtype)
        found = layer.quant_method.apply(layer, x, None)[:, : len(values)]
        expected = F.linear(rounded(x, parts[0]), values)
        error = (found - expected).float().norm() / expected.float().norm()
        assert error < 0.02, (name, error)
        for p in layer.parameters():
            assert isinstance(p, lowbit.LowbitTensor), name


def rounded(x: Tensor, weight: Any) -> Tensor:
    """x as the product sees it."""
    spec = weight.activation
    if spec is None:
        return x
    if spec.static:
        return spec.fake_quantize_by(x, weight.input_scale, weight.input_zero_point)
    return spec.fake_quantize(x)


def check(rank: int, world: int, folders: list[str], store: str) -> list[str]:
    """Fill vLLM's layers from each folder, compare them, and give the error of each; "" where there is none."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from lowbit.vllm import register

    register()
    register()
    # vLLM's CPU build names the memory that processes share by this. Its executor sets it.
    os.environ.setdefault("VLLM_DIST_IDENT", Path(store).parent.name)
    found = []
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")
        parallel_state.initialize_model_parallel(world)
        for folder in folders:
            try:
                _check(Path(folder), rank, world)
                found.append("")
            except Exception:
                found.append(traceback.format_exc())
    return found


def _check(folder: Path, rank: int, world: int) -> None:
    settings, tensors = read(folder)
    weights = dict(formats.tensors(folder))
    dtype = weights["lm_head.weight"].dtype
    model = served(settings, dtype)
    names = {name for name, _ in model.named_parameters()}
    assert "layer.qkv_proj.weight_codes" in names and not any(".weight." in n for n in names)
    filled(model, tensors)
    compare(model, weights, rank, world, dtype)
