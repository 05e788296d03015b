"""Distillation of a model into its NVFP4 folder: its weights train towards the logits of the original.

    lowbit quantize Qwen3-8B --scheme nvfp4 --out qwen3-nvfp4              # or a published NVFP4 folder
    python -m recipes.packed.nvfp4_distill --model qwen3-nvfp4 --teacher Qwen3-8B --out runs/nvfp4
                                           [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

The loss is the Kullback-Leibler divergence of the logits of the student, whose products round their weights to NVFP4,
from those of the teacher (arXiv 1503.02531). Any text serves, since no label counts. NVFP4 stores scales in 8 bits,
which follow the present weight: q, k and v share a global scale, and so do gate and up, as servers merge them. OUT has
the names, dtypes, shards and config.json of the published folder.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowbit
from recipes import text
from recipes.command_line import exit_status, override
from recipes.device import choose_device


@dataclass(frozen=True)
class Config:
    steps: int = 200
    batch_size: int = 4
    context: int = 512
    lr: float = 1e-5
    temperature: float = 1.0
    heldout_tokens: int = 50_000
    seed: int = 0


def train(model: Any, teacher: Any, data: text.Data, config: Config) -> None:
    """Train all weights in place towards the logits of the teacher, those of NVFP4 on their grid."""
    lowbit.qat.prepare_(model)
    model.requires_grad_(True).train()
    weights = [*model.parameters()]
    distill = lowbit.qat.Distillation(model, teacher, temperature=config.temperature)
    optimizer = lowbit.optim.AdamW8bit(weights, lr=config.lr, bf16_stochastic_round=True)
    sizes = {"batch_size": config.batch_size, "context": config.context, "seed": config.seed}
    for step in tqdm(range(config.steps), desc="distillation", leave=False):
        tokens, _ = text.batch(data.train, step, **sizes)
        distill(input_ids=tokens.to(choose_device()), use_cache=False).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def divergence(model: Any, teacher: Any, data: text.Data, config: Config) -> float:
    """Kullback-Leibler divergence from the teacher on held-out text, in nats a token."""
    windows = text.windows_of(data.heldout, config.context, config.heldout_tokens)
    total = 0.0
    for one in windows.to(choose_device()).split(1):
        own, taught = (m(input_ids=one, use_cache=False).logits for m in (model, teacher))
        total += lowbit.qat.distillation_loss(own, taught).item()
    return total / len(windows)


def run(options: argparse.Namespace) -> None:
    config, out = override(Config(), options.set), Path(options.out)
    model = lowbit.load_pretrained(options.model, device=choose_device())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = text.by_tokenizer(tokenizer, options.data, "stdlib", 0.03)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype="auto")
    teacher.to(choose_device()).eval()
    before = divergence(model, teacher, data, config)
    print(f"KL to the teacher, published: {before:.4f} nats a token")
    train(model, teacher, data, config)
    print(f"KL to the teacher, trained:   {divergence(model, teacher, data, config):.4f}")
    lowbit.qat.convert_(model)
    report = lowbit.export(model, out, like=options.model)
    print(f"{out}: {report.notes[0]}")
    written = lowbit.load_pretrained(out, device=choose_device())
    print(f"KL to the teacher, written:   {divergence(written, teacher, data, config):.4f}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.packed.nvfp4_distill")
    parser.add_argument("--model", required=True, help="the folder of a model in NVFP4")
    parser.add_argument("--teacher", required=True, help="the model in high precision")
    parser.add_argument("--data", type=Path, help="text; default: the Python standard library")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parse(arguments)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
