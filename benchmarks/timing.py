"""Timing on a CUDA device: medians with cold caches, and the copy bandwidth of the same run.

A candidate gets enough sets of arguments that a round over them moves several times the size of the L2 cache, and runs
on each set in turn. So each run loads its data from memory, as in a model. A CUDA graph captures the rounds; events
time its replays, without launch overhead or host time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.registry import Candidate

COPY_BYTES = 2**32  # read; as many are written
CACHES_PER_ROUND = 4
MAX_SETS = 32
RUNS_PER_GRAPH = 16
REPEATS = 30
WARM_UP = 25e-3  # seconds of replays before candidates are timed in turns


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median over the repeats, and the lower and the upper quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        low, _, high = statistics.quantiles(seconds, n=4)
        return cls(statistics.median(seconds), low, high)


def number_of_sets(moved_bytes: int, cache_bytes: int) -> int:
    """The number of sets of arguments with which a round moves several times the size of the cache."""
    return max(1, min(MAX_SETS, -(-CACHES_PER_ROUND * cache_bytes // max(moved_bytes, 1))))


def measure(candidate: Candidate, repeats: int = REPEATS) -> Timing:
    """Time one candidate."""
    cache = torch.cuda.get_device_properties().L2_cache_size
    return measure_over(candidate, number_of_sets(candidate.moved_bytes, cache), repeats)


def measure_over(candidate: Candidate, number: int, repeats: int = REPEATS) -> Timing:
    """Time one candidate over `number` sets of arguments in turn."""
    sets = [candidate.arguments() for _ in range(number)]
    time_sets = _time_graph if candidate.graph else _time_calls
    return time_sets(candidate.run, sets, repeats)


def measure_in_turns(
    candidates: list[tuple[Candidate, int]], repeats: int = REPEATS
) -> list[list[float]]:
    """Seconds of one run of each candidate, in each of `repeats` rounds, by graphs over so many sets of arguments.

    A GPU at its power limit lowers its clock, so a candidate that is timed after another looks slower. Ratios of times
    of the same round are compared at one clock.
    """
    graphs = []
    for one, number in candidates:
        graphs.append(_captured(one.run, [one.arguments() for _ in range(number)]))
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP:
        for graph, _, _ in graphs:
            graph.replay()
        torch.cuda.synchronize()
    return [[_replayed(graph) / runs for graph, runs, _ in graphs] for _ in range(repeats)]


def copy_bandwidth(repeats: int = REPEATS) -> float:
    """Bytes per second, read plus written, of ``copy_`` between two large buffers of random bits.

    It times plain calls: a captured copy becomes a memcpy node of the graph, which runs at two thirds of this speed.
    """
    source = torch.randint(-(2**62), 2**62, (COPY_BYTES // 8,), device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return 2 * COPY_BYTES / Timing.of(seconds[3:]).median


def _time_graph(run: Callable, sets: list[tuple], repeats: int) -> Timing:
    graph, runs, _ = _captured(run, sets)
    graph.replay()
    torch.cuda.synchronize()
    return Timing.of([_replayed(graph) / runs for _ in range(repeats)])


def _captured(run: Callable, sets: list[tuple]) -> tuple[torch.cuda.CUDAGraph, int, list]:
    """A graph that runs over the sets in turn, how many runs it has, and what must live as long as the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arguments in sets + sets[:2]:
            run(*arguments)  # compiles kernels and warms up the allocator
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    rounds = -(-RUNS_PER_GRAPH // len(sets))
    results: list = [None] * len(sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for i, arguments in enumerate(sets):
                results[i] = run(*arguments)  # kept, so that no two sets share memory
    return graph, rounds * len(sets), [sets, results]


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _time_calls(run: Callable, sets: list[tuple], repeats: int) -> Timing:
    for arguments in sets * 3:
        run(*arguments)
    seconds = []
    for i in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(*sets[i % len(sets)])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Timing.of(seconds)
