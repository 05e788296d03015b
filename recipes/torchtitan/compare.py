"""Does low-bit training reach the same loss under torchtitan? One model, trained once for each way, same batches.

    python -m recipes.torchtitan.tokens --out runs/tokens
    python -m recipes.torchtitan.compare --out runs/compare --processes 2 [--runs bf16,int8] [--steps 1000]
    python -m recipes.torchtitan.compare --out runs/compare --report

Each run is a torchrun of `compare.toml` with the options of its line in `RUNS`; options after `--` go to all of them.
Runs that results.json holds are not repeated, so the program may be called again to do the rest.

OUT/results.json    the loss of every step, tokens a second and peak memory of each run
OUT/report.md       the table; OUT/losses.png the curves
OUT/RUN-SEED/       what torchtitan wrote, with its log

Runs of one seed start from the same weights and see the same batches, so the table compares them step by step with the
mean of both runs in bfloat16, which differ by 0.001% of the learning rate: two runs of one recipe end apart too. The
steps of the last quarter are cut into blocks. The mean difference has the 95% interval of the blocks' means (Student's
t), as neighbouring steps are not independent. Every batch is new, if the text is long enough for one pass, so the
training loss is that of unseen text.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lowbit import optional
from recipes import pages
from recipes.command_line import UserError, exit_status
from recipes.convergence_report import half_interval
from recipes.runs import write_text

HERE = Path(__file__).parent
REFERENCE, AGAIN = "bf16", "bf16-again"
RUNS: dict[str, list[str]] = {
    REFERENCE: [],
    AGAIN: ["--optimizer.lr", "6.00006e-4"],
    "int8": ["--lowbit.train", "int8(always=True)"],
    "int8-nearest": ["--lowbit.train", "int8(always=True, stochastic_rounding=False)"],
    "float8": ["--lowbit.train", "float8(always=True)"],
    "AdamW8bit": ["--optimizer.name", "AdamW8bit"],
    "AdamW4bit": ["--optimizer.name", "AdamW4bit"],
    "int8+AdamW8bit": ["--lowbit.train", "int8(always=True)", "--optimizer.name", "AdamW8bit"],
    "int8-weights": ["--lowbit.train", "int8_weights", "--optimizer.name", "AdamW8bit"],
}
"""torchtitan's options of each run. `always`: the weights of this model are too small for a gain in speed, and the
question here is the loss. `AGAIN` repeats the reference with a learning rate 0.001% larger, which shows how far two
runs of one recipe end apart."""
DEFAULT = "bf16,bf16-again,int8,float8,AdamW8bit,AdamW4bit"
BLOCKS = 10
LOSS, SPEED = "loss_metrics/global_avg_loss", "throughput(tps)"
MEMORY = "memory/max_reserved(GiB)"


# ---- the runs ----------------------------------------------------------------------------------------------------


def command(
    run: str, seed: int, folder: Path, given: argparse.Namespace, extra: list[str]
) -> list[str]:
    """The command line of one run.

    Args:
        run: one of RUNS.
        seed: torchtitan's seed.
        folder: where torchtitan writes its files.
        given: options of the command line of this program.
        extra: options that are passed to torchtitan.
    """
    options = {
        "--job.config_file": given.config,
        "--job.dump_folder": folder,
        "--model.hf_assets_path": given.data,
        "--training.dataset_path": given.data,
        "--training.steps": given.steps,
        "--debug.seed": seed,
    }
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += [f"--nproc-per-node={given.processes}", "-m", "recipes.torchtitan.train"]
    pairs = [str(part) for pair in options.items() for part in pair]
    return [*start, *pairs, *RUNS[run], *extra]


def train(run: str, seed: int, given: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Train one run, and read its record. UserError with the end of its log where it fails.

    Args:
        run: one of RUNS.
        seed: torchtitan's seed.
        given: options of the command line of this program.
        extra: options that are passed to torchtitan.
    """
    folder = given.out / f"{run}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    line = command(run, seed, folder, given, extra)
    print(f"{run}, seed {seed}: {folder}/log.txt", flush=True)
    began = time.perf_counter()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run(line, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
    if done.returncode:
        end = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise UserError(f"{run}, seed {seed} failed with status {done.returncode}:\n{end}")
    read = scalars(folder)
    return {
        "run": run,
        "seed": seed,
        "options": [*RUNS[run], *extra],
        "losses": [read[LOSS][step] for step in sorted(read[LOSS])],
        "tokens_s": statistics.median(list(read[SPEED].values())[1:] or [0.0]),
        "peak_gib": max(read[MEMORY].values()),
        "seconds": time.perf_counter() - began,
        "machine": machine(given.processes),
    }


def machine(processes: int) -> str:
    """The device of the runs, with the version of torch and the date."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{processes} x {device}, torch {torch.__version__}, {datetime.date.today()}"


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Value by step of each metric that torchtitan wrote for TensorBoard, those of the last start."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = sorted(folder.glob("tb/*/events.*"), key=lambda path: path.stat().st_mtime)
    if not written:
        raise UserError(f"{folder} has no record for TensorBoard; keep metrics.enable_tensorboard")
    events = EventAccumulator(str(written[-1]), size_guidance={"scalars": 0}).Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def train_all(given: argparse.Namespace, extra: list[str]) -> None:
    path = given.out / "results.json"
    settings = {"steps": given.steps, "config": Path(given.config).name, "data": str(given.data)}
    results = load_results(path) or {"settings": settings, "runs": []}
    if results["settings"] != settings:
        raise UserError(
            f"{path} holds runs with {results['settings']}, and this is {settings}; give another --out"
        )
    for seed in given.seeds:
        for run in given.runs:
            if any((r["run"], r["seed"]) == (run, seed) for r in results["runs"]):
                print(f"{run}, seed {seed}: done before")
                continue
            results["runs"].append(train(run, seed, given, extra))
            write_text(path, json.dumps(results) + "\n")


def load_results(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


# ---- the report --------------------------------------------------------------------------------------------------


def block_differences(losses: list[float], reference: list[float]) -> list[float]:
    """The mean differences of a run from the reference in the blocks of the last quarter of their steps."""
    count = min(len(losses), len(reference))
    start = count - max(count // 4, 1)
    apart = [a - b for a, b in zip(losses[start:count], reference[start:count], strict=True)]
    size = max(len(apart) // BLOCKS, 1)
    return [statistics.mean(apart[i : i + size]) for i in range(0, len(apart) - size + 1, size)]


def reference_losses(runs: list[dict[str, Any]]) -> dict[int, list[float]]:
    """The losses of bfloat16 by seed: for each step the mean of the runs `REFERENCE` and `AGAIN` that exist."""
    found: dict[int, list[list[float]]] = {}
    for r in runs:
        if r["run"] in (REFERENCE, AGAIN):
            found.setdefault(r["seed"], []).append(r["losses"])
    return {
        seed: [statistics.mean(step) for step in zip(*own, strict=False)]
        for seed, own in found.items()
    }


def table(runs: list[dict[str, Any]]) -> str:
    """One row a way to train, its seeds together."""
    references = reference_losses(runs)
    header = ["run", "seeds", "loss, last quarter", f"against {REFERENCE}", "95% interval"]
    header += ["tokens/s a GPU", "peak GiB"]
    rows = []
    for name in RUNS:
        own = [r for r in runs if r["run"] == name]
        if not own:
            continue
        lasts = [statistics.mean(r["losses"][-max(len(r["losses"]) // 4, 1) :]) for r in own]
        apart = [
            difference
            for r in own
            if r["seed"] in references and r["losses"] != references[r["seed"]]
            for difference in block_differences(r["losses"], references[r["seed"]])
        ]
        half = half_interval(apart)
        last = statistics.mean(lasts)
        mean = statistics.mean(apart) if apart else 0.0
        shown = [f"{mean:+.4f} ({mean / (last - mean):+.2%})" if apart else ""]
        shown += ["" if half is None else f"± {half:.4f}"]
        speed = statistics.median(r["tokens_s"] for r in own)
        peak = max(r["peak_gib"] for r in own)
        measured = [f"{speed:,.0f}", f"{peak:.1f}" if peak > 0 else ""]
        rows.append([name, str(len(own)), f"{last:.4f}", *shown, *measured])
    return pages.table(header, rows, left=(0,)) + "\n"


def report(out: Path) -> None:
    results = load_results(out / "results.json")
    if results is None:
        raise UserError(f"{out} holds no results.json; train first, without --report")
    made = table(results["runs"])
    write_text(out / "report.md", page(results, made))
    print(made)
    draw(out / "losses.png", results["runs"])


def page(results: dict[str, Any], made: str) -> str:
    """The report: where the runs were measured, the table and the curves."""
    machines = "; ".join(sorted({r["machine"] for r in results["runs"] if "machine" in r}))
    head = [
        "# Losses under torchtitan",
        f"- `python -m recipes.torchtitan.compare`, {results['settings']['steps']} steps of compare.toml",
        *([f"- {machines}"] if machines else []),
    ]
    legend = (
        "*Loss*: the training loss, each batch of which is new. *Against bf16*: against the mean of both runs in "
        f"bfloat16, step by step, in the last quarter; `{AGAIN}` differs from `{REFERENCE}` by 0.001% of the learning "
        "rate, so these two rows show how far runs of one recipe end apart. *95% interval*: over blocks of these "
        "steps; it does not hold that distance."
    )
    return "\n".join([head[0], "", *head[1:], "", legend, "", made, "![Losses](losses.png)", ""])


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    """The losses, and their differences from the reference, each smoothed. Without matplotlib nothing is drawn."""
    try:
        from recipes import figures
    except ImportError:
        print(f"losses.png needs matplotlib: {optional.install('recipes')}, then --report")
        return
    references = reference_losses(runs)
    with figures.figure(path, 2, width=12) as (whole, apart):
        for r, colour in zip(runs, figures.COLOURS * len(runs), strict=False):
            points = list(enumerate(r["losses"], 1))
            whole.plot(*zip(*figures.smoothed(points), strict=True), color=colour, label=r["run"])
            other = references.get(r["seed"])
            if other is not None and r["losses"] != other:
                pairs = zip(r["losses"], other, strict=False)
                points = [(step, a - b) for step, (a, b) in enumerate(pairs, 1)]
                apart.plot(*zip(*figures.smoothed(points), strict=True), color=colour)
        whole.set_title("Training loss")
        whole.set_ylabel("nats per token")
        whole.legend(frameon=False)
        apart.set_title(f"Difference from {REFERENCE}")
        for axis in (whole, apart):
            axis.set_xlabel("step")


# ---- the program -------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what follows `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m recipes.torchtitan.compare", description=str(__doc__).split("\n\n", 1)[0]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="DIR")
    parser.add_argument("--data", type=Path, default=Path("runs/tokens"), metavar="DIR",
        help="what recipes.torchtitan.tokens wrote")  # fmt: skip
    parser.add_argument("--config", type=Path, default=HERE / "compare.toml", metavar="TOML")
    parser.add_argument("--processes", type=int, default=2, help="GPUs, or CPU processes")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", default=DEFAULT, help=f"of {', '.join(RUNS)}")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--report", action="store_true", help="only write the report again")
    given = parser.parse_args(arguments[:at])
    given.runs = given.runs.split(",")
    unknown = [run for run in given.runs if run not in RUNS]
    if unknown:
        raise UserError(f"--runs: there is no run {unknown[0]!r}; accepted: {', '.join(RUNS)}")
    try:
        given.seeds = [int(seed) for seed in given.seeds.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds {given.seeds}: numbers with commas are accepted") from error
    return given, arguments[at + 1 :]


def run(arguments: list[str]) -> None:
    given, extra = parse(arguments)
    if not given.report:
        train_all(given, extra)
    report(given.out)


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: run(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
