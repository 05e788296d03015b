"""8B on one card: steps of `recipes.one_card` beside those of bfloat16 weights, the table of docs/training.md.

    python -m recipes.one_card_table [--data TEXT] [--rows NAME …] [--steps 20] [--model 8b]

Each row is a process. Those of low-bit weights are the recipe's command with --measure, which prints the row. Those of
bfloat16 have torch's fused AdamW, all gradients at once, a plain loss of all logits, and the recipe's checkpoints,
batches and first pass; their weights are made on the GPU. "compiled" has the recipe's compiled blocks and CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from recipes import one_card, pages, text
from recipes.command_line import UserError, exit_status
from recipes.device import choose_device
from recipes.graphed_step import GraphedStep

PLAIN = {"bf16": False, "bf16 compiled": True}
"""The rows of bfloat16 weights, and whether blocks are compiled and a graph replays the step."""
RECIPE = {
    "int8 products": ["int8_products=True", "memory_gib=24"],
    "int8 products eager": ["int8_products=True", "memory_gib=24", "compiled=False"],
    "int8": ["memory_gib=24"],
    "int4 products": ["weights=int4", "int8_products=True", "memory_gib=14.4"],
    "int4": ["weights=int4", "memory_gib=14.4"],
}
"""The rows of the recipe, and their settings."""
HEADER = ["weights", "GiB", "ms", "tokens/s", *(f"of {name}" for name in PLAIN)]


def train_plain(
    model_name: str, data: Path | None, steps: int, fast: bool, context: int = 2048
) -> None:
    """Train bfloat16 weights, and print figures as the recipe does. `fast`: compiled, in a graph; on a GPU."""
    config, device = one_card.Config(steps=steps, context=context), choose_device()
    tokens = one_card.tokens_of(model_name, data)
    torch.manual_seed(config.seed)
    with device:
        shape = one_card.shape_of(model_name, config)
        model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).train()
    some = tokens[:context].to(device)
    hidden, draws = one_card.first_pass(model, some, config)
    if fast:
        one_card.leave_out_masks(model, some, hidden)
    one_card.checkpoint_blocks(model, draws, compiled=fast)
    rate: Any = torch.tensor(config.lr, device=device) if fast else config.lr
    how = {"fused": True, "capturable": True} if fast else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.0, **how)
    run: Any = partial(plain_step, model, optimizer)
    run, seconds = GraphedStep(run) if fast else run, []
    for step in range(steps):
        began = time.perf_counter()
        sizes = {"batch_size": config.batch_size, "context": context, "seed": config.seed}
        inputs, targets = text.batch(tokens, step, **sizes)
        loss = run(inputs.to(device), targets.to(device)).item()
        seconds.append(time.perf_counter() - began)
    print(f"loss {loss:.4f}")
    one_card.print_figures("bf16", seconds, config.batch_size * context, device)


def plain_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def figures_in(printed: str) -> list[str]:
    """The cells of the last table that a run printed, without its settings: GiB, ms, tokens/s."""
    row = [line for line in printed.splitlines() if line.startswith("|")][-1]
    return [cell.strip() for cell in row.strip("|").split("|")[1:]]


def table_of(rows: dict[str, list[str]]) -> str:
    """The Markdown table of the figures of rows, with tokens a second beside those of each row of bfloat16."""
    speeds = {name: float(cells[2].replace(",", "")) for name, cells in rows.items()}

    def ratio(name: str, plain: str) -> str:
        return f"{speeds[name] / speeds[plain]:.2f}" if plain in rows and name != plain else ""

    cells = [[name, *row, *(ratio(name, plain) for plain in PLAIN)] for name, row in rows.items()]
    return pages.table(HEADER, cells)


def main(arguments: list[str] | None = None) -> int:
    """Return what the recipe's `main` does: 0 when done, 2 after a mistake that the user can correct."""
    known = [*PLAIN, *RECIPE]
    parser = argparse.ArgumentParser(
        prog="python -m recipes.one_card_table", description="Time 8B on one card."
    )
    parser.add_argument("--model", default="8b", choices=one_card.SHAPES)
    parser.add_argument("--data", type=Path, help="text; default: the Python standard library")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--rows", nargs="+", default=known, choices=known, metavar="NAME", help=", ".join(known)
    )
    parser.add_argument("--plain", choices=PLAIN, help=argparse.SUPPRESS)  # the process of a row
    options = parser.parse_args(arguments)
    return exit_status(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    if choose_device().type != "cuda":
        raise UserError(
            "the table is of a GPU, whose memory its rows limit, and there is none; on a CPU give the recipe's "
            "command: python -m recipes.one_card --model tiny --measure --set steps=20 --set context=128"
        )
    if options.plain:
        train_plain(options.model, options.data, options.steps, PLAIN[options.plain])
        return
    rows, given = {}, ["--data", str(options.data)] if options.data else []
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name in options.rows:
        line = ["recipes.one_card_table", "--plain", name, "--steps", str(options.steps)]
        if name in RECIPE:
            settings = [f"steps={options.steps}", *RECIPE[name]]
            line = ["recipes.one_card", "--measure"]
            line += [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", *line, "--model", options.model, *given]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"{name} failed, and its error stands above: {' '.join(command)}")
        rows[name] = figures_in(done.stdout)
        print(f"{name}: {', '.join(rows[name])}", flush=True)
    print(table_of(rows))


if __name__ == "__main__":
    sys.exit(main())
