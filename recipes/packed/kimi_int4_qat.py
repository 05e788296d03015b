"""QAT of int4 experts, as Kimi K2 Thinking has them, written back into the published folder.

    hf download moonshotai/Kimi-K2-Thinking --local-dir kimi
    python -m recipes.packed.kimi_int4_qat --model kimi --out runs/kimi
                                           [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

Experts take nearly all of the memory. Those of the last layers are unpacked and train in their own int4 grid, and those
below stay packed: gradients stop above them. Scales start from the published ones and train too. An expert that no
token reached, and all that does not train, keeps its published bytes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

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
    layers: int = 2
    """Experts of the last so many layers train."""
    heldout_tokens: int = 50_000
    seed: int = 0


def train(model: Any, data: text.Data, config: Config) -> None:
    """Train the experts of the last layers, and their scales, in place. All other weights stay, packed ones packed."""
    model.requires_grad_(False)
    last = model.model.layers[-config.layers :]
    chosen = {module for layer in last for module in layer.modules()}
    lowbit.qat.prepare_(model, filter_fn=lambda module, _: module in chosen, scales="learned")
    model.train()
    groups = lowbit.qat.parameter_groups(model, weight_decay=0.0)
    optimizer = lowbit.optim.AdamW8bit(groups, lr=config.lr, bf16_stochastic_round=True)
    sizes = {"batch_size": config.batch_size, "context": config.context, "seed": config.seed}
    for step in tqdm(range(config.steps), desc="QAT of experts", leave=False):
        tokens, _ = text.batch(data.train, step, **sizes)
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    tokens = tokens.to(choose_device())
    found: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return found


@torch.no_grad()
def heldout_loss(model: Any, data: text.Data, config: Config) -> float:
    windows = text.windows_of(data.heldout, config.context, config.heldout_tokens)
    return sum(loss_of(model, one).item() for one in windows.split(1)) / len(windows)


def run(options: argparse.Namespace) -> None:
    config, out = override(Config(), options.set), Path(options.out)
    model = lowbit.load_pretrained(options.model, device=choose_device())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = text.by_tokenizer(tokenizer, options.data, "stdlib", 0.03)
    print(f"held-out loss, published: {heldout_loss(model, data, config):.4f} nats a token")
    train(model, data, config)
    print(f"held-out loss, trained:   {heldout_loss(model, data, config):.4f}")
    lowbit.qat.convert_(model)
    report = lowbit.export(model, out, like=options.model)
    print(f"{out}: {report.notes[0]}")
    written = lowbit.load_pretrained(out, device=choose_device())
    print(f"held-out loss, written:   {heldout_loss(written, data, config):.4f}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.packed.kimi_int4_qat")
    parser.add_argument("--model", required=True, help="the folder of a model with int4 experts")
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
