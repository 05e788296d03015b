"""The arguments of the blocks of models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.tracing.block_inputs import capture
from tests.integrations.models import SIZES, TOKENS, llama, mixtral

transformers = pytest.importorskip("transformers")


def gemma3() -> Any:
    """Layers with two kinds of masks and of position embeddings."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    sizes = {**SIZES, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 4}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds)).eval()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()


def padded() -> dict[str, Tensor]:
    mask = torch.ones_like(TOKENS)
    mask[1, :5] = 0
    return {"input_ids": TOKENS, "attention_mask": mask}


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (lambda: llama(num_hidden_layers=2), "model.layers"),
        (mixtral, "model.layers"),
        (gemma3, "model.layers"),
        (gpt2, "transformer.h"),
    ],
    ids=["llama", "mixtral", "gemma3", "gpt2"],
)
def test_blocks_with_captured_arguments_compute_what_the_model_does(make, blocks) -> None:
    model = make()
    states = []
    layers = model.get_submodule(blocks)
    layers[-1].register_forward_hook(
        lambda module, args, out: states.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(**padded(), use_cache=False)
        (found,) = capture(model, list(layers), [padded()], None)
        hidden = found.hidden
        for layer, arguments in zip(layers, found.arguments, strict=True):
            hidden = arguments.run(layer, hidden)
    assert torch.equal(hidden, states[0])
    assert model.config.use_cache is True
