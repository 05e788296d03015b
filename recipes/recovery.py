"""How much of the loss that rounding costs does QAT win back? One language model, fine-tuned in several ways.

    python -m recipes.recovery [--preset tiny|gpu] [--seeds 0,1,2] [--runs NAME,NAME] [--base-only] [--out DIR]

The model, the text, the batches and the learning rate are the quick start's (`recipes.quickstart`), and so is the
training: for each seed a trunk in high precision, and from its end branches of the same batches, one of them in high
precision. The others train with QAT:

    g32-int4, g32-int3, g32-int2    one scale for 32 inputs; learned scales, part of the loss from the model "high"
    row-int4                        one scale a row
    g32-int8xint4                   int4 weights in groups of 32, and activations in int8, a scale a token
    lora-int4, lora-int2            as g32-, but adapters of PEFT train in place of the blocks' weights, and are merged
                                    before the sum is rounded; norms and the embedding, which is the head too, train
                                    themselves; "lora-high" is the same in high precision
    plain-int4, -int3, -int2        straight-through rounding by the present scales, cross-entropy alone, as many steps
    compute-int4, -int3, -int2      the same for as much compute: a step with a teacher computes a third more

    won back = (loss rounded − loss after QAT) / (loss rounded − loss in high precision), in nats of held-out text

"Rounded" is the branch in high precision ("high", or "lora-high"), rounded by min-max with the run's own scheme. At 2
bits, where QAT trains on the half-integer grid {−1.5, −0.5, 0.5, 1.5}, it is rounded to the usual grid {−2, −1, 0, 1},
and the table has a row against the half-integer grid too. The intervals are bootstraps over windows of held-out text. A
run that was stopped goes on where it was: OUT/results.json has the finished runs, and OUT/seed0 and so on are run
folders of the quick start, with the last checkpoint of an unfinished one.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import lowbit
from recipes import runs, text
from recipes.command_line import (
    add_choice_of_runs,
    chosen_names,
    chosen_seeds,
    exit_status,
    parser_of,
)
from recipes.device import choose_device
from recipes.phases import Phase, Run, high_precision_model, phases, start_or_resume, train_phase
from recipes.recovery_report import Results, share_of, table, write_page
from recipes.recovery_variants import PRESETS, RUNS
from recipes.training import TrainingConfig, chosen_config, prepare_text, window_losses


def phase_of(run: Run, name: str) -> tuple[Run, Phase]:
    """The phase of a variant, and the run with the settings that it trains by."""
    variant, config = RUNS[name], run.config
    branch = round(variant.length * config.branch_steps)
    own = dataclasses.replace(
        config,
        steps=config.trunk_steps + branch,
        branch_steps=branch,
        kl_weight=config.kl_weight if variant.distils else 0.0,
        group_size=variant.group_size,
    )
    phase = Phase(
        name, own.trunk_steps, own.steps, variant.scheme(own),
        variant.scales, variant.rank, variant.control,
    )  # fmt: skip
    return dataclasses.replace(run, config=own), phase


def train_base(run: Run, results: Results) -> None:
    """Train in high precision, and measure that model."""
    if results.has(run, "high"):
        return
    seconds = 0.0
    for phase in [phase for phase in phases(run.config) if phase.scheme is None]:
        train_phase(run, phase)
        seconds += runs.load_checkpoint(run.folder.checkpoint(phase.name))["seconds"]
    results.add(run, "high", measured(run, high_precision_model(run), seconds, run.config.steps))


def round_variant(run: Run, name: str, results: Results) -> None:
    """Measure the models in high precision that are rounded after training to the variant's formats."""
    for rounded, own in RUNS[name].rounded_models(run.config).items():
        if not results.has(run, rounded):
            model = high_precision_model(run, RUNS[name].control, RUNS[name].rank)
            lowbit.quantize_(model, own, scales="minmax")
            results.add(run, rounded, measured(run, model, 0.0, run.config.steps))


