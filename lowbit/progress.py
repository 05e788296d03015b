"""Bars with the time left for work that takes more than a second: quantizing, loading, exporting, compiling kernels.

    with progress("quantizing", total=nbytes) as advance:
        for weight in weights:
            …
            advance(weight.nbytes)

A bar appears one second after the start, where rich is installed and stderr is a terminal, on rank 0 of a process
group. Everywhere else nothing is written, and the calls cost nothing. Bars inside of bars share one display.

The compilation of a kernel, at its first use on a machine, shows a bar after a fifth of a second. Without rich the
first compilation of a process writes a line to the terminal.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lowbit import optional
from lowbit_kernels.runtime import compiling

DELAY = 1.0
"""Seconds until a bar appears. Work that ends before shows no bar."""
COMPILING_DELAY = 0.2
"""`DELAY` for a compiler, which takes 0.3 to 2.7 seconds in the middle of work that is otherwise short."""


@contextmanager
def progress(
    what: str,
    total: int | None,
    *,
    unit: str = "bytes",
    delay: float | None = None,
) -> Iterator[Callable[[int], None]]:
    """A function that advances the bar by so many units of `total`.

    Args:
        what: the text before the bar: "quantizing".
        total: None if unknown. The bar then shows that the program runs, and for how long.
        unit: "bytes", which the bar shows as MB and MB/s, or what is counted: "layers".
        delay: seconds until the bar appears; by default `DELAY`.
    """
    if not _is_seen():
        yield _nothing
        return
    task = _DISPLAY.add(what, total, unit, DELAY if delay is None else min(delay, DELAY))
    try:
        yield lambda count: _DISPLAY.advance(task, count)
    finally:
        _DISPLAY.remove(task)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A bar without an end, for work that does not report its progress."""
    with progress(what, None, unit=""):
        yield


@contextmanager
def _compiling(what: str) -> Iterator[None]:
    """What `lowbit_kernels.runtime.compiling` shows."""
    what = f"{what}, once on this machine"
    if _is_on_terminal() and not optional.is_importable("rich"):
        _write_once(f"lowbit: {what}")
    with progress(what, None, unit="", delay=COMPILING_DELAY):
        yield


@functools.cache
def _write_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _nothing(count: int) -> None:
    pass


def _is_seen() -> bool:
    """True if somebody sees a bar of this process."""
    return _is_on_terminal() and optional.is_importable("rich")


def _is_on_terminal() -> bool:
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0)


class _Display:
    """All bars of the process. rich allows one display at a time, and a bar may begin in any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bars: Any = None
        """rich's Progress while there are tasks."""
        self._timers: list[threading.Timer] = []
        self._count = 0

    def add(self, what: str, total: int | None, unit: str, delay: float) -> Any:
        with self._lock:
            is_first = self._bars is None
            if is_first:
                self._bars = _new_bars()
            if is_first or delay < self._timers[-1].interval:
                timer = threading.Timer(delay, self._show, [self._bars])
                timer.daemon = True
                timer.start()
                self._timers.append(timer)
            self._count += 1
            return self._bars.add_task(what, total=total, unit=unit)

    def _show(self, bars: Any) -> None:
        with self._lock:
            if self._bars is bars and not bars.live.is_started:
                bars.start()

    def advance(self, task: Any, count: int) -> None:
        bars = self._bars
        if bars is not None:
            bars.advance(task, count)

    def remove(self, task: Any) -> None:
        with self._lock:
            self._bars.remove_task(task)
            self._count -= 1
            if self._count:
                return
            for timer in self._timers:
                timer.cancel()
            if self._bars.live.is_started:
                self._bars.stop()
            self._bars, self._timers = None, []


_DISPLAY = _Display()


def _new_bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Count(ProgressColumn):
        """How much of the total is done."""

        def render(self, task: Any) -> Text:
            unit = task.fields["unit"]
            if task.total is None:
                return Text(f"{task.elapsed or 0:.0f} s")
            if unit != "bytes":
                return Text(f"{task.completed:,.0f} of {task.total:,.0f} {unit}")
            speed = "" if task.speed is None else f", {task.speed / 1e6:,.0f} MB/s"
            return Text(f"{task.completed / 1e6:,.0f} of {task.total / 1e6:,.0f} MB{speed}")

    columns = TextColumn("{task.description}"), BarColumn(), Count(), TimeRemainingColumn()
    # transient: the last line of a program stays its own. What the program prints is not redirected.
    options: dict[str, Any] = {
        "transient": True,
        "redirect_stdout": False,
        "redirect_stderr": False,
    }
    return Progress(*columns, console=Console(stderr=True), **options)


compiling.shown = _compiling
