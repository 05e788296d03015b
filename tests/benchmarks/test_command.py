"""The benchmark runner: registration, the refusal without a GPU, sets of arguments, and the report."""

from __future__ import annotations

import datetime
import math
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import registry
from benchmarks.__main__ import main
from benchmarks.registry import (
    Benchmark,
    Candidate,
    Problem,
    Result,
    Row,
    all_benchmarks,
    benchmark,
)
from benchmarks.report import Machine, render
from benchmarks.timing import (
    COPY_BYTES,
    RUNS_PER_GRAPH,
    Timing,
    copy_bandwidth,
    measure_over,
    number_of_sets,
)

MACHINE = Machine("Some GPU", "sm_90", "2.13.0", "3.7.1", "CUDA 13.0", "3.11")


def test_list_needs_no_gpu(capsys: pytest.CaptureFixture) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(all_benchmarks())
    assert {"dequantize", "optimizer_step", "optimizer_step_cpu", "train_memory"} <= set(
        all_benchmarks()
    )


def test_without_a_gpu_nothing_is_measured(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "dequantize"])
    monkeypatch.delitem(
        sys.modules, "benchmarks.__main__"
    )  # runpy warns of a module that is imported
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__")
    said = capsys.readouterr()
    assert ended.value.code == 1 and said.out == ""
    assert "need a CUDA device" in said.err and "Nothing was measured" in said.err


def test_an_unknown_name_lists_the_benchmarks(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["no_such_thing"])
    assert exit.value.code != 0
    error = capsys.readouterr().err
    assert "no_such_thing" in error and "dequantize" in error


def test_a_name_is_registered_once() -> None:
    name = next(iter(all_benchmarks()))
    with pytest.raises(ValueError, match="exists already"):
        benchmark(name, "again")(lambda: iter(()))


@pytest.mark.parametrize(
    ("moved", "expected"), [(1, 32), (10_000_000, 20), (50_000_000, 4), (10**9, 1)]
)
def test_a_round_moves_several_times_the_cache(moved: int, expected: int) -> None:
    assert number_of_sets(moved, cache_bytes=50_000_000) == expected


def test_timing_takes_quartiles() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert timing.low < timing.median == 3.0 < timing.high


def test_report_gives_ratios_to_peer_and_floor() -> None:
    def candidate(name: str) -> Candidate:
        return Candidate(name, lambda: None, tuple, 400_000_000)

    lowbit, peer, missing = map(candidate, ("lowbit", "peer", "absent"))
    result = Result(
        Problem("a shape", [lowbit, peer, missing]),
        [
            Row(lowbit, Timing(125e-6, 124e-6, 126e-6)),
            Row(peer, Timing(1e-3, 0.9e-3, 1.1e-3)),
            Row(missing, why_not="not installed (absent)"),
        ],
    )
    page = render(
        Benchmark("thing", "what it does", lambda: iter(())),
        [result],
        (3.9e12, 4e12),
        MACHINE,
        "python -m benchmarks thing",
        datetime.date(2026, 1, 2),
    )
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line]
    assert rows[2][:4] == ["a shape", "lowbit", "125.0 µs", "124.0 µs .. 126.0 µs"]
    assert rows[2][4:] == ["400.0 MB", "3.20", "1.25", ""]
    assert rows[3][1:3] == ["peer", "1.00 ms"] and rows[3][-2:] == ["10.00", "8.00x"]
    assert rows[4][:3] == ["", "absent", "not installed (absent)"] and len(rows[4]) == 8
    for fact in ("2026-01-02", "Some GPU", "2.13.0", "3.7.1", "python -m benchmarks thing", "4.00"):
        assert fact in page


def test_selecting_keeps_the_reference_of_ratios() -> None:
    candidates = [Candidate(name, tuple, tuple, 1) for name in ("lowbit", "torch", "torchao")]
    problem = Problem("a shape", candidates, reference="torch")

    def names(only: list[str], skip: list[str]) -> list[str]:
        return [c.name for c in problem.selected(only, skip).candidates]

    assert names([""], []) == ["lowbit", "torch", "torchao"]
    assert names(["torchao"], []) == ["torch", "torchao"]
    assert names(["a shape / low"], []) == ["lowbit", "torch"]
    assert names([""], ["torch"]) == ["lowbit", "torch"]
    assert names(["another shape"], []) == []


