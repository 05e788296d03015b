"""A new file or folder that takes its place whole, and only once its bytes are on the disk.

Until then the new file lies in a hidden folder beside its place, the workplace:

    .out.lowbit-0123456789ab/
        lock     locked while the process runs that writes; the system unlocks it when the process ends, in any way
        files/   the new file, with those written beside it
        out      the new folder; after an exchange, the old folder
        old      the old folder, between two renames where the system exchanges nothing

So a lock that is free marks the workplace of a killed process. The next process that writes `out` removes the
workplace, and first puts the old folder back if the killed process stopped between the two renames.

Work of hours leaves its finished parts in `.out.lowbit-NAME` instead (`kept`), from which a later process goes on.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import glob
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK, _UNLOCKED, _OLD = "lock", "unlocked", "old"
_AT_FDCWD, _EXCHANGE = -100, 2
"""Constants of Linux; macOS has the same number for its swap."""
_RUNNING: set[Path] = set()
"""Workplaces of this process. Without locks, only this set tells them from those of killed processes."""


# ---- places ----------------------------------------------------------------------------------------------------------


@contextmanager
def new_file(out: Path, check: Callable[[Path], None] = lambda place: None) -> Iterator[Path]:
    """A path to write a file to, which takes the place of `out` at the end. After an error `out` is unchanged.

    Other files that are written beside that path, such as the tensors of a large ONNX model, take places beside `out`.

    Args:
        out: where the file goes.
        check: called with each place before anything is put there; it may raise.

    Raises OSError, which names `out`, if the system refuses to write.
    """
    try:
        with workplace(out) as place:
            (folder := place / "files").mkdir()
            yield folder / out.name
            written = sorted(folder.iterdir(), key=lambda path: path.name == out.name)
            for path in written:
                check(out.parent / path.name)
            put_files(written, out.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(out)) from error


@contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` to write in, which is gone at the end. Raises OSError if it cannot be made."""
    clear(out)
    place, lock = _new_place(out)
    _RUNNING.add(place)
    try:
        yield place
    finally:
        _remove(place, lock)
        _RUNNING.discard(place)


@contextmanager
def kept(out: Path, name: str, locks: bool = True) -> Iterator[Path]:
    """The hidden folder `.out.lowbit-name` beside `out`. It stays after an error or a kill, and is removed at the end.

    `locks`: False where a process that this one works with makes, locks and removes it.

    Raises BlockingIOError if another process has it, and OSError if it cannot be made.
    """
    place = out.parent / f".{out.name}.lowbit-{name}"
    if not locks:
        yield place
        return
    place.mkdir(exist_ok=True)
    lock: int | None = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    assert lock is not None
    try:
        _lock(lock)
        if not _is_at(lock, place / _LOCK):  # its process has just ended, and removed the folder
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(place))
    except BlockingIOError:
        os.close(lock)
        raise
    except OSError:  # a file system without locks
        os.close(lock)
        lock = None
        warnings.warn(
            f"{place} lies on a file system without locks: see that no other process writes it",
            stacklevel=4,
        )
    try:
        yield place
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise
    _remove(place, lock)


