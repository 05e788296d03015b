"""qat.train_blocks on models of transformers, unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit as lb
from lowbit import qat
from lowbit.tracing.block_inputs import capture
from tests.integrations.models import SIZES, TOKENS, llama, logits, mixtral

transformers = pytest.importorskip("transformers")

INT2 = lb.IntxWeightOnly(2, 32)
EXCEPT_HEAD = {"lm_head": None, "*": INT2}


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


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(3, 128, (4, 12), generator=generator)} for _ in range(count)
    ]


@pytest.mark.parametrize("scales", ["present", "learned"])
def test_llama_trained_block_by_block_is_better_than_rounded(scales) -> None:
    plain = llama(num_hidden_layers=2, initializer_range=0.1)
    expected = logits(plain)
    rounded = copy.deepcopy(plain)
    lb.quantize_(rounded, EXCEPT_HEAD)
    model = copy.deepcopy(plain)
    qat.prepare_(model, EXCEPT_HEAD, scales=scales)
    tokens = [*batches(), {"input_ids": TOKENS}]
    report = qat.train_blocks(model, model.model.layers, tokens, lr=2e-3, epochs=6)
    assert [b.name for b in report.blocks] == ["model.layers.0", "model.layers.1"]
    assert all(b.after < 0.7 * b.before for b in report.blocks)
    qat.convert_(model)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, lb.AffineTensor)
    found = logits(model)
    lost = (logits(rounded) - expected).square().sum()
    assert (found - expected).square().sum() < 0.6 * lost
