"""Warnings that a process gives once, because the same reason mostly applies to all kernels."""

from __future__ import annotations

import warnings

_REASONS: set[str] = set()


def warn_once(reason: str, message: str) -> None:
    """Warn with `message`, unless this process has already warned for `reason`."""
    if reason not in _REASONS:
        _REASONS.add(reason)
        warnings.warn(message, stacklevel=2)


def forget() -> None:
    """Warn again for every reason, as a new process does."""
    _REASONS.clear()
