"""LoRA on gpt-oss over its MXFP4 experts, merged and written back into the published folder.

    hf download openai/gpt-oss-20b --local-dir gpt-oss-20b
    python -m recipes.packed.gpt_oss_mxfp4_lora --model gpt-oss-20b --out runs/gpt_oss
                                                [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

The experts stay packed. Their products read the codes, and gradients pass through them to PEFT's adapters of the
attention. gpt-oss has the attention in bfloat16, so merging the adapters rounds no codes. Where a folder has it in low
bits, the rounding of the merge is learned from a few batches, and what it loses is printed. OUT has the names,
dtypes, shards and config.json of the published folder, and its experts have the published bytes. OUT-adapter holds the
adapters for PEFT. Without --data, the text is the Python standard library.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import lowbit
import lowbit.peft
from lowbit.inference import GPTQ
from recipes import text
from recipes.command_line import exit_status
from recipes.packed import recipe
from recipes.packed.recipe import at_least, batches, loss_of, parser, run

MERGED_BY = 8
"""Batches that the merge learns from."""


@dataclass(frozen=True)
class Config(recipe.Config):
    lr: float = 2e-4
    rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, rank=self.rank)


def train(model: Any, data: text.Data, config: Config) -> Any:
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
    for tokens in batches(data, config):
        loss_of(adapted, tokens).backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return adapted.eval()


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parser("gpt_oss_mxfp4_lora", model="the folder of a gpt-oss model").parse_args(
        arguments
    )

    def merged(adapted: Any, data: text.Data, config: Config) -> Any:
        adapted.save_pretrained(f"{options.out}-adapter")
        given = [*batches(data, replace(config, steps=MERGED_BY))]
        report = lowbit.peft.merge_(adapted, batches=given, steps=[GPTQ()], keep_base=False)
        if report.losses is not None:
            print(report.losses)
        return adapted.merge_and_unload()

    beside = Path(f"{options.out}-adapter")
    return exit_status(lambda: run(options, Config(), train, finish=merged, beside=[beside]))


if __name__ == "__main__":
    sys.exit(main())
