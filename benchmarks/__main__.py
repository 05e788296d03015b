"""The runner: see ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import datetime
import gc
import re
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.registry import Benchmark, Result, Row, Table, all_benchmarks
from benchmarks.report import KERNEL_TABLE, Machine, readable, render
from benchmarks.timing import REPEATS, Timing, copy_bandwidth


def run(
    benchmark: Benchmark,
    only: list[str],
    skip: list[str],
    repeats: int,
    command: str,
    shapes: Path | None = None,
) -> tuple[str, bool]:
    """Measure the selected candidates. Returns the report in Markdown, and True if every candidate worked.

    Args:
        benchmark: the benchmark to run.
        only: texts of which the "problem / candidate" must contain one.
        skip: texts of which it must contain none.
        repeats: timed runs of each candidate.
        command: the command line, for the head of the report.
        shapes: the file that --shapes names.
    """
    table = benchmark.table or KERNEL_TABLE
    on_gpu = benchmark.device == "cuda"
    before = copy_bandwidth() if on_gpu else 0.0
    results = []
    for problem in benchmark.problems(shapes) if benchmark.takes_shapes else benchmark.problems():
        problem = problem.selected(only, skip)
        if problem.candidates:
            rows = [measured_row(table, problem.name, c, repeats) for c in problem.candidates]
            results.append(Result(problem, rows))
    if not results:
        raise SystemExit(
            f"nothing of {benchmark.name} has {' or '.join(map(repr, only))} in its name"
        )
    bandwidths = (before, copy_bandwidth()) if on_gpu else None
    page = render(
        benchmark,
        results,
        bandwidths,
        Machine.here(benchmark.device),
        command,
        datetime.date.today(),
    )
    return page, not any(r.why_not.startswith("failed") for result in results for r in result.rows)


def measured_row(table: Table, problem: str, candidate: Any, repeats: int) -> Row:
    """Measure one candidate. A candidate that can't run has a row as well, and the others go on.

    Args:
        table: how to measure.
        problem: name of the problem, for messages.
        candidate: what to measure.
        repeats: timed runs.
    """
    print(f"{problem} / {candidate.name}", end="", file=sys.stderr, flush=True)
    try:
        measured = table.measure(candidate, repeats)
        found = measured.median if isinstance(measured, Timing) else measured
        shown = readable(found) if isinstance(found, float) else found
        print(f": {shown}", end="", file=sys.stderr)  # all there is if the run is stopped
        return Row(candidate, measured)
    except ImportError as error:
        return Row(candidate, why_not=f"not installed ({error})")
    except torch.OutOfMemoryError:
        return Row(candidate, why_not="out of memory")
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).strip() or "no message").splitlines()[0].replace("|", "/")
        return Row(candidate, why_not=f"failed: {type(error).__name__}: {reason[:120]}")
    finally:
        print(file=sys.stderr, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times lowbit on the current CUDA device, or on the processor.",
    )
    parser.add_argument("names", nargs="*", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and end")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help='only candidates with this in their "problem / name", or with one of several if given again; what '
        "ratios refer to stays",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="TEXT",
        help="leave out those with this in it; may be given again",
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help=f"timed repeats (default: {REPEATS})"
    )
    parser.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="of the linears to time, as the write() of a lowbit.trace gives it; for weight_linear",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write DIR/<benchmark>-<device>.md"
    )
    parser.add_argument(
        "--label", default="", help="end of the written file's name, before .md (default: none)"
    )
    return parser


def command_of(options: argparse.Namespace) -> str:
    """The command that measures the same: without the folder that the page goes to."""
    words = ["python", "-m", "benchmarks", *options.names]
    words += [word for text in options.only or [] for word in ("--only", text)]
    words += [word for text in options.skip for word in ("--skip", text)]
    words += ["--shapes", options.shapes.name] if options.shapes else []
    words += ["--repeats", str(options.repeats)] if options.repeats != REPEATS else []
    return shlex.join(words)


def main(arguments: list[str] | None = None) -> int:
    """0 when all is measured, 1 when something failed or no GPU is found."""
    command_line = parser()
    options = command_line.parse_args(arguments)

    benchmarks = all_benchmarks()
    if options.list:
        width = max(map(len, benchmarks))
        for b in benchmarks.values():
            print(f"{b.name:{width}}  {b.about}")
        return 0
    unknown = [name for name in options.names if name not in benchmarks]
    if unknown:
        command_line.error(
            f"no benchmark named {', '.join(unknown)}; there are: {', '.join(benchmarks)}"
        )
    if options.shapes and not all(
        name in benchmarks and benchmarks[name].takes_shapes for name in options.names or [""]
    ):
        command_line.error("--shapes goes with the benchmark weight_linear, named before it")
    if options.repeats < 2:
        command_line.error(f"--repeats must be 2 or more, got {options.repeats}")
    chosen = [benchmarks[name] for name in options.names or benchmarks]
    if any(b.device == "cuda" for b in chosen) and not torch.cuda.is_available():
        print(
            f"Benchmarks need a CUDA device; torch {torch.__version__} finds none here. Nothing was measured.",
            file=sys.stderr,
        )
        return 1
    command = command_of(options)
    all_worked = True
    for benchmark in chosen:
        page, worked = run(
            benchmark, options.only or [""], options.skip, options.repeats, command, options.shapes
        )
        all_worked &= worked
        print(page, flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            device = re.sub(r"[^a-z0-9]+", "-", Machine.here(benchmark.device).gpu.lower())
            name = "-".join(filter(None, (benchmark.name, device.strip("-"), options.label)))
            (options.out / f"{name}.md").write_text(page, encoding="utf-8")
    return 0 if all_worked else 1


if __name__ == "__main__":
    sys.exit(main())
