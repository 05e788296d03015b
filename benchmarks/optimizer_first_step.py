"""The first optimizer step of a fresh process, which compiles kernels or reads them from the disk.

Each optimizer runs in two processes, one after the other, with a new folder as the cache of compiled kernels: the first
process fills it, the second one reads it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.optimizer_step import first_step_seconds
from benchmarks.optimizers import (
    LLAMA_1B,
    OptimizerChoice,
    lowbit_formats,
    lowbit_options,
    random_parameters,
    torch_fused,
)
from benchmarks.ranks import environment_of_programs
from benchmarks.registry import Problem, Result, Row, Table, benchmark

CACHE_VARIABLES = ("LOWBIT_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
PROGRAM = (  # the clock starts before torch is imported
    "import sys, time; started = time.perf_counter(); "
    "from benchmarks.optimizer_first_step import take_first_step; take_first_step(started, *sys.argv[1:])"
)


@dataclass(frozen=True)
class FreshProcess:
    """An optimizer in fresh processes. ``size``: of its only parameter; None is Llama-3.2-1B."""

    choice: OptimizerChoice
    device: str = "cuda"
    size: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.choice.name


@dataclass(frozen=True)
class FirstSteps:
    """Seconds with an empty cache and with a warm one: of the first ``step()`` until the device has finished, and from
    the import of torch to that moment."""

    cold: float
    cold_from_import: float
    warm: float
    warm_from_import: float


def measure_first_steps(candidate: FreshProcess, repeats: int) -> FirstSteps:
    """One cold and one warm process; ignores ``repeats``. RuntimeError with the error of a process that fails."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (_in_fresh_process(candidate, cache) for _ in range(2))
    return FirstSteps(cold["step"], cold["from_import"], warm["step"], warm["from_import"])


def _in_fresh_process(candidate: FreshProcess, cache: str) -> dict[str, float]:
    size = map(str, candidate.size or ())
    command = [sys.executable, "-c", PROGRAM, candidate.name, candidate.device, *size]
    folders = {variable: str(Path(cache) / variable) for variable in CACHE_VARIABLES}
    environment = {**environment_of_programs(), **folders}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise RuntimeError(f"the process of {candidate.name} failed: {lines[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def first_step_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    found: FirstSteps = row.measured
    seconds = (found.cold, found.warm, found.cold_from_import, found.warm_from_import)
    return [f"{s:.2f}" for s in seconds]


FIRST_STEP_TABLE = Table(
    columns=("cold s", "warm s", "from import, cold s", "from import, warm s"),
    measure=measure_first_steps,
    cells=first_step_cells,
    legend="The first `step()` alone, and the time from the import of torch to its end, random weights included. "
    "*cold*: no compiled kernel on the disk; *warm*: those of the previous process. One process each.",
)


def _choices() -> list[OptimizerChoice]:
    wanted = ("AdamWFp8", "AdamW8bit", "AdamW4bit", "Lion8bit")
    found = [
        c
        for c in [*lowbit_formats(), *lowbit_options()]
        if c.name.removeprefix("lowbit ") in wanted
    ]
    return [*found, torch_fused()]


@benchmark(
    "optimizer_first_step", "the first optimizer step of a fresh process", table=FIRST_STEP_TABLE
)
def optimizer_first_step() -> Iterator[Problem]:
    yield Problem("Llama-3.2-1B, 1.236e9 weights", [FreshProcess(c) for c in _choices()])


def take_first_step(started: float, name: str, device: str, *size: str) -> None:
    """The program of a fresh process: take one step, and print its seconds as one line of JSON."""
    choice = next(choice for choice in _choices() if choice.name == name)
    shapes = [tuple(map(int, size))] if size else LLAMA_1B
    params = random_parameters(shapes, choice.dtype, device)
    optimizer = choice.make(params)
    seconds = first_step_seconds(optimizer, device == "cuda")
    print(json.dumps({"step": seconds, "from_import": time.perf_counter() - started}))
