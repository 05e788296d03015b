"""QAT of int4 experts, as Kimi K2 Thinking has them, written back into the published folder.

    hf download moonshotai/Kimi-K2-Thinking --local-dir kimi
    python -m recipes.packed.kimi_int4_qat --model kimi --out runs/kimi
                                           [--data FILE_OR_FOLDER] [--set NAME=VALUE ...]

Experts take nearly all of the memory. Those of the last layers are unpacked and train in their own int4 grid, and those
below stay packed: gradients stop above them. Scales start from the published ones and train too. An expert that no
token reached, and all that does not train, keeps its published bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

import lowbit
from recipes import text
from recipes.command_line import exit_status
from recipes.packed import recipe
from recipes.packed.recipe import at_least, batches, loss_of, parser, run


@dataclass(frozen=True)
class Config(recipe.Config):
    layers: int = 2
    """Experts of the last so many layers train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, layers=self.layers)


def train(model: Any, data: text.Data, config: Config) -> Any:
    """Train the experts of the last layers, and their scales, in place. All other weights stay, packed ones packed."""
    model.requires_grad_(False)
    last = model.model.layers[-config.layers :]
    chosen = {module for layer in last for module in layer.modules()}
    lowbit.qat.prepare_(model, filter_fn=lambda module, _: module in chosen, scales="learned")
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
    options = parser("kimi_int4_qat", model="the folder of a model with int4 experts").parse_args(
        arguments
    )
    return exit_status(lambda: run(options, Config(), train))


if __name__ == "__main__":
    sys.exit(main())
