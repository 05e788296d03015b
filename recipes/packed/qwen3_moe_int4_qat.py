"""QAT of a Qwen3-MoE in int4: attention and experts train in the folder's own grid, and are written back into it.

    lowbit quantize Qwen3-30B-A3B --scheme int4 --out qwen3-int4           # or a published int4 folder
    python -m recipes.packed.qwen3_moe_int4_qat --model qwen3-int4 --out runs/qwen3
                                                [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

The folder says which weights are in int4 and in which groups. `qat.prepare_` without a scheme takes each of them by its
own one. Scales start from the stored ones and train too. What every product saw in training is what the folder stores,
and an expert that no token reached keeps its published bytes.
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
    """Train the int4 weights and their scales in place. Norms, routers, embeddings and the head stay."""
    model.requires_grad_(False)
    lowbit.qat.prepare_(model, scales="learned")
    model.train()
    groups = lowbit.qat.parameter_groups(model, weight_decay=0.0)
    optimizer = lowbit.optim.AdamW8bit(groups, lr=config.lr, bf16_stochastic_round=True)
    for tokens in batches(data, config):
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parser("qwen3_moe_int4_qat", model="the folder of a Qwen3-MoE in int4").parse_args(
        arguments
    )
    return exit_status(lambda: run(options, Config(), train))


if __name__ == "__main__":
    sys.exit(main())
