"""LoRA on gpt-oss over its MXFP4 experts, merged and written back into the published folder.

    hf download openai/gpt-oss-20b --local-dir gpt-oss-20b
    python -m recipes.packed.gpt_oss_mxfp4_lora --model gpt-oss-20b --out runs/gpt_oss
                                                [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

The experts stay packed. Their products read the codes, and gradients pass through them to PEFT's adapters of the
attention. The folder has the attention in bfloat16, so merging the adapters rounds no codes. OUT has the names,
dtypes, shards and config.json of the published folder, and its experts have the published bytes. OUT-adapter holds the
adapters for PEFT. Without --data, the text is the Python standard library.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import lowbit
from recipes import text
from recipes.command_line import exit_status
from recipes.packed import recipe
from recipes.packed.recipe import batches, loss_of, parser, run


@dataclass(frozen=True)
class Config(recipe.Config):
    lr: float = 2e-4
    rank: int = 16


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

    def merged(adapted: Any) -> Any:
        adapted.save_pretrained(f"{options.out}-adapter")
        return adapted.merge_and_unload()

    return exit_status(lambda: run(options, Config(), train, finish=merged))


if __name__ == "__main__":
    sys.exit(main())