def train_variant(run: Run, name: str, results: Results) -> None:
    """Train one variant, convert it, and measure it."""
    own, phase = phase_of(run, name)
    train_phase(own, phase)
    training = start_or_resume(own, phase)
    if phase.scheme is not None:
        lowbit.qat.convert_(training.model)
    results.add(run, name, measured(run, training.model, training.seconds, phase.end))
    if phase.scheme is not None:  # a control teaches, and is rounded, later
        run.folder.checkpoint(name).unlink()  # 0.5 GB of a model of 100M parameters


def measured(run: Run, model: Any, seconds: float, steps: int) -> dict[str, Any]:
    """The record of a finished model.

    Args:
        run: the run, whose held-out text measures.
        model: the finished model.
        seconds: time of its training.
        steps: optimizer steps that it has taken.
    """
    windows = run.heldout_windows(run.config.heldout_tokens)
    losses = window_losses(model, windows, run.config.bf16)
    return {
        "loss": losses.mean().item(),
        "steps": steps,
        "seconds": round(seconds, 1),
        "losses": [round(x, 5) for x in losses.tolist()],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    about = "Fine-tune one model with QAT in several ways and compare what each wins back."
    parser = parser_of("recovery", about, PRESETS)
    add_choice_of_runs(parser, RUNS)
    add = parser.add_argument
    add("--base-only", action="store_true", help="train in high precision alone")
    add("--out", type=Path, default=Path("runs/recovery"), metavar="DIR",
        help="results and checkpoints; runs that it has are not run again (default: %(default)s)")  # fmt: skip
    return parser.parse_args(arguments)


def open_seed(options: argparse.Namespace, config: TrainingConfig, device: torch.device) -> Run:
    """The run folder of a seed, made at its first use. All seeds share the text of the first one."""
    folder = runs.RunFolder(options.out / f"seed{config.seed}")
    others = sorted(options.out.glob("seed*/config.json"))
    if (folder.path / "config.json").exists():
        data = text.load(folder.data)
    elif others:
        data = text.load(runs.RunFolder(others[0].parent).data)
    else:
        data = prepare_text(config, options.data)
    if not (folder.path / "config.json").exists():
        folder.create(dataclasses.asdict(config), data)
    tracker = runs.Tracker(folder, dataclasses.asdict(config), "disabled")
    return Run(config, folder, data, tracker, device)


def train_all(options: argparse.Namespace) -> None:
    """Train every chosen run that is not in the results yet, seed by seed."""
    device = choose_device()
    config = chosen_config(PRESETS, options, device)
    chosen = [] if options.base_only else chosen_names(options.runs, RUNS)
    seeds = chosen_seeds(options.seeds)
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out, config, device)
    results.note(command_of(config.preset, options))
    for seed in seeds:
        run = open_seed(options, dataclasses.replace(config, seed=seed), device)
        try:
            train_seed(run, chosen, results)
        finally:
            run.tracker.close(0)
        write_page(options.out, results)
    print(f"{table(results.content)}\nreport: {options.out / 'report.md'}")


def train_seed(run: Run, chosen: list[str], results: Results) -> None:
    """What is left of one seed."""
    seed = run.config.seed
    train_base(run, results)
    print(f"high precision, seed {seed}: held-out loss {results.of(run, 'high')['loss']:.4f}")
    controls = [RUNS[name].control for name in chosen if RUNS[name].control in RUNS]
    for name in dict.fromkeys([*controls, *chosen]):
        round_variant(run, name, results)
        if results.has(run, name):
            continue
        train_variant(run, name, results)
        share = share_of({str(seed): results.content["seeds"][str(seed)]}, name)
        won = "" if share is None else f"  {share.mean:5.1f}% won back"
        print(f"{name:<16} seed {seed}  loss {results.of(run, name)['loss']:.4f}{won}", flush=True)


def command_of(preset: str, options: argparse.Namespace) -> str:
    """The command line, without the folders of this machine."""
    words = ["python", "-m", "recipes.recovery", "--preset", preset, "--seeds", options.seeds]
    words += ["--runs", options.runs] if options.runs else []
    words += ["--base-only"] if options.base_only else []
    words += [word for assignment in options.assignments for word in ("--set", assignment)]
    return shlex.join(words)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    return exit_status(lambda: train_all(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
