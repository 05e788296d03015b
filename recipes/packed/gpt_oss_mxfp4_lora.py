"""LoRA on gpt-oss over its MXFP4 experts, merged and written back into the published folder.

    hf download openai/gpt-oss-20b --local-dir gpt-oss-20b
    python -m recipes.packed.gpt_oss_mxfp4_lora --model gpt-oss-20b --out runs/gpt_oss
                                                [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

The experts stay packed. Their products read the codes, and gradients pass through them to PEFT's adapters of the
attention. The folder has the attention in bfloat16, so merging the adapters rounds no codes. OUT/model has the names,
dtypes, shards and config.json of the published folder, and its experts have the published bytes. OUT/adapter holds the
adapters for PEFT. Without --data, the text is the Python standard library.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
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
    lr: float = 2e-4
    rank: int = 16
    heldout_tokens: int = 50_000
    seed: int = 0


def trained(model: Any, data: text.Data, config: Config) -> Any:
    """The model with adapters of its attention, which alone train."""
    torch.manual_seed(config.seed)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=2 * config.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    )
    adapted: Any = get_peft_model(model, lora)
    adapted.train()
    adapters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = lowbit.optim.AdamW8bit(adapters, lr=config.lr)
    sizes = {"batch_size": config.batch_size, "context": config.context, "seed": config.seed}
    for step in tqdm(range(config.steps), desc="LoRA", leave=False):
        tokens, _ = text.batch(data.train, step, **sizes)
        loss_of(adapted, tokens).backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    return adapted


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
    adapted = trained(model, data, config)
    print(f"held-out loss, adapted:   {heldout_loss(adapted, data, config):.4f}")
    adapted.save_pretrained(out / "adapter")
    report = lowbit.export(adapted.merge_and_unload(), out / "model", like=options.model)
    print(f"{out / 'model'}: {report.notes[0]}")
    written = lowbit.load_pretrained(out / "model", device=choose_device())
    print(f"held-out loss, written:   {heldout_loss(written, data, config):.4f}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.packed.gpt_oss_mxfp4_lora")
    parser.add_argument("--model", required=True, help="the folder of a gpt-oss model")
    parser.add_argument("--data", type=Path, help="text; default: the Python standard library")
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parse(arguments)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
