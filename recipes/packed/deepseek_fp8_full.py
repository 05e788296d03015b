"""Full fine-tuning of a DeepSeek-V3 in its float8 blocks, written back into the published folder.

    python -m recipes.packed.deepseek_fp8_full --model DeepSeek-V3 --out runs/deepseek
                                               [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

Every parameter trains: float8 weights with the scales of their blocks, norms, routers, embeddings and the head. Each
product rounds its weight to the blocks and its input to float8, as a server does, so that the written folder computes
what was trained. The scales start from the published ones: before the first step the model is the published one.

A float8 weight is one byte an element in the folder. In training it is bfloat16 with one byte of correction, and two
bytes of optimizer states: 5 bytes beside a gradient of 2. Folders whose scales are powers of two ("scale_fmt": "ue8m0",
DeepSeek-V3.1) keep their scales: --set learn_scales=False.
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
    learn_scales: bool = True
    heldout_tokens: int = 50_000
    seed: int = 0


def train(model: Any, data: text.Data, config: Config) -> None:
    """Train all parameters in place, on the grid of the folder."""
    lowbit.qat.prepare_(model, scales="learned")
    model.requires_grad_(True).train()
    groups = lowbit.qat.parameter_groups(model, weight_decay=0.0)
    if not config.learn_scales:
        for scale in groups.pop()["params"]:
            scale.requires_grad_(False)
    optimizer = lowbit.optim.AdamW8bit(groups, lr=config.lr, weight_correction="8bit")
    sizes = {"batch_size": config.batch_size, "context": config.context, "seed": config.seed}
    for step in tqdm(range(config.steps), desc="full fine-tuning", leave=False):
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
    parser = argparse.ArgumentParser(prog="python -m recipes.packed.deepseek_fp8_full")
    parser.add_argument("--model", required=True, help="the folder of a model in float8 blocks")
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
