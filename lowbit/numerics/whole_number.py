"""The check of an option that is a whole number."""

from __future__ import annotations

from typing import Any


def check_whole(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """`value`, if it is a whole number from `least` to `most`. Raises ValueError with the `name` for anything else."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        accepted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {accepted}, got {value!r}")
    return value
