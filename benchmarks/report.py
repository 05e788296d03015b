"""A run as a markdown page: machine, date, and each time next to its peers and its floor."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.registry import Benchmark, Result, Row, Table
from benchmarks.timing import COPY_BYTES, measure


@dataclass(frozen=True)
class Machine:
    """The hardware and software on which a figure depends. On a CPU, ``capability`` is the number of threads."""

    gpu: str
    capability: str
    torch: str
    triton: str
    driver: str
    python: str

    @classmethod
    def here(cls, device: str = "cuda") -> Machine:
        try:
            import triton
        except ImportError:
            triton_version = "not installed"
        else:
            triton_version = triton.__version__
        if device == "cpu":
            name, capability = processor(), f"{torch.get_num_threads()} threads"
        else:
            major, minor = torch.cuda.get_device_capability()
            name, capability = torch.cuda.get_device_name(), f"sm_{major}{minor}"
        return cls(
            gpu=name,
            capability=capability,
            torch=torch.__version__,
            triton=triton_version,
            driver=f"CUDA {torch.version.cuda}",
            python=platform.python_version(),
        )


def processor() -> str:
    """The name of the CPU, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def render(
    benchmark: Benchmark,
    results: list[Result],
    bandwidths: tuple[float, float] | None,
    machine: Machine,
    command: str,
    date: datetime.date,
) -> str:
    """The page in Markdown.

    Args:
        benchmark: the benchmark that was run.
        results: its rows, by problem.
        bandwidths: bytes a second of a copy before and after the run; the faster sets the floors; None without one.
        machine: what was measured on.
        command: the command line.
        date: the day of the run.
    """
    table = benchmark.table or KERNEL_TABLE
    lines = [
        f"# {benchmark.name}: {benchmark.about}",
        "",
        f"- {date.isoformat()}, `{command}`",
        f"- {machine.gpu} ({machine.capability}), torch {machine.torch}, triton {machine.triton}, "
        f"{machine.driver}, Python {machine.python}",
    ]
    if bandwidths is not None:
        before, after = (f"{b / 1e12:.2f}" for b in bandwidths)
        lines.append(
            f"- copying {COPY_BYTES / 2**30:.0f} GiB in the same run: {before} TB/s before, {after} TB/s after "
            "(read plus written); the faster one sets the floors"
        )
    headings = ("problem", "implementation", *table.columns)
    lines += [
        "",
        table.legend,
        "",
        "| " + " | ".join(headings) + " |",
        "|---|---|" + "--:|" * len(table.columns),
    ]
    best = max(bandwidths) if bandwidths is not None else float("nan")
    for result in results:
        for i, row in enumerate(result.rows):
            cells = [result.problem.name if i == 0 else "", row.candidate.name]
            if row.measured is None:
                cells += [row.why_not] + [""] * (len(table.columns) - 1)
            else:
                cells += table.cells(row, result, best)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def readable(seconds: float) -> str:
    """A time in a suitable unit."""
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def ratio(value: float, reference: float | None) -> str:
    """``value`` as a multiple of ``reference``; empty without one."""
    return "" if not reference else f"{value / reference:.2f}"


def _kernel_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    candidate, timing = row.candidate, row.measured
    lowbit = result.reference
    is_peer = row is not lowbit and lowbit.measured is not None
    return [
        readable(timing.median) + ("" if candidate.graph else " (with the host)"),
        f"{readable(timing.low)} .. {readable(timing.high)}",
        f"{candidate.moved_bytes / 1e6:.1f} MB",
        f"{candidate.moved_bytes / timing.median / 1e12:.2f}",
        f"{timing.median / (candidate.moved_bytes / bandwidth):.2f}",
        f"{timing.median / lowbit.measured.median:.2f}x" if is_peer else "",
    ]


KERNEL_TABLE = Table(
    columns=("time", "middle half", "moves", "TB/s", "time / floor", "lowbit is"),
    measure=measure,
    cells=_kernel_cells,
    legend="Medians; *middle half*: between the quartiles. *floor*: the time to move the necessary bytes at the speed "
    "of the copy. *lowbit is*: how many times faster lowbit is than this peer.",
)
