"""A run as a markdown page: where and when, and each speed beside its peers and its floor."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass

import torch

from benchmarks.registry import Benchmark, Candidate
from benchmarks.timing import COPY_BYTES, Timing


@dataclass(frozen=True)
class Machine:
    """What a figure depends on besides the code."""

    gpu: str
    capability: str
    torch: str
    triton: str
    driver: str
    python: str

    @classmethod
    def here(cls) -> Machine:
        try:
            import triton
        except ImportError:
            triton_version = "not installed"
        else:
            triton_version = triton.__version__
        major, minor = torch.cuda.get_device_capability()
        return cls(
            gpu=torch.cuda.get_device_name(),
            capability=f"sm_{major}{minor}",
            torch=torch.__version__,
            triton=triton_version,
            driver=f"CUDA {torch.version.cuda}",
            python=platform.python_version(),
        )


@dataclass(frozen=True)
class Result:
    """The candidates of one problem, lowbit's first, with their timings."""

    problem: str
    timings: list[tuple[Candidate, Timing]]


def render(
    benchmark: Benchmark,
    results: list[Result],
    bandwidths: tuple[float, float],
    machine: Machine,
    command: str,
    date: datetime.date,
) -> str:
    """The page. ``bandwidths`` are those of a copy before and after the run; the faster makes the floors."""
    best = max(bandwidths)
    before, after = (f"{b / 1e12:.2f}" for b in bandwidths)
    lines = [
        f"# {benchmark.name}: {benchmark.about}",
        "",
        f"- {date.isoformat()}, `{command}`",
        f"- {machine.gpu} ({machine.capability}), torch {machine.torch}, triton {machine.triton}, "
        f"{machine.driver}, Python {machine.python}",
        f"- copying {COPY_BYTES / 2**30:.0f} GiB in the same run: {before} TB/s before, {after} TB/s after "
        "(read plus written); the faster makes the floors",
        "",
        "Medians, with the middle half of the repeats. *floor*: the bytes that must be moved, at the speed of the "
        "copy. *lowbit is*: how many times faster lowbit is than this peer.",
        "",
        "| problem | implementation | time | middle half | moves | TB/s | time / floor | lowbit is |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        lowbit = result.timings[0][1]
        for i, (candidate, timing) in enumerate(result.timings):
            floor = candidate.moved_bytes / best
            cells = [
                result.problem if i == 0 else "",
                candidate.name + ("" if candidate.graph else " (with the host)"),
                _time(timing.median),
                f"{_time(timing.low)} .. {_time(timing.high)}",
                f"{candidate.moved_bytes / 1e6:.1f} MB",
                f"{candidate.moved_bytes / timing.median / 1e12:.2f}",
                f"{timing.median / floor:.2f}",
                f"{timing.median / lowbit.median:.2f}x" if i else "",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