def _is_at(handle: int, path: Path) -> bool:
    """True if the open file has this path still."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def put_files(files: list[Path], folder: Path) -> None:
    """Move files of a workplace into `folder`, one after another, once all of them are on the disk."""
    for path in files:
        _flush(path)
    for path in files:
        os.replace(path, folder / path.name)
    _flush(folder)


def put_folder(new: Path, out: Path) -> None:
    """Put the folder `new` of a workplace in the place of `out`, once all its files are on the disk.

    The old folder stays in the workplace. Where the system exchanges two names at once, `out` is there at all times.
    """
    for root, _, files in os.walk(new, topdown=False):
        for name in files:
            _flush(Path(root, name))
        _flush(Path(root))
    if not (out.exists() and _exchanged(new, out)):
        _rename_both(new, out)
    _flush(new.parent)
    _flush(out.parent)


def _rename_both(new: Path, out: Path) -> None:
    """Move the old folder away, then the new one to its place. After Ctrl-C `out` is one of the two."""
    old = new.parent / _OLD
    try:
        if out.exists():
            os.rename(out, old)
        os.rename(new, out)
        if old.exists():
            os.rename(old, new)
    except BaseException:
        if old.exists() and not out.exists():
            os.rename(old, out)
        raise


# ---- what a killed process left --------------------------------------------------------------------------------------


def clear(out: Path) -> None:
    """Remove what killed processes left beside `out`, with a warning for each folder.

    On a file system without locks a folder may belong to a running process. The folder stays, and the warning names it.
    """
    pattern = glob.escape(f".{out.name}.lowbit-") + "[0-9a-f]" * 12
    for place in sorted({*out.parent.glob(pattern)} - _RUNNING):
        try:
            _clear_place(place, out)
        except OSError as error:
            warnings.warn(
                f"{place} is left of a process that wrote {out}: delete it unless that process still runs "
                f"({error.strerror or error})",
                stacklevel=3,
            )


def _clear_place(place: Path, out: Path) -> None:
    try:
        lock = os.open(place / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        place.rmdir()  # a process was killed after it made the folder; another content is not ours
        return
    try:
        _lock(lock)
    except BlockingIOError:  # its process runs
        os.close(lock)
        return
    try:
        old = place / _OLD
        if old.exists() and not out.exists():
            os.rename(old, out)
            _flush(out.parent)
            warnings.warn(
                f"{out} was missing, because a process was killed while it replaced it: the old one is back",
                stacklevel=4,
            )
    except OSError:
        os.close(lock)
        raise
    _remove(place, lock)
    warnings.warn(f"{place}, which a killed process left, is removed", stacklevel=4)


def _new_place(out: Path) -> tuple[Path, int | None]:
    """A workplace and the handle of its lock; None on a file system without locks."""
    while True:
        place = out.parent / f".{out.name}.lowbit-{secrets.token_hex(6)}"
        place.mkdir()
        try:
            lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # another process took the empty folder for one that was left
            continue
        try:
            _lock(lock)
            is_ours = (place / _LOCK).exists()
        except BlockingIOError:  # the same, before this process locked it
            is_ours = False
        except OSError:  # a file system without locks
            os.close(lock)
            os.rename(place / _LOCK, place / _UNLOCKED)
            return place, None
        if is_ours:
            return place, lock
        os.close(lock)


def _lock(handle: int) -> None:
    """Raises BlockingIOError if another handle holds the lock, and OSError on a file system without locks."""
    if fcntl is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(place: Path, lock: int | None) -> None:
    try:
        _remove_all(place)
    except BaseException:  # Ctrl-C
        _remove_all(place)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _remove_all(place: Path) -> None:
    """The lock goes last: without a lock the rest would not be known for that of a killed process."""
    for path in place.glob("*"):
        if path.name != _LOCK:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(place, ignore_errors=True)


# ---- the system ------------------------------------------------------------------------------------------------------


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt":  # which opens no folders, and flushes only what is open for writing
        if path.is_file():
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without a disk
            raise
    finally:
        os.close(handle)


def _exchanged(a: Path, b: Path) -> bool:
    """True if the system exchanged two names at once. False if the system or the file system cannot."""
    exchange = _exchange()
    return exchange is not None and exchange(os.fsencode(a), os.fsencode(b)) == 0


@functools.cache
def _exchange() -> Callable[[bytes, bytes], int] | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    if hasattr(library, "renameat2"):
        return lambda a, b: library.renameat2(_AT_FDCWD, a, _AT_FDCWD, b, ctypes.c_uint(_EXCHANGE))
    if hasattr(library, "renamex_np"):
        return lambda a, b: library.renamex_np(a, b, ctypes.c_uint(_EXCHANGE))
    return None
