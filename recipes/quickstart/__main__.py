"""The command line of the quick start; see the package's docstring for what it does."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.quickstart.interrupt import Interrupt

RUNS = Path("runs")
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.quickstart",
        description="Train a small language model with AdamW4bit, fine-tune it with QAT, convert it to int4, "
        "and report what each step costs and gains.",
    )
    parser.add_argument(
        "--preset",
        choices=("tiny", "small", "gpu"),
        help="tiny: minutes on 2 CPU cores; small: under an hour; gpu: minutes on a datacentre GPU "
        "(default: gpu with CUDA, else tiny)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE_OR_FOLDER",
        help="your own UTF-8 text (default: the Python standard library's source)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the run folder, new or empty (default: runs/PRESET-TIME)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="go on with the run in DIR (default: the latest in runs/); its settings and data stay",
    )
    parser.add_argument(
        "--wandb",
        choices=("offline", "online", "disabled"),
        default="disabled",
        help="log to Weights & Biases as well (default: disabled)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="assignments",
        help="change a setting of the preset, e.g. --set steps=2000 --set model.dim=192 (see config.py)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. 0 done, 2 something to put right (one line says what), 130 interrupted."""
    options = parse(arguments)
    # Threads that wait by spinning take each other's time on a machine that does anything else: one busy core
    # of two made a step 5 times slower. Read by OpenMP when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from recipes.quickstart.config import UserError
        from recipes.quickstart.interrupt import Interrupt, Interrupted
    except ImportError as error:
        return _missing(error)
    try:
        with Interrupt() as interrupt:
            try:
                return _run(options, interrupt)
            except Interrupted as stop:
                print(f"interrupted: {str(stop) or 'nothing was written'}")
                return EXIT_INTERRUPTED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except ImportError as error:
        return _missing(error)
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"error: {error}; the checkpoints written so far are whole", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _missing(error: ImportError) -> int:
    print(
        f"error: the quick start needs a package that is missing ({error}); "
        'install them all with: pip install -e ".[recipes]"',
        file=sys.stderr,
    )
    return EXIT_USER_ERROR


def default_preset() -> str:
    """ "gpu" on a machine that has one, else "tiny"."""
    from recipes.quickstart.evaluate import choose_device

    return "gpu" if choose_device().type == "cuda" else "tiny"


def _run(options: argparse.Namespace, interrupt: Interrupt) -> int:
    from recipes.quickstart import data as quickstart_data
    from recipes.quickstart.config import PRESETS, UserError, override
    from recipes.quickstart.folder import RunFolder, latest
    from recipes.quickstart.interrupt import Interrupted
    from recipes.quickstart.report import slowness
    from recipes.quickstart.run import run
    from recipes.quickstart.tracking import Tracker, check_wandb

    check_wandb(options.wandb)
    if options.resume is not None:
        fixed = [
            ("--preset", options.preset),
            ("--out", options.out),
            ("--data", options.data),
            ("--set", options.assignments),
        ]
        given = [name for name, value in fixed if value]
        if given:
            raise UserError(
                f"{given[0]} doesn't go with --resume: a run keeps the settings and data it began with"
            )
        folder = RunFolder(Path(options.resume)) if options.resume else latest(RUNS)
        config = folder.config()
        data = quickstart_data.load(folder.data)
    else:
        preset = options.preset or default_preset()
        config = override(PRESETS[preset](), options.assignments)
        folder = RunFolder(options.out or RUNS / f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.check_free()
        data = quickstart_data.prepare(config, options.data, interrupt)
        folder.create(config, data)
    tracker = Tracker(folder, config, options.wandb)
    status = 1
    try:
        found = run(config, folder, data, tracker, interrupt)
        status = 0
    except Interrupted:
        status = EXIT_INTERRUPTED
        raise Interrupted(
            f"go on with python -m recipes.quickstart --resume {folder.path}"
        ) from None
    finally:
        tracker.close(status)
    if (slow := slowness(found)) is not None:
        print(slow)
    for result in found.results:
        print(
            f"{result.label:<30} perplexity {result.perplexity:8.3f}   {result.file_bytes:>12,} bytes   "
            f"generates {result.generate_tokens_per_s:8,.0f} tokens/s"
        )
    print(f"report: {folder.path / 'report.md'} and {folder.path / 'report.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
