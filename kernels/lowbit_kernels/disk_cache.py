"""Compiled kernels on disk: in ``$LOWBIT_CACHE_DIR``, else ``$XDG_CACHE_HOME/lowbit``, else ``~/.cache/lowbit``; for
a user without a home in a folder of that user's own among the temporary ones.

A file is named by a digest of all that its machine code depends on (source, compiler, options, processor), and by one
of the code itself: a file that has been cut off or damaged is not taken.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from pathlib import Path


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None where somebody else has made the folder first.

    Raises:
        OSError: there is no folder for temporary files, where one is needed.
    """
    if chosen := os.environ.get("LOWBIT_CACHE_DIR"):
        return _absolute(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return _absolute(chosen) / "lowbit"
    try:
        return Path.home() / ".cache" / "lowbit"
    except RuntimeError:  # a user without a home
        folder = Path(tempfile.gettempdir()) / f"lowbit-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        is_own = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        return folder if is_own else None


def find(suffix: str, *parts: str) -> Path | None:
    """The file with the kernel that depends on `parts`; None if it isn't there."""
    try:
        folder = cache_folder()
        for path in folder.glob(f"{_key(parts)}-*{suffix}") if folder else ():
            if path.name == _name(path.read_bytes(), suffix, parts):
                return path
    except OSError:
        pass
    return None


def keep(code: bytes, suffix: str, *parts: str) -> Path | None:
    """Write a kernel whole or not at all, whoever else does. Returns its file; None where the folder takes none."""
    try:
        folder = cache_folder()
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _name(code, suffix, parts)
        new = folder / f".{secrets.token_hex(8)}"  # with the rights that the user's umask leaves
    except OSError:
        return None
    try:
        with new.open("xb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        return None
    return path


def _absolute(folder: str) -> Path:
    """As the loader of libraries needs it. Without a home a "~" stays, where `Path.expanduser` would raise."""
    return Path(os.path.expanduser(folder)).absolute()


def _key(parts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _name(code: bytes, suffix: str, parts: tuple[str, ...]) -> str:
    return f"{_key(parts)}-{hashlib.sha256(code).hexdigest()[:16]}{suffix}"
