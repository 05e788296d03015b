"""Collections of what one test made, without the objects of all earlier tests, which take seconds to traverse."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new() -> Iterator[None]:
    """What is made inside stays in the youngest generation, which is all that `gc.collect(0)` looks at."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
