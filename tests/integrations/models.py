"""Tiny models of transformers, made here, and a few steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 128
TOKENS = torch.arange(24).view(2, 12) * 5 % VOCABULARY
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def fill_adapters(model: nn.Module, std: float) -> None:
    """Draw each B of LoRA, whose zeros change nothing and give A no gradient."""
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=std)


def loaded(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """The model of a folder, by transformers' own loader."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def by_compressed_tensors(folder: Path, dtype: torch.dtype) -> Any:
    """Decompressed, which the package otherwise does at the first call of the whole model."""
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    return loaded(folder, dtype, quantization_config=CompressedTensorsConfig(dequantize=True))


def dtype_of_exact_blocks() -> torch.dtype:
    """The dtype in which float8 blocks of compressed-tensors are read to the bit. Before 5.21 transformers left their
    decompression to the package, which takes their scales in the model's dtype."""
    from transformers.integrations import compressed_tensors

    is_own = hasattr(compressed_tensors, "CompressedTensorsDequantize")
    return torch.bfloat16 if is_own else torch.float32


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = GPT2Config(
        n_embd=64, n_layer=1, n_head=4, vocab_size=VOCABULARY, n_positions=64, **ids
    )
    return GPT2LMHeadModel(config).eval()


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).eval()


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).eval()


def gpt_oss() -> Any:
    """Its experts are stored as [experts, inputs, outputs], with biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    config = GptOssConfig(**SIZES, **experts, layer_types=["full_attention"])
    return GptOssForCausalLM(config).eval()


def is_inner_linear(module: nn.Module, name: str) -> bool:
    """Selects every linear except the head, as users quantize a base model."""
    return isinstance(module, nn.Linear) and "lm_head" not in name


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 5,
    tokens: torch.Tensor = TOKENS,
) -> list[float]:
    """The losses of a few training steps."""
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses
