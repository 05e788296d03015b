"""The command line; see the package's docstring for what is compared."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shlex
import sys
import time
from pathlib import Path

import torch

from recipes.convergence import report, results
from recipes.convergence.runs import PRESETS, RUNS, chosen_runs, chosen_seeds
from recipes.convergence.train import settings, train_run
from recipes.quickstart import data as quickstart_data
from recipes.quickstart.config import QuickstartConfig, UserError, override
from recipes.quickstart.evaluate import choose_device
from recipes.quickstart.interrupt import Interrupt, Interrupted

FOLDER = Path("runs/convergence")
STRETCH = 4096  # tokens
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.convergence",
        description="Train one model with low-bit optimizer states, and with bfloat16 weights, and compare the losses.",
    )
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), help="default: gpu with CUDA, else tiny"
    )
    parser.add_argument(
        "--runs", default="", metavar="NAME,NAME", help=f"of {', '.join(RUNS)} (default: all)"
    )
    parser.add_argument("--seeds", default="0,1,2", help="default: 0,1,2")
    parser.add_argument(
        "--results",
        type=Path,
        default=FOLDER / "results.jsonl",
        metavar="FILE",
        help="finished runs; those in it are not run again (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE_OR_FOLDER",
        help="your own UTF-8 text (default: the preset's corpus)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=FOLDER / "data",
        metavar="DIR",
        help="keeps tokenizer and tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin no run that would end after so many, judged by the last one (default: no limit)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="change a setting of the preset, e.g. --set steps=2000 (see recipes/quickstart/config.py)",
    )  # fmt: skip
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write the table and the curves of --results to DIR, and train nothing",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """0 done, 2 something to put right (one line says what), 130 interrupted."""
    began = time.perf_counter()
    options = parse(arguments)
    try:
        if options.report is not None:
            for path in report.write(results.read(options.results), options.report):
                print(path)
            return 0
        with Interrupt() as interrupt:
            return train_all(options, interrupt, began)
    except Interrupted:
        print(f"interrupted; the same command goes on, finished runs are in {options.results}")
        return EXIT_INTERRUPTED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def train_all(options: argparse.Namespace, interrupt: Interrupt, began: float) -> int:
    """Every chosen run that isn't in the results yet, seed by seed, so that what is finished can be compared."""
    device = choose_device()
    preset = options.preset or ("gpu" if device.type == "cuda" else "tiny")
    config = override(PRESETS[preset](), options.assignments)
    wanted = [
        (seed, run) for seed in chosen_seeds(options.seeds) for run in chosen_runs(options.runs)
    ]
    configs = {seed: dataclasses.replace(config, seed=seed) for seed, _ in wanted}  # checks them
    data = cached_data(config, options.data, options.cache, interrupt)
    records = results.read(options.results)
    results.check_settings(records, settings(config, data), options.results)
    done = {(r["seed"], r["run"]) for r in records}
    left = [(seed, run) for seed, run in wanted if (seed, run.name) not in done]
    print(
        f"{len(wanted) - len(left)} of {len(wanted)} runs are done; {config.steps} steps on {device}"
    )
    command = ["python", "-m", "recipes.convergence", "--preset", preset]
    command += [word for assignment in options.assignments for word in ("--set", assignment)]
    longest = 0.0
    for i, (seed, run) in enumerate(left):
        started = time.perf_counter()
        if (started - began + longest) / 60 > options.minutes:
            print(f"{len(left) - i} runs are left for another {options.minutes:g} minutes")
            break
        record = {
            **train_run(configs[seed], run, data, device, interrupt.check),
            "command": shlex.join(command),
        }
        results.append(options.results, record)
        records.append(record)
        longest = time.perf_counter() - started
        loss = "diverged" if record["final_loss"] is None else f"{record['final_loss']:.4f}"
        print(f"{run.name:<16} seed {seed}  held-out loss {loss}  {longest:6.1f} s", flush=True)
    print(report.table(results.summarize(records)))
    return 0


def versions(source: Path) -> list[tuple[str, int, int]]:
    """The files of a text with their sizes and times: something else once one of them has changed."""
    source = source.resolve()
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def in_stretches(data: quickstart_data.Data, share: float) -> quickstart_data.Data:
    """The same text with every so many-th stretch of it held out, not whole files: of kinds of text that were never
    learnt, equal runs differ by whole per cents."""
    tokens = torch.cat([data.train, data.heldout])
    every = max(round(1 / share), 2)
    stretches = list(tokens.split(STRETCH))
    train = [s for i, s in enumerate(stretches) if i % every != every - 1]
    return dataclasses.replace(
        data, train=torch.cat(train), heldout=torch.cat(stretches[every - 1 :: every] or train[-1:])
    )


def cached_data(
    config: QuickstartConfig, source: Path | None, cache: Path, interrupt: Interrupt
) -> quickstart_data.Data:
    """The quick start's text, read and encoded once for all runs with this text, as it is, and vocabulary."""
    what = f"stretches {source and versions(source)} {config.corpus} {config.model.vocab_size} {config.heldout_share}"
    folder = cache / hashlib.sha256(what.encode()).hexdigest()[:12]
    if folder.exists():
        return quickstart_data.load(folder)
    data = in_stretches(quickstart_data.prepare(config, source, interrupt), config.heldout_share)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    quickstart_data.save(data, unfinished)
    os.replace(unfinished, folder)
    return data


if __name__ == "__main__":
    sys.exit(main())
