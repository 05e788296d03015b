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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import lowbit
from recipes import text
from recipes.command_line import UserError, exit_status
from recipes.device import choose_device
from recipes.packed import recipe
from recipes.packed.recipe import batches, parser


@dataclass(frozen=True)
class Config(recipe.Config):
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise UserError(f"temperature is {self.temperature}; accepted: a number above 0")


def train(model: Any, data: text.Data, config: Config, *, teacher: Any) -> Any:
    """Train all weights in place towards the logits of the teacher, those of NVFP4 on their grid."""
    lowbit.qat.prepare_(model)
    model.requires_grad_(True).train()
    weights = [*model.parameters()]
    distill = lowbit.qat.Distillation(model, teacher, temperature=config.temperature)
    optimizer = lowbit.optim.AdamW8bit(weights, lr=config.lr, bf16_stochastic_round=True)
    for tokens in batches(data, config):
        distill(input_ids=tokens, use_cache=False).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def divergence(model: Any, tokens: Tensor, *, teacher: Any) -> Tensor:
    """Kullback-Leibler divergence of the model's logits from the teacher's, in nats a token."""
    own, taught = (m(input_ids=tokens, use_cache=False).logits for m in (model, teacher))
    return lowbit.qat.distillation_loss(own, taught)


def run(options: argparse.Namespace) -> None:
    teacher: Any = AutoModelForCausalLM.from_pretrained(options.teacher, dtype="auto")
    given, own = (
        c.get_text_config().vocab_size
        for c in (teacher.config, AutoConfig.from_pretrained(options.model))
    )
    if given != own:
        raise UserError(
            f"--teacher has {given} tokens, and --model {own}; they must have the same tokenizer"
        )
    teacher.to(choose_device()).eval()
    recipe.run(
        options,
        Config(),
        partial(train, teacher=teacher),
        loss=partial(divergence, teacher=teacher),
        label="KL to the teacher",
    )


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    taken = parser("nvfp4_distill", model="the folder of a model in NVFP4")
    taken.add_argument("--teacher", required=True, help="the model in high precision")
    options = taken.parse_args(arguments)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
