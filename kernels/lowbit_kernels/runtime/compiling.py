"""Tells a waiting user which kernel is being compiled.

A compiler takes seconds and reports no progress. A program that shows progress sets `shown`, once, to a
context manager that is open while a kernel is compiled. This package shows nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

shown: Callable[[str], AbstractContextManager[object]] = nullcontext
"""Gets a text such as "compiling a kernel for the CPU"."""


def compiling(target: str) -> AbstractContextManager[object]:
    """The context in which a compiler runs. target: the architecture that it compiles for."""
    return shown(f"compiling a kernel for {target}")
