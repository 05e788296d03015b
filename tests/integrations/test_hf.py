"""`from_pretrained(…, quantization_config=LowbitConfig(…))`, `save_pretrained` and back, with transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.convert import matches
from lowbit.tensor.base import LowbitTensor
from tests.integrations.models import TOKENS, llama, logits, mixtral, qwen3_moe

transformers = pytest.importorskip("transformers")

from lowbit.hf import LowbitConfig  # noqa: E402

INT4 = lb.Int4WeightOnly(32)


def tied() -> Any:
    return llama(tie_word_embeddings=True)


MODELS = {"llama": llama, "tied": tied, "mixtral": mixtral, "qwen3-moe": qwen3_moe}
every_model = pytest.mark.parametrize("name", MODELS)
CONFIGS = {
    "int4": LowbitConfig("int4", group_size=32),
    "int8": LowbitConfig("int8"),
    "searched": LowbitConfig(lb.IntxWeightOnly(3, 32), scales="searched"),
    "asymmetric": LowbitConfig(lb.Int4WeightOnly(32, "asymmetric")),
    "float8": LowbitConfig("float8"),
    "int8_int8": LowbitConfig("int8_int8"),
    "patterns": LowbitConfig({"lm_head": "int8", "re:.*[qk]_proj": None, "*": INT4}),
}


def source(folder: Path, model: Any, **options: Any) -> Path:
    """A folder of plain weights in several shards."""
    model.save_pretrained(folder, max_shard_size="40KB", **options)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def read(folder: Path, config: LowbitConfig | None = None, **options: Any) -> Any:
    given = {} if config is None else {"quantization_config": config}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given, **options)


def low(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if isinstance(p, LowbitTensor)}


def assert_same_tensors(found: nn.Module, wanted: nn.Module) -> None:
    own = dict(found.named_parameters(remove_duplicate=False))
    for name, t in wanted.named_parameters(remove_duplicate=False):
        assert type(own[name]) is type(t) and own[name].dtype == t.dtype, name
        if isinstance(t, LowbitTensor):
            for part, value in t.inner_tensors().items():
                assert torch.equal(own[name].inner_tensors()[part], value), (name, part)
        else:
            assert torch.equal(own[name], t), name


# ---- loading -------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_quantized_while_loading_is_the_one_quantized_afterwards(
    name: str, config: str, tmp_path: Path
) -> None:
    settings = CONFIGS[config]
    model = MODELS[name]()
    found = read(source(tmp_path / "plain", model), settings)
    chosen = low(found)
    patterns = {n: None for n in dict(model.named_parameters()) if n not in chosen}
    lb.quantize_(
        model,
        {**patterns, **settings.patterns},
        lambda m, n: isinstance(m, nn.Linear) or n.endswith("experts"),
        scales=settings.scales,
    ) if "lm_head.weight" in chosen or name != "tied" else lb.quantize_(
        model, settings.patterns, lambda m, n: isinstance(m, nn.Linear) and n != "lm_head"
    , scales=settings.scales)
    assert_same_tensors(found, model)
    assert torch.equal(logits(found), logits(model))
    assert not any(p.requires_grad for p in found.parameters() if isinstance(p, LowbitTensor))
