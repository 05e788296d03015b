"""The low-bit products that ran, as `scaled_mm` itself reports them: also from compiled graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lowbit_kernels.runtime import launches


@contextmanager
def scaled_products() -> Iterator[Counter[str]]:
    """Count the calls of `scaled_mm` and `block_scaled_mm` inside, by number format: {"int8": 3, "float8": 2}."""
    calls: Counter[str] = Counter()

    def add(op: str, implementation: str) -> None:
        if op == "scaled_mm":
            calls[implementation.split()[0]] += 1
        if op == "block_scaled_mm":
            calls["float8"] += 1

    with launches.listening(add):
        yield calls
