"""Which implementation of an op ran: each op reports every call to all listeners.

An op calls `ran("weight_linear", "decode")` once it knows its implementation. Without listeners, this costs one
test of an empty list. The calls are made by the ops themselves, so compiled graphs report theirs too.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, str], None]
"""Called with the op's name and the implementation's."""

_listeners: list[Listener] = []
listening_now = ctypes.c_int32(0)
"""Not 0 while there are listeners. The compiled launcher reads it, and then leaves all calls to Python."""


def ran(op: str, implementation: str) -> None:
    """Tell all listeners that `implementation` of `op` runs now."""
    for listener in _listeners:
        listener(op, implementation)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for each op that runs inside."""
    _listeners.append(listener)
    listening_now.value = 1
    try:
        yield
    finally:
        _listeners.remove(listener)
        listening_now.value = int(bool(_listeners))


@contextmanager
def counted() -> Iterator[collections.Counter[tuple[str, str]]]:
    """Count the calls of each (op, implementation) that run inside."""
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    with listening(lambda op, implementation: calls.update([(op, implementation)])):
        yield calls
