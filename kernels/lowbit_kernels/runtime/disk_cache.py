"""Compiled kernels on disk: in ``$LOWBIT_CACHE_DIR``, or else ``$XDG_CACHE_HOME/lowbit``, or else ``~/.cache/lowbit``.

For a user without a home, the folder is ``lowbit-UID`` among the temporary folders.

This module reads code that is then executed. So it reads a file only if no user except this one and root can have
written it (`trusted_folder`). It does not use an untrusted folder, and warns once a process. It never changes the mode
of an existing folder, since the path may name any folder, even /tmp. It replaces an untrusted file.

A file's name is a digest of everything that its machine code depends on (source, compiler, options, processor). The
file holds the code and then a digest of name and code, so that a truncated, damaged or renamed file is detected. Tools
for ELF files ignore the bytes after the code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lowbit_kernels.runtime import trusted_folder
from lowbit_kernels.runtime.warned import warn_once

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

DIGEST = 32  # bytes
LONGEST_WAIT = 60.0  # seconds for a process that compiles the same kernel


def cache_folder() -> Path:
    """The folder of compiled kernels; an absolute path.

    Raises:
        OSError: the path needs a folder for temporary files or a current folder, and there is none.
    """
    if chosen := os.environ.get("LOWBIT_CACHE_DIR"):
        return _absolute(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return _absolute(chosen) / "lowbit"
    try:
        return Path.home().absolute() / ".cache" / "lowbit"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()).absolute() / f"lowbit-{os.getuid()}"


def find(suffix: str, *parts: str) -> bytes | None:
    """The machine code of the kernel that depends on `parts`; None if it is missing or, after a warning, untrusted."""
    name = _name(suffix, parts)
    try:
        folder = trusted_folder.trusted(cache_folder())
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_of_folder(error)
        return None
    try:
        return _read(folder / name)
    except FileNotFoundError:
        return None
    except OSError as error:
        warn_once(
            getattr(error, "reason", str(error.strerror)),
            f"a compiled kernel is not run: {error}. lowbit compiles it again and replaces the file. If this recurs, "
            "remove the file, or set LOWBIT_CACHE_DIR to a folder of your own",
        )
        return None


def find_or_make(make: Callable[[], bytes], suffix: str, *parts: str) -> bytes:
    """The machine code of the kernel that depends on `parts`: from the disk, or what `make` returns, which is kept.

    Processes that start together, such as the ranks of a job, would all compile the same kernels. So one of them calls
    `make`, and the others wait for its file.
    """
    code = find(suffix, *parts)
    if code is None:
        with _alone(_name(suffix, parts)):
            code = find(suffix, *parts)
            if code is None:
                code = make()
                keep(code, suffix, *parts)
    return code


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold the lock of a kernel. It only saves work: without locks, or after `LONGEST_WAIT`, the block runs all the
    same."""
    try:
        path = trusted_folder.trusted(cache_folder(), make=True) / f".{name}.lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # `keep` warns of the folder
        yield
        return
    try:
        end = time.monotonic() + LONGEST_WAIT
        while _is_taken(handle) and time.monotonic() < end:
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            path.unlink()


def _is_taken(handle: int) -> bool:
    """False if this process has the lock now, or if there are no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        pass
    return False


def keep(code: bytes, suffix: str, *parts: str) -> bool:
    """Write a kernel atomically. False, after a warning, if the folder cannot be written to or is untrusted."""
    name = _name(suffix, parts)
    try:
        folder = trusted_folder.trusted(cache_folder(), make=True)
        trusted_folder.write(folder / name, code + _digest(name, code))
    except OSError as error:
        _warn_of_folder(error)
        return False
    return True


def _read(path: Path) -> bytes:
    content = trusted_folder.read(path)
    code, digest = content[:-DIGEST], content[-DIGEST:]
    if digest != _digest(path.name, code):
        raise trusted_folder.Untrusted(path, "is damaged")
    return code


def _warn_of_folder(error: OSError) -> None:
    if isinstance(error, trusted_folder.Untrusted):
        warn_once(
            error.reason,
            f"compiled kernels are neither read from the disk nor kept there: {error}, and others could plant code. "
            "Each process compiles its own. Set LOWBIT_CACHE_DIR to a folder of your own: it and each folder above it "
            "must belong to you or to root, and nobody else may write to it (chmod go-w, if it is for you alone)",
        )
    else:
        warn_once(
            str(error.strerror),
            f"a compiled kernel cannot be kept on disk: {error}. Each process compiles its own. Set LOWBIT_CACHE_DIR "
            "to a folder that you can write to",
        )


def _absolute(folder: str) -> Path:
    """The absolute path; "~" stays for a user without a home, where `Path.expanduser` would raise."""
    return Path(os.path.expanduser(folder)).absolute()


def _name(suffix: str, parts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() + suffix


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + code).digest()
