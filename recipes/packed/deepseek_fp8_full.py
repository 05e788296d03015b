"""Full fine-tuning of a DeepSeek-V3 in its float8 blocks, written back into the published folder.

    python -m recipes.packed.deepseek_fp8_full --model DeepSeek-V3 --out runs/deepseek
                                               [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

Every parameter trains: float8 weights with the scales of their blocks, norms, routers, embeddings and the head. Each
product rounds its weight to the blocks and its input to float8, as a server does, so that the written folder computes
what was trained. The scales start from the published ones: before the first step the model is the published one.

A float8 weight is one byte an element in the folder. In training it is bfloat16 with one byte of correction, and two
bytes of optimizer states: 5 bytes beside a gradient of 2. Scales that are powers of two ("scale_fmt": "ue8m0",
DeepSeek-V3.1) are chosen anew in each step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import lowbit
from recipes import text
from recipes.command_line import exit_status
from recipes.packed.recipe import Config, batches, loss_of, parser, run


def train(model: Any, data: text.Data, config: Config) -> Any:
    """Train all parameters in place, on the grid of the folder."""
    lowbit.qat.prepare_(model, scales="learned")
    model.requires_grad_(True).train()
    groups = lowbit.qat.parameter_groups(model, weight_decay=0.0)
    optimizer = lowbit.optim.AdamW8bit(groups, lr=config.lr, weight_correction="8bit")
    for tokens in batches(data, config):
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parser(
        "deepseek_fp8_full", model="the folder of a model in float8 blocks"
    ).parse_args(arguments)
    return exit_status(lambda: run(options, Config(), train))


if __name__ == "__main__":
    sys.exit(main())
