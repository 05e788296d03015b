"""A bar with the time left, where tqdm is installed and somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowbit.tensor.base import LowbitTensor


def nbytes(t: object) -> int:
    """Bytes that a tensor takes as it is stored."""
    return t.nbytes_stored() if isinstance(t, LowbitTensor) else int(getattr(t, "nbytes", 0))


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that advances the bar by so many bytes of `total`. Without tqdm, or where stderr is no terminal, it
    does nothing."""
    bar = None
    if sys.stderr is not None and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024)
    try:
        yield (lambda _: None) if bar is None else bar.update
    finally:
        if bar is not None:
            bar.close()
