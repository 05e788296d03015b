"""The entries of a `lowbit.trace` for one layer, in the form that tests compare."""

from __future__ import annotations

from collections import Counter

from lowbit import Trace


def ran_in(found: Trace, layer: str = "") -> dict[str, dict[str, int]]:
    """By product: the number of calls in each format."""
    formats: dict[str, Counter[str]] = {}
    for p in found.products:
        if p.layer == layer and p.calls:
            formats.setdefault(p.product, Counter())[p.ran_in] += p.calls
    return {product: dict(counts) for product, counts in formats.items()}


def low_bit(found: Trace, layer: str = "") -> list[str]:
    """The products that ran in low bits."""
    return [p.product for p in found.products if p.layer == layer and p.in_low_bits]


def reasons(found: Trace, layer: str = "") -> set[str]:
    """Why products did not run in low bits."""
    return {p.why for p in found.products if p.layer == layer and p.why}
