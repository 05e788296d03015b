"""The runner: see ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import sys
from pathlib import Path

import torch

from benchmarks.registry import Benchmark, all_benchmarks
from benchmarks.report import Machine, Result, render
from benchmarks.timing import REPEATS, copy_bandwidth, measure


def run(benchmark: Benchmark, only: str, repeats: int, command: str) -> str:
    """Time the problems whose name contains ``only``; the report in markdown."""
    before = copy_bandwidth()
    results = []
    for problem in benchmark.problems():
        if only in problem.name:
            print(f"{benchmark.name}: {problem.name}", file=sys.stderr, flush=True)
            timings = [(c, measure(c, repeats)) for c in problem.candidates]
            results.append(Result(problem.name, timings))
    if not results:
        raise SystemExit(f"no problem of {benchmark.name} has {only!r} in its name")
    bandwidths = (before, copy_bandwidth())
    return render(benchmark, results, bandwidths, Machine.here(), command, datetime.date.today())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Times lowbit on the current CUDA device."
    )
    parser.add_argument("names", nargs="*", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and end")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only problems with this in their name"
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help=f"timed repeats (default: {REPEATS})"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write DIR/<benchmark>-<gpu>.md"
    )
    options = parser.parse_args(arguments)

    benchmarks = all_benchmarks()
    if options.list:
        width = max(map(len, benchmarks))
        for b in benchmarks.values():
            print(f"{b.name:{width}}  {b.about}")
        return 0
    unknown = [name for name in options.names if name not in benchmarks]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(benchmarks)}")
    if options.repeats < 2:
        parser.error(f"--repeats must be 2 or more, got {options.repeats}")
    if not torch.cuda.is_available():
        print(
            f"Benchmarks need a CUDA device; torch {torch.__version__} finds none here. Nothing was measured.",
            file=sys.stderr,
        )
        return 1
    command = shlex.join(
        ["python", "-m", "benchmarks", *(sys.argv[1:] if arguments is None else arguments)]
    )
    for name in options.names or benchmarks:
        report = run(benchmarks[name], options.only, options.repeats, command)
        print(report, flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
            (options.out / f"{name}-{gpu}.md").write_text(report, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
