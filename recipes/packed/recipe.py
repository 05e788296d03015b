"""What the recipes of this folder share: options, text, losses, and the folder opened first and written last.

Each recipe has its training loop in a file of its own, as `train`, and passes it to `run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

import lowbit
from recipes import text
from recipes.command_line import UserError, override
from recipes.device import choose_device


@dataclass(frozen=True)
class Config:
    """Lengths in steps of `batch_size * context` tokens."""

    steps: int = 200
    batch_size: int = 4
    context: int = 512
    lr: float = 1e-5
    heldout_tokens: int = 50_000
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(0, steps=self.steps, seed=self.seed, lr=self.lr)
        at_least(1, **{n: getattr(self, n) for n in ("batch_size", "context", "heldout_tokens")})


def at_least(least: int, **settings: float) -> None:
    """UserError for a setting below `least`."""
    for name, value in settings.items():
        if not value >= least:
            raise UserError(f"{name} is {value}; accepted: {least} or more")


def parser(name: str, model: str) -> argparse.ArgumentParser:
    """The options of every recipe.

    Args:
        name: the recipe's file, without `.py`.
        model: what --model names, said by --help.
    """
    made = argparse.ArgumentParser(prog=f"python -m recipes.packed.{name}")
    made.add_argument("--model", required=True, help=model)
    made.add_argument("--data", type=Path, help="text; default: the Python standard library")
    made.add_argument("--out", required=True, type=Path, help="the folder to write")
    made.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return made


def batches(data: text.Data, config: Config) -> Iterator[Tensor]:
    """The tokens of each step, int64 [batch_size, context] on the device."""
    for step in tqdm(range(config.steps), desc="training", leave=False):
        tokens, _ = text.batch(
            data.train,
            step,
            batch_size=config.batch_size,
            context=config.context,
            seed=config.seed,
        )
        yield tokens.to(choose_device())


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token, in nats a token."""
    found: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return found


def check_text(data: text.Data, model: Any, config: Config) -> None:
    """UserError for a text without a window for training or one that is held out, or with unknown tokens."""
    for name, tokens, least in (
        ("training", data.train, 2 * config.context + 1),
        ("held-out", data.heldout, config.context + 1),
    ):
        if len(tokens) < least:
            raise UserError(
                f"the {name} text has {len(tokens)} tokens, and context={config.context} takes {least}; give more "
                "text by --data (several files: some are held out), or a smaller --set context="
            )
    known = model.get_input_embeddings().weight.shape[0]
    if (largest := int(torch.cat([data.train, data.heldout]).max())) >= known:
        raise UserError(
            f"the tokenizer gives token {largest}, and the model has {known}; take the tokenizer of this model"
        )


@torch.no_grad()
def heldout(
    loss: Callable[[Any, Tensor], Tensor], model: Any, data: text.Data, config: Config
) -> float:
    """The mean of `loss` over windows of the text that is held out."""
    windows = text.windows_of(data.heldout, config.context, config.heldout_tokens)
    each = (loss(model, one).item() for one in windows.to(choose_device()).split(1))
    return sum(each) / len(windows)


def converted(model: Any, data: text.Data, config: Config) -> Any:
    """The model after QAT, its weights in low bits."""
    lowbit.qat.convert_(model)
    return model


def run(
    options: argparse.Namespace,
    defaults: Config,
    train: Callable[[Any, text.Data, Any], Any],
    *,
    loss: Callable[[Any, Tensor], Tensor] = loss_of,
    label: str = "held-out loss",
    finish: Callable[[Any, text.Data, Any], Any] = converted,
    beside: Sequence[Path] = (),
) -> None:
    """Open the folder, train its model, and write it back in its own format, with the loss after each.

    Args:
        options: of `parser`.
        defaults: settings, which `--set` changes.
        train: gets the model, the text and the settings, and returns the trained model.
        loss: of a model on tokens, int64 [1, context + 1].
        label: the name of `loss` in what is printed.
        finish: makes the trained model, with the text and the settings, one with the folder's own weights.
        beside: folders that are written too.

    Raises UserError before anything trains: folders to write that exist; a text that is too short, or has tokens that
    the model lacks; a folder without low-bit weights.
    """
    config, device = override(defaults, options.set), choose_device()
    for folder in (options.out, *beside):
        if folder.exists():
            raise UserError(f"{folder} exists already; give another --out")
    if not options.out.parent.is_dir():
        raise UserError(f"{options.out.parent} is not a folder; make it first")
    model = lowbit.load_pretrained(options.model, device=device)
    if not any(isinstance(p, lowbit.LowbitTensor) for p in model.parameters()):
        raise UserError(f"--model {options.model} has no weight in low bits")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = text.by_tokenizer(tokenizer, options.data, "stdlib", 0.03)
    check_text(data, model, config)
    print(f"{label}, published: {heldout(loss, model, data, config):.4f} nats a token")
    model = train(model, data, config)
    print(f"{label}, trained:   {heldout(loss, model, data, config):.4f}")
    report = lowbit.export(finish(model, data, config), options.out, like=options.model)
    print(f"{options.out}: {report.notes[0]}")
    written = lowbit.load_pretrained(options.out, device=device)
    print(f"{label}, written:   {heldout(loss, written, data, config):.4f}")
