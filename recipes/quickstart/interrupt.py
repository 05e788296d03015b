"""Ctrl-C that lets the step in progress finish."""

from __future__ import annotations

import os
import signal
from types import FrameType


class Interrupted(Exception):
    """The user asked to stop, and what had to be kept is kept."""


class Interrupt:
    """While open, the first Ctrl-C is noted and the second ends the program at once.

    The program asks `requested` between steps, or calls `check`, which raises `Interrupted`.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"\nstopping after this step (Ctrl-C again: at once)\n")  # print may be in use

    def check(self) -> None:
        if self.requested:
            raise Interrupted
