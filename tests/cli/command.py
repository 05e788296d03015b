"""Runs `lowbit` in a process of its own, and makes the model that it works on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import forked
from tests.formats.models import plain_folder

for package in ("typer", "rich", "safetensors", "matplotlib"):
    pytest.importorskip(package)  # skips the module that imports this one

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, INNER, LAYERS, HEADS, GROUPS, VOCABULARY = 128, 256, 2, 4, 2, 259
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MATRICES = 7 * LAYERS
TEXT = "the model reads the text and the model writes the text " * 8


def environment() -> dict[str, str]:
    """Without the settings of this process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    return {**clean, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def started(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m lowbit …` in the folder `cwd`, as a user's shell starts it. It imports torch, which takes seconds."""
    command = [sys.executable, "-m", "lowbit", *arguments]
    options = {"env": environment(), "capture_output": True, "text": True, "timeout": 240}
    return subprocess.run(command, cwd=cwd, **options)


def lowbit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As `started`, in a fork of a process that has imported torch."""
    program = "import sys; from lowbit.cli import main; sys.exit(main(sys.argv[1:]))"
    return forked.run(program, *arguments, folder=cwd, HF_HUB_OFFLINE="1")


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Those of a Llama of `CONFIG`, as transformers names them."""
    width = HIDDEN // HEADS * GROUPS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name in ("q_proj", "o_proj"):
            shapes[f"{layer}.self_attn.{name}"] = (HIDDEN, HIDDEN)
        for name in ("k_proj", "v_proj"):
            shapes[f"{layer}.self_attn.{name}"] = (width, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}.mlp.{name}"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.down_proj"] = (HIDDEN, INNER)
        shapes[f"{layer}.input_layernorm"] = shapes[f"{layer}.post_attention_layernorm"] = (HIDDEN,)
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }


def make_model(path: Path) -> Path:
    """The folder of a plain model, in two shards, whose tokenizer file is empty."""
    return plain_folder(path, weights(), **CONFIG)


def listing(folder: Path) -> list[str]:
    """All that lies in a folder, hidden names too."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
