"""A calibration refuses before its first batch what `lowbit.export` refuses of the finished weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.convert import find_targets
from lowbit.formats import FormatError
from lowbit.formats.foreseen import check_export
from lowbit.formats.writing import on_grid

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3Moe": EXPERTS,
    "GPT2": {"n_embd": 64, "n_layer": 1, "n_head": 4},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
INT4, INT8 = lb.Int4WeightOnly(32), lb.Int8WeightOnly()
SCHEMES: dict[str, Any] = {
    "int4": INT4,
    "int8": INT8,
    "int8 x int8": lb.Int8DynamicActivationInt8Weight(),
    "nvfp4": lb.NVFP4WeightOnly(),
    "embedding": {"*embed_tokens": INT8, "*wte": INT8, "*": INT8},
    "mixed": {"*q_proj": INT8, "*c_attn": INT8, "*": INT4},
    "head": {"lm_head": INT4, "*": INT4},
    "router": {"*.mlp.gate": INT8, "*c_fc": INT8, "*": INT8},
}
CASES: dict[tuple[str, str], set[str]] = {
    ("Llama", "gptq"): {"embedding", "mixed"},
    ("Qwen2", "compressed-tensors"): {"int4", "int8", "int8 x int8", "nvfp4", "embedding", "head"},
    ("Qwen2", "gguf"): set(),
    ("Qwen3Moe", "awq"): set(),
    ("GPT2", "torchao"): {"int4", "int8", "int8 x int8"},
    ("OPT", "fp8"): set(),
}
"""Schemes that are refused among others, by model and format."""


def build(kind: str) -> Any:
    architecture = getattr(transformers, f"{kind}ForCausalLM", None) or transformers.GPT2LMHeadModel
    torch.manual_seed(0)
    return architecture(architecture.config_class(**SIZES, **MODELS[kind])).eval()


def refused(call: Callable[[], Any]) -> str:
    """The reasons of a refusal, without a way out. Weights come in another order there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except FormatError as error:
        reasons = str(error).partition(". lossy=True")[0].replace(" cannot hold ", "; ", 1)
        return "; ".join(sorted(reasons.split("; ")))
    return ""


@pytest.mark.parametrize(("kind", "format"), CASES, ids=[*map("-".join, CASES)])
def test_what_export_refuses_is_foreseen(kind: str, format: str, tmp_path: Path) -> None:
    """For weights that are rounded to nearest, which have the same names, shapes and schemes."""
    plain, found = build(kind), set()
    names = [name for name, _ in plain.named_modules()]
    for name, given in SCHEMES.items():
        own = given
        if isinstance(given, dict):  # without patterns for other models
            own = {p: v for p, v in given.items() if any(n.endswith(p.strip("*")) for n in names)}
        try:
            scheme = on_grid(format, own, lossy=False)
            targets, _ = find_targets(plain, scheme, None)
        except ValueError:  # the format holds no such scheme, or "*" is left with nothing
            continue
        model = copy.deepcopy(plain)
        lb.quantize_(model, scheme)
        for lossy in (True, False):
            out = tmp_path / f"{name}{lossy}.gguf"
            made = refused(partial(lb.export, model, out, format, lossy=lossy))
            made = "" if "needs a tokenizer" in made else made  # which is not known for a module
            assert refused(partial(check_export, plain, targets, format, lossy)) == made, name
        found |= {name} if made else set()
    assert found >= CASES[kind, format]
