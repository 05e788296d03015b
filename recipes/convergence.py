"""Does low-bit training reach the same loss? One model, trained once for each way to keep weights and states.

    python -m recipes.convergence --preset gpu [--runs fp32,4bit] [--seeds 0,1,2] [--minutes 9]
    python -m recipes.convergence --report DIR

The model, the text, the batches and the learning rate are the quick start's (`recipes.quickstart`). Every run computes
with bfloat16 weights and activations, and in float32 on a CPU. The runs differ in what the optimizer updates and how it
keeps its states:

    fp32, 8bit, float8, 4bit                        float32 weights, rounded to bfloat16 for each forward pass;
                                                    AdamW's states in that format
    bf16-nearest, bf16-stochastic, bf16-corrected   bfloat16 weights without a float32 copy, AdamW's states in float32;
                                                    the new weight rounded to nearest, stochastically, or with the
                                                    bits below bfloat16 kept in one more byte
    int8-products, float8-products                  as fp32; the linear layers of the blocks multiply in 8 bits, forward
                                                    and backward (`lowbit.train`)
    bf16-exact, bf16-momentum                       the same with all bits kept in two more bytes, and with the rounding
                                                    error in the momentum
    int8-weights, int4-weights                      int8 or int4 weights in the blocks, without a copy; the others in
                                                    bfloat16, rounded stochastically
    int8-weights-fp32, -8bit, -4bit, int4-…         the same with the rounding error in the momentum, and AdamW's states
                                                    in that format
    galore, apollo, badam                           as fp32; algorithms that save memory (`recipes.memory_savers`)
    int8-saved                                      as fp32; autograd keeps activations in int8 for the backward pass
    bitnet                                          as fp32; the weights of the blocks are ternary in every product

Runs of one seed start from the same weights and see the same batches, so they are compared seed by seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import platform
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lowbit.train import save_in_int8
from recipes import text
from recipes.command_line import (
    add_choice_of_runs,
    chosen_names,
    chosen_seeds,
    exit_status,
    parser_of,
)
from recipes.convergence_report import summarize, table, write_report
from recipes.convergence_results import append_result, check_settings, read_results, settings
from recipes.convergence_text import cached_data
from recipes.convergence_variants import PRESETS, RUNS, ConvergenceRun, Weights
from recipes.device import choose_device
from recipes.llama import Llama
from recipes.training import (
    TrainingConfig,
    chosen_config,
    learning_rate_factor,
    parameter_groups,
    step_loss,
    window_losses,
)

FOLDER = Path("runs/convergence")
CHECK_EVERY = 25
"""Steps between two checks that the loss is finite: each waits for the device."""


def train_run(
    config: TrainingConfig, variant: ConvergenceRun, data: text.Data, device: torch.device
) -> dict[str, Any]:
    """Train from scratch and measure: the record of a finished run.

    A run whose loss stops being finite has the "final_loss" None, and its curve ends there.

    Args:
        config: settings of the run, its seed among them.
        variant: how the run keeps weights and states.
        data: text to train on, and held-out text.
        device: where the run computes.
    """
    began = time.perf_counter()
    torch.manual_seed(config.seed)
    model = Llama(config.model).to(device)
    weights = Weights(model, variant)
    optimizer = variant.make(
        parameter_groups(weights.trained),
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
    )
    scheduler = LambdaLR(optimizer, learning_rate_factor(config))
    compute = torch.compile(model) if config.compile else model
    saving = save_in_int8(model, min_numel=1024) if variant.saved_in_int8 else nullcontext()
    context = config.model.context
    probes = text.windows_of(data.heldout, context, config.probe_sequences * context)
    tokens = data.train.to(device)  # all of them, so that no step waits for a copy
    curve: list[tuple[int, float]] = []

    def forward(inputs: Tensor) -> Tensor:
        with saving:
            return compute(inputs)

    model.train()
    finite = True
    for step in range(config.steps):
        if step % config.probe_every == 0:
            curve.append((step, mean_loss(model, probes)))
        loss = step_loss(config, forward, tokens, step, device)
        loss.backward()
        nn.utils.clip_grad_norm_(weights.computing, config.grad_clip)
        weights.take_gradients()
        optimizer.step()
        scheduler.step()
        weights.round()
        model.zero_grad()
        if step % CHECK_EVERY == 0 and not math.isfinite(loss.item()):
            finite = False
            break
    final = math.nan
    if finite:
        curve.append((config.steps, mean_loss(model, probes)))
        final = mean_loss(model, text.windows_of(data.heldout, context, config.heldout_tokens))
    return {
        "run": variant.name,
        "seed": config.seed,
        "final_loss": final if math.isfinite(final) else None,
        "curve": [(s, round(v, 5)) for s, v in curve if math.isfinite(v)],
        "seconds": round(time.perf_counter() - began, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "settings": settings(config, data),
    }


def mean_loss(model: Llama, windows: Tensor) -> float:
    """Cross entropy over held-out windows, nats a token."""
    return window_losses(model, windows, bf16=False).mean().item()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    about = "Train one model with low-bit states, weights and products, and compare the losses."
    parser = parser_of("convergence", about, PRESETS)
    add_choice_of_runs(parser, RUNS)
    add = parser.add_argument
    add("--results", type=Path, default=FOLDER / "results.jsonl", metavar="FILE",
        help="finished runs, which are not run again (default: %(default)s)")  # fmt: skip
    add("--cache", type=Path, default=FOLDER / "data", metavar="DIR",
        help="keeps tokenizer and tokens (default: %(default)s)")  # fmt: skip
    add("--minutes", type=float, default=math.inf,
        help="start no run that would end after so many, judged by the last run (default: no limit)")  # fmt: skip
    add("--report", type=Path, metavar="DIR",
        help="write the table and the curves of --results to DIR, and train nothing")  # fmt: skip
    return parser.parse_args(arguments)


def train_all(options: argparse.Namespace) -> None:
    """Train every chosen run that is not in the results yet, seed by seed, so that finished seeds can be compared."""
    began = time.perf_counter()
    device = choose_device()
    config = chosen_config(PRESETS, options, device)
    seeds = chosen_seeds(options.seeds)
    chosen = [RUNS[name] for name in chosen_names(options.runs, RUNS)]
    wanted = [(dataclasses.replace(config, seed=s), variant) for s in seeds for variant in chosen]
    data = cached_data(config, options.data, options.cache)
    records = read_results(options.results)
    check_settings(records, settings(config, data), options.results)
    done = {(r["seed"], r["run"]) for r in records}
    left = [(own, variant) for own, variant in wanted if (own.seed, variant.name) not in done]
    print(
        f"{len(wanted) - len(left)} of {len(wanted)} runs are done; {config.steps} steps on {device}"
    )
    command = ["python", "-m", "recipes.convergence", "--preset", config.preset]
    command += [word for assignment in options.assignments for word in ("--set", assignment)]
    longest = 0.0
    for i, (own, variant) in enumerate(left):
        started = time.perf_counter()
        if (started - began + longest) / 60 > options.minutes:
            print(f"{len(left) - i} runs are left for another {options.minutes:g} minutes")
            break
        record = {**train_run(own, variant, data, device), "command": shlex.join(command)}
        append_result(options.results, record)
        records.append(record)
        longest = time.perf_counter() - started
        loss = "diverged" if record["final_loss"] is None else f"{record['final_loss']:.4f}"
        line = f"{variant.name:<16} seed {own.seed}  held-out loss {loss}  {longest:6.1f} s"
        print(line, flush=True)
    print(table(summarize(records)))


def report_results(options: argparse.Namespace) -> None:
    write_report(read_results(options.results), options.report)
    for name in ("convergence.md", "convergence.png"):
        print(options.report / name)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parse(arguments)
    program = train_all if options.report is None else report_results
    return exit_status(lambda: program(options))


if __name__ == "__main__":
    sys.exit(main())
