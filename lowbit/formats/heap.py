"""Giving freed memory back to the system, where the C library keeps it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function; None with another C library."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found


class Trimmed:
    """Returns freed pages of the heap to the system from time to time.

    A walk over a large model frees temporary tensors of many megabytes and keeps small objects between them, which land
    in the holes. The next temporary tensors then fit into no hole, and the heap grows: by 1.4 GB in a walk over 1.1
    billion parameters. The pages of the holes can leave memory all the same.
    """

    EVERY = 2**26

    def __init__(self) -> None:
        self._since = 0

    def advance(self, nbytes: int) -> None:
        """Count so many bytes of tensors that were processed."""
        self._since += nbytes
        if self._since >= self.EVERY:
            self._since = 0
            if (trim := _malloc_trim()) is not None:
                trim(0)
