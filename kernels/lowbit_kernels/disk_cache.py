"""Compiled kernels on disk: in ``$LOWBIT_CACHE_DIR``, else ``$XDG_CACHE_HOME/lowbit``, else ``~/.cache/lowbit``.

A kernel's name is a digest of all that its machine code depends on: source, compiler, options, processor.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def cached_path(suffix: str, *parts: str) -> Path:
    """Where the kernel that depends on `parts` is kept, or is to be."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder() / f"{digest}{suffix}"


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    if chosen := os.environ.get("LOWBIT_CACHE_DIR"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "lowbit"
    try:
        return Path.home() / ".cache" / "lowbit"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "lowbit"


def keep(path: Path, code: bytes) -> None:
    """Write it whole or not at all, whoever else does; a folder that can't be written to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
