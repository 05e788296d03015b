"""Tables of classes by name. Files and state dicts name classes, so a name must mean one class."""

from __future__ import annotations

from typing import Any


def enter(table: dict[str, Any], cls: type) -> None:
    """Add `cls` to `table` under its `__name__`. Raises TypeError as `check_free` does."""
    check_free(table.get(cls.__name__), cls, f"the name {cls.__name__!r}")
    table[cls.__name__] = cls


def check_free(holder: type | None, cls: type, key: str) -> None:
    """Raise TypeError if `holder`, the class that has this key now, is not `cls`.

    A class of the same module and `__qualname__` is `cls`, defined again: in a notebook cell, by a reload, or by
    `@dataclass(slots=True)`, which makes the class twice. The new class replaces the old one.
    """
    if holder is not None and _path(holder) != _path(cls):
        raise TypeError(
            f"{_path(cls)} takes {key}, which {_path(holder)} has already; give the new class another"
        )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
