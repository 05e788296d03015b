"""The quick start: text in, a trained, fine-tuned and converted low-bit language model and a report out.

    python -m recipes.quickstart [--preset tiny|small|gpu] [--data FILE_OR_FOLDER] [--out DIR] [--resume [DIR]]
    python -m recipes.quickstart --evaluate RUN

The program trains with AdamW4bit (`phases.py`), in branches that differ in their precision only, then measures
(`quickstart_measure.py`) and reports (`quickstart_report.py`):

    steps 0 … trunk_steps          "trunk"  high precision
    trunk_steps … steps            "high"   high precision
                                   "int4"   the same steps with the weights rounded to 4 bits in every product (QAT),
                                            by scales that are trained too, mostly towards "high"
                                   "int3", "int2"   …to 3 and 2 bits

Each branch starts from the trunk's weights. It sees the same batches in the same order at the same learning rate. So a
QAT model that is better than the rounded "high" model does not owe this to more training. The branch in high precision
goes on with the trunk's optimizer states, which is a little better for it than new ones. QAT starts with new ones,
which is much better for QAT (benchmarks/LOG.md).

Every step is a function of the seed, the step number and the checkpoint. So a run that was interrupted and resumed
equals one that was not: on a CPU, to the bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

# OpenMP reads this when torch is first imported. Threads that wait actively slow each other down on a busy machine:
# one busy core of two made a step 5 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    from recipes import pages, runs, text
    from recipes.command_line import EXIT_INTERRUPTED, UserError, exit_status, parser_of
    from recipes.device import choose_device
    from recipes.phases import Run, phases, train_phase
    from recipes.presets import PRESETS
    from recipes.quickstart_measure import Measurements, evaluate_saved, measure
    from recipes.quickstart_report import draw_figures, report, slowness
    from recipes.training import TrainingConfig, chosen_config, prepare_text
except ImportError as error:
    if __name__ != "__main__":
        raise
    install = 'install all that the recipes need with: pip install -e ".[recipes]"'
    print(f"error: a package is missing ({error}); {install}", file=sys.stderr)
    sys.exit(2)

RUNS = Path("runs")


def train_and_report(run: Run) -> Measurements:
    """Do all that is left of a run, and write its report."""
    config = run.config
    print(
        f"training on {run.device}: {config.steps} steps of {config.step_tokens} tokens, preset {config.preset}"
    )
    for phase in phases(config):
        train_phase(run, phase)
    for kind in ("result", "recovery"):  # records of an earlier measurement
        run.tracker.drop(kind)
    found = measure(run)
    run.tracker.flush()
    draw_figures(run, found)
    pages.write(run.folder.path, report(run, found))
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(
        "quickstart",
        "Train a small language model with AdamW4bit, fine-tune it with QAT, convert it to int4, and report what "
        "each step costs and gains.",
        PRESETS,
        "tiny: minutes on 2 CPU cores; small: under an hour; gpu: minutes on a datacentre GPU; ",
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR",
        help="the run folder, new or empty (default: runs/PRESET-TIME)")  # fmt: skip
    add("--resume", nargs="?", const="", metavar="DIR",
        help="resume the run in DIR, with its settings and data (default: the latest in runs/)")  # fmt: skip
    add("--wandb", choices=("offline", "online", "disabled"), default="disabled",
        help="log to Weights & Biases as well (default: disabled)")  # fmt: skip
    add("--evaluate", type=Path, metavar="RUN",
        help="only load the saved models of RUN and print {name: held-out perplexity} as JSON")  # fmt: skip
    return parser.parse_args(arguments)


def open_run(options: argparse.Namespace) -> Run:
    """A new run, or the one to resume."""
    runs.check_wandb(options.wandb)
    if options.resume is not None:
        for name in ("preset", "out", "data", "assignments"):
            if getattr(options, name):
                option = "--set" if name == "assignments" else f"--{name}"
                raise UserError(
                    f"{option} doesn't go with --resume: a run keeps its settings and data"
                )
        folder = runs.RunFolder(Path(options.resume)) if options.resume else runs.latest(RUNS)
        config = TrainingConfig.from_dict(folder.settings())
        data = text.load(folder.data)
    else:
        config = chosen_config(PRESETS, options, choose_device())
        folder = runs.RunFolder(
            options.out or RUNS / f"{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        folder.check_free()
        data = prepare_text(config, options.data)
        folder.create(dataclasses.asdict(config), data)
    tracker = runs.Tracker(folder, dataclasses.asdict(config), options.wandb)
    return Run(config, folder, data, tracker, choose_device())


def train_from(options: argparse.Namespace) -> None:
    try:
        run = open_run(options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was written") from None
    status = 1
    try:
        found = train_and_report(run)
        status = 0
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        resume = f"resume with python -m recipes.quickstart --resume {run.folder.path}"
        raise KeyboardInterrupt(resume) from None
    finally:
        run.tracker.close(status)
    if (slow := slowness(found)) is not None:
        print(slow)
    for result in found.results:
        print(
            f"{result.label:<30} perplexity {result.perplexity:8.3f}   {result.file_bytes:>12,} bytes   "
            f"generates {result.generate_tokens_per_s:8,.0f} tokens/s"
        )
    print(f"report: {run.folder.path / 'report.md'} and {run.folder.path / 'report.html'}")


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parse(arguments)
    if options.evaluate is None:
        return exit_status(lambda: train_from(options))
    return exit_status(lambda: print(json.dumps(evaluate_saved(runs.RunFolder(options.evaluate)))))


if __name__ == "__main__":
    sys.exit(main())
