"""The registry of benchmarks.

A benchmark is a generator of problems. A problem is a list of candidates that do the same work; lowbit's is the first::

    @benchmark("dequantize", "int4 and int8 weights to bf16")
    def dequantize() -> Iterator[Problem]:
        yield Problem("4096 x 4096", [Candidate("lowbit", run, arguments, moved_bytes), ...])

A benchmark should compare the candidates' results with each other before it yields them. To add a benchmark, add a
module to this folder: the runner imports all of them.

A benchmark's `Table` says what is measured of a candidate, and its columns. The default, for kernels, is
`report.KERNEL_TABLE`. A benchmark of something else brings its own table and its own kind of candidate, which has at
least a ``name``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import benchmarks


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    Attributes:
        name: the name in the report. The first candidate of a problem is lowbit's, the others are its peers.
        run: the function to time, called with ``arguments``. Its results are kept until all runs are timed.
        arguments: makes one set of arguments on the current CUDA device. It is called several times, so that repeated
            runs do not find their data in the L2 cache.
        moved_bytes: the fewest bytes that the candidate must read and write. Divided by the measured copy bandwidth,
            they are its floor.
        graph: time a CUDA graph (the GPU's time alone) or single calls (with the host's time).
    """

    name: str
    run: Callable[..., Any]
    arguments: Callable[[], tuple]
    moved_bytes: int
    graph: bool = True


@dataclass(frozen=True)
class Problem:
    """Work of one shape. Ratios refer to the candidate named ``reference``, which runs whatever is selected."""

    name: str
    candidates: Sequence[Any]
    reference: str = ""

    def selected(self, only: list[str], skip: list[str]) -> Problem:
        """This problem with the candidates whose "problem / candidate" has a text of ``only`` and none of ``skip``.

        The reference stays if any other candidate does.
        """

        def wanted(candidate: Any) -> bool:
            full = f"{self.name} / {candidate.name}"
            return any(text in full for text in only) and not any(text in full for text in skip)

        chosen = [c for c in self.candidates if wanted(c)]
        if not chosen:
            return Problem(self.name, [], self.reference)
        kept = [c for c in self.candidates if c in chosen or c.name == self.reference]
        return Problem(self.name, kept, self.reference)


def problem_of(
    name: str, case: Any, runs: dict[str, Callable[..., Any]], moved_bytes: int
) -> Problem:
    """Functions that all take the arguments of one case.

    Args:
        name: name of the problem.
        case: makes the arguments.
        runs: the functions by the name of the candidate, lowbit's first.
        moved_bytes: the fewest bytes that each candidate must move.
    """
    arguments = partial(case.arguments, "cuda")
    return Problem(name, [Candidate(n, run, arguments, moved_bytes) for n, run in runs.items()])


@dataclass(frozen=True)
class Row:
    """A candidate, with its measurement or one line that says why there is none."""

    candidate: Any
    measured: Any = None
    why_not: str = ""


@dataclass(frozen=True)
class Result:
    """The rows of one problem."""

    problem: Problem
    rows: list[Row]

    @property
    def reference(self) -> Row:
        """The row that ratios refer to: the problem's reference, or else the first row."""
        named = [r for r in self.rows if r.candidate.name == self.problem.reference]
        return (named or self.rows)[0]


@dataclass(frozen=True)
class Table:
    """What is measured of each candidate, and how the report shows it.

    Attributes:
        columns: the headings, after those of the problem and the implementation.
        measure: maps (candidate, repeats) to any value that ``cells`` reads. An ImportError, for a missing package, and
            torch.OutOfMemoryError count as results; any other exception is a failure.
        cells: maps (row, result of its problem, bytes a second of a copy) to one text per column. ``row.measured`` is
            not None.
        legend: explains the columns.
    """

    columns: tuple[str, ...]
    measure: Callable[[Any, int], Any]
    cells: Callable[[Row, Result, float], list[str]]
    legend: str


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark.

    ``device`` is "cuda", or "cpu" for measurements on the CPU. If ``takes_shapes``, ``problems`` takes the file that
    ``--shapes`` names, or None.
    """

    name: str
    about: str
    problems: Callable[..., Iterator[Problem]]
    table: Table | None = None
    device: str = "cuda"
    takes_shapes: bool = False


_BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    name: str,
    about: str,
    *,
    table: Table | None = None,
    device: str = "cuda",
    takes_shapes: bool = False,
) -> Callable[[Callable[..., Iterator[Problem]]], Callable[..., Iterator[Problem]]]:
    """Register the decorated generator of problems.

    Args:
        name: the name on the command line.
        about: says in a line what the benchmark times.
        table: what is measured, and its columns; None takes those of kernels.
        device: "cuda" or "cpu".
        takes_shapes: True passes the file that ``--shapes`` names to the generator, or None.
    """

    def register(problems: Callable[..., Iterator[Problem]]) -> Callable[..., Iterator[Problem]]:
        if name in _BENCHMARKS:
            raise ValueError(f"a benchmark named {name!r} exists already; choose another name")
        _BENCHMARKS[name] = Benchmark(name, about, problems, table, device, takes_shapes)
        return problems

    return register


def all_benchmarks() -> dict[str, Benchmark]:
    """The benchmarks of all modules in this folder, by name."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name != "__main__":
            importlib.import_module(f"benchmarks.{module.name}")
    return dict(sorted(_BENCHMARKS.items()))
