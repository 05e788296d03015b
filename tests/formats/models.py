"""Small models and folders of checkpoints, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Float8WeightOnly,
    Int1WeightOnly,
    Int2WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    PerBlock,
    PerTensor,
    quantize_,
)
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    "int4 g64": Int4WeightOnly(64),
    "int4 rows": IntxWeightOnly(4),
    "int4 asymmetric g32": IntxWeightOnly(4, 32, "asymmetric"),
    "uint4": Scheme(Spec(Int(4, signed=False), PerGroup(32), "asymmetric")),
    "int8": Int8WeightOnly(),
    "int8 g64": Int8WeightOnly(64),
    "int8 asymmetric": IntxWeightOnly(8, 32, "asymmetric"),
    "int8 tensor": Scheme(Spec(Int(8), PerTensor())),
    "int4 asymmetric tensor": Scheme(Spec(Int(4), PerTensor(), "asymmetric")),
    **{f"int{b} asymmetric": IntxWeightOnly(b, 64, "asymmetric") for b in (1, 2, 3, 5, 6, 7)},
    **{f"int{b} symmetric": IntxWeightOnly(b, None, "symmetric") for b in (2, 3, 5, 6, 7)},
    "int2 half-integer": Int2WeightOnly(),
    "int1 half-integer": Int1WeightOnly(),
    "int8 x int8": Int8DynamicActivationInt8Weight(),
    "int8 x int4": Int8DynamicActivationInt4Weight(),
    "float8": Float8WeightOnly(),
    "float8 tensor": Float8WeightOnly(PerTensor()),
    "float8 x float8": Float8DynamicActivationFloat8Weight(),
    "float8 blocks": Float8DynamicActivationFloat8Weight(PerBlock(128, 128)),
}
"""What compressed-tensors holds without loss."""


class Tied(nn.Module):
    """A language model's shape: an embedding, two linears, and a head that may be the embedding."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 128)
        self.up_proj = nn.Linear(128, 256)
        self.norm = nn.LayerNorm(256)
        self.down_proj = nn.Linear(256, 128, bias=False)
        self.lm_head = nn.Linear(128, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.up_proj(self.embed_tokens(tokens)))
        return self.lm_head(self.down_proj(x))


TOKENS = torch.arange(14).view(2, 7)


def build(seed: int = 0, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Tied:
    torch.manual_seed(seed)
    return Tied(tied).to(dtype)


def low_bit(scheme: Any, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tied:
    """A model whose two projections are in `scheme`."""
    model = build(seed, dtype)
    quantize_(model, {"*_proj": scheme, "*": None})
    return model


def plain_folder(path: Path, model: nn.Module | dict[str, Tensor], **config: Any) -> Path:
    """The folder of a checkpoint in high precision, in two shards, with a tokenizer's file."""
    from safetensors.torch import save_file

    path.mkdir()
    state = model.state_dict() if isinstance(model, nn.Module) else model
    entries = sorted(dict(state).items())
    half = len(entries) // 2
    files = {"model-00001-of-00002.safetensors": entries[:half]}
    files["model-00002-of-00002.safetensors"] = entries[half:]
    for file, part in files.items():
        save_file({name: t.clone() for name, t in part}, path / file, {"format": "pt"})
    places = {name: file for file, part in files.items() for name, _ in part}
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
    (path / "tokenizer.json").write_text("{}")
    return path
