"""Collections of what one test made, without the objects of all earlier tests, which take seconds to traverse."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new() -> Iterator[None]:
    """No collection runs inside by itself. So `gc.collect(0)`, which visits the newest objects alone, visits all that
    were made inside."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