def test_a_candidate_that_cannot_run_has_a_row_and_a_failure_sets_the_status(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raised = {"missing": ImportError("No module named 'peer'"), "large": torch.OutOfMemoryError()}

    def measure(candidate: Candidate, repeats: int) -> int:
        if candidate.name in raised:
            raise raised[candidate.name]
        return repeats

    table = registry.Table(("count",), measure, lambda row, *_: [str(row.measured)], "A legend.")
    candidates = [Candidate(name, tuple, tuple, 1) for name in ("good", "missing", "large", "bad")]

    monkeypatch.setattr(registry, "_BENCHMARKS", dict(all_benchmarks()))
    benchmark("for_a_test", "nothing", table=table, device="cpu")(
        lambda: iter([Problem("p", candidates)])
    )
    assert main(["for_a_test", "--repeats", "7", "--out", str(tmp_path), "--label", "x"]) == 0
    (page,) = tmp_path.glob("for_a_test-*-x.md")
    assert "`python -m benchmarks for_a_test --repeats 7`" in page.read_text()
    assert capsys.readouterr().out.strip() == page.read_text().strip()
    for line in (
        "| good | 7 |",
        "| missing | not installed (No module",
        "| large | out of memory |",
    ):
        assert line in page.read_text()
    assert main(["for_a_test", "--only", "good", "--only", "large", "--skip", "oo"]) == 0
    assert "| large |" in capsys.readouterr().out
    raised["bad"] = ValueError("wrong")
    assert main(["for_a_test", "--only", "bad"]) == 1
    assert "| bad | failed: ValueError: wrong |" in capsys.readouterr().out


def seconds_of(run: Callable[[], object]) -> float:
    """Of one of many runs, by the clock of the host."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(RUNS_PER_GRAPH):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / RUNS_PER_GRAPH


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "calls"])
def test_measures_on_the_gpu(graph: bool) -> None:
    """Other processes may use the GPU, so no time alone is right or wrong.

    Half of the repeats take the median or longer, and all of them fit into the time of the call: this holds however
    slow the GPU is, and a time that is several times too long breaks it. No run is faster than the GPU alone, so the
    least of several times comes close to the least of the host's, unless it is too short.
    """
    shape = (2**26,)
    add = Candidate(
        "add",
        torch.add,
        lambda: (torch.ones(shape, device="cuda"), torch.ones(shape, device="cuda")),
        12 * shape[0],
        graph,
    )
    arguments, repeats = add.arguments(), 40
    found = own = math.inf
    for _ in range(20):
        start = time.perf_counter()
        median = measure_over(add, 1, repeats).median
        total = time.perf_counter() - start
        assert median * (RUNS_PER_GRAPH if graph else 1) * repeats / 2 <= total
        found = min(found, median)
        own = min(own, seconds_of(lambda: torch.add(*arguments)))
        if found > own / 2:
            break
    assert found > own / 2


@pytest.mark.gpu
def test_measures_the_copy_bandwidth_of_the_gpu() -> None:
    """With the bounds of the test above. A copy moves 8 bytes an element, read and written."""
    source, repeats = torch.ones(2**26, device="cuda"), 20
    target = torch.empty_like(source)
    found = own = math.inf
    for _ in range(20):
        start = time.perf_counter()
        seconds = 1 / copy_bandwidth(repeats)
        total = time.perf_counter() - start
        assert seconds * 2 * COPY_BYTES * repeats / 2 <= total
        found = min(found, seconds)
        own = min(own, seconds_of(lambda: target.copy_(source)) / (8 * len(source)))
        if found > own / 2:
            break
    assert found > own / 2


@pytest.mark.gpu
def test_runs_end_to_end(tmp_path: Path) -> None:
    assert (
        main(["dequantize", "--only", "attention", "--repeats", "3", "--out", str(tmp_path)]) == 0
    )
    (page,) = tmp_path.iterdir()
    assert torch.cuda.get_device_name() in page.read_text()
