"""The registry: what a benchmark is, and how it is found.

A benchmark is a generator of problems; a problem is a list of candidates that do the same work, lowbit's first::

    @benchmark("dequantize_int4", "packed int4 weights to bf16")
    def dequantize_int4() -> Iterator[Problem]:
        yield Problem("4096 x 4096", [Candidate("lowbit", run, arguments, moved_bytes), ...])

It should hold the candidates' results against each other before it yields them. Adding a benchmark is adding a
module to this folder: the runner imports them all.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
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
    """Work of one shape."""

    name: str
    candidates: list[Candidate]


@dataclass(frozen=True)
class Benchmark:
    name: str
    about: str
    problems: Callable[[], Iterator[Problem]]


_BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    name: str, about: str
) -> Callable[[Callable[[], Iterator[Problem]]], Callable[[], Iterator[Problem]]]:
    """Register the decorated generator of problems as ``name``, with a line that says what it times."""

    def register(problems: Callable[[], Iterator[Problem]]) -> Callable[[], Iterator[Problem]]:
        if name in _BENCHMARKS:
            raise ValueError(f"a benchmark named {name!r} exists already; choose another name")
        _BENCHMARKS[name] = Benchmark(name, about, problems)
        return problems

    return register


def all_benchmarks() -> dict[str, Benchmark]:
    """Every benchmark by name: those of all modules in this folder."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name != "__main__":
            importlib.import_module(f"benchmarks.{module.name}")
    return dict(sorted(_BENCHMARKS.items()))
