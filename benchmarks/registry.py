"""The registry: what a benchmark is, and how it is found.

A benchmark is a generator of problems; a problem is a list of candidates that do the same work, lowbit's first::

    @benchmark("dequantize", "int4 and int8 weights to bf16")
    def dequantize() -> Iterator[Problem]:
        yield Problem("4096 x 4096", [Candidate("lowbit", run, arguments, moved_bytes), ...])

It should hold the candidates' results against each other before it yields them. Adding a benchmark is adding a
module to this folder: the runner imports them all.

What is measured of a candidate, and the columns that it fills, is the benchmark's `Table`. That of a kernel is
`report.KERNEL_TABLE`; a benchmark of something else brings its own, and its own kind of candidate, which has at
least a ``name``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import benchmarks


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    Attributes:
        name: in the report; the first candidate of a problem is lowbit's, the others are its peers.
        run: called with ``arguments``; what it returns is kept until all is timed.
        arguments: makes one set of arguments on the current CUDA device. Called several times, so that
            repeated runs don't find their data in the L2 cache.
        moved_bytes: that it must read and write at the least. Divided by the measured copy bandwidth this is
            its floor.
        graph: time it as a CUDA graph (the GPU's time alone), or call by call (the host's time included).
    """

    name: str
    run: Callable[..., Any]
    arguments: Callable[[], tuple]
    moved_bytes: int
    graph: bool = True


@dataclass(frozen=True)
class Problem:
    """Work of one shape. ``reference``: the candidate that the ratios refer to, measured whatever is selected."""

    name: str
    candidates: Sequence[Any]
    reference: str = ""

    def selected(self, only: list[str], skip: list[str]) -> Problem:
        """This problem with the candidates whose "problem / candidate" contains any of ``only`` and none of
        ``skip``; the reference stays if any other does."""

        def wanted(candidate: Any) -> bool:
            full = f"{self.name} / {candidate.name}"
            return any(text in full for text in only) and not any(text in full for text in skip)

        chosen = [c for c in self.candidates if wanted(c)]
        if not chosen:
            return Problem(self.name, [], self.reference)
        kept = [c for c in self.candidates if c in chosen or c.name == self.reference]
        return Problem(self.name, kept, self.reference)


@dataclass(frozen=True)
class Row:
    """A candidate with what was measured of it, or in one line why nothing was."""

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
        """The row that ratios refer to: the problem's reference, by default the first."""
        named = [r for r in self.rows if r.candidate.name == self.problem.reference]
        return (named or self.rows)[0]


@dataclass(frozen=True)
class Table:
    """What is measured of each candidate, and how the report shows it.

    Attributes:
        columns: their headings, after those of the problem and the implementation.
        measure: (candidate, repeats) to anything that ``cells`` reads. ImportError where a package is missing and
            torch.OutOfMemoryError are results too; any other exception is a failure.
        cells: (row, its problem's result, bytes a second of a copy) to one text a column. ``row.measured`` is there.
        legend: says what the columns mean.
    """

    columns: tuple[str, ...]
    measure: Callable[[Any, int], Any]
    cells: Callable[[Row, Result, float], list[str]]
    legend: str


@dataclass(frozen=True)
class Benchmark:
    """``device``: "cuda", or "cpu" for what is measured on the processor. ``takes_shapes``: ``problems`` takes the file
    that ``--shapes`` names, or None."""

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
    """Register the decorated generator of problems as ``name``, with a line that says what it times. Without a
    ``table`` it is that of a kernel."""

    def register(problems: Callable[..., Iterator[Problem]]) -> Callable[..., Iterator[Problem]]:
        if name in _BENCHMARKS:
            raise ValueError(f"a benchmark named {name!r} exists already; choose another name")
        _BENCHMARKS[name] = Benchmark(name, about, problems, table, device, takes_shapes)
        return problems

    return register


def all_benchmarks() -> dict[str, Benchmark]:
    """Every benchmark by name: those of all modules in this folder."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name != "__main__":
            importlib.import_module(f"benchmarks.{module.name}")
    return dict(sorted(_BENCHMARKS.items()))
