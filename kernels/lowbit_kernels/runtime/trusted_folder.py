"""Folders and files that only this user or root can have written.

A user who can write to a folder, or to any folder above it, can replace its files. So this module walks a path from the
root down. Each folder on the way must belong to this user or to root, and no other user may write to it. Nobody else
can then replace a component that was checked, so later uses of the path reach the same folder. A file is checked again
by itself, once it is open.

Two things on the way are allowed:

- A folder above the last one may be writable by all if it is sticky, like /tmp. Others can make files in it, but cannot
  rename or delete those of this user and of root, and the next folder must belong to one of these two.
- A symbolic link is followed if it belongs to this user or to root; its target is walked in the same way.

A POSIX access list that lets others write shows in the group's mode bits, which hold the list's mask.

On systems whose file owners Python cannot read (Windows), nothing is checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from pathlib import Path

from lowbit_kernels.runtime.warned import warn_once

HAS_OWNERS = hasattr(os, "geteuid")
# Read by name, since Windows has none of them. O_NONBLOCK: opening a FIFO, or a file with a lease, returns at once.
_FILE = sum(getattr(os, n, 0) for n in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # the limit of Linux
TEMPORARY = ("/tmp", "/var/tmp")
"""Folders for temporary files where the one that $TMPDIR names is untrusted."""


class Untrusted(OSError):
    """A file or folder is untrusted. `reason` says why; the message is the path and the reason."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


def read(path: Path, largest: int) -> bytes:
    """The content of a file in a checked folder. The file is opened once.

    Raises:
        FileNotFoundError: there is no such file.
        Untrusted: it is not a regular file, belongs to another user, others may write to it, it has more than
            `largest` bytes, or it cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _FILE)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Untrusted(path, "is a symbolic link") from error
        raise Untrusted(path, f"cannot be opened ({error.strerror})") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted(path, "is not a regular file")
        if HAS_OWNERS:
            _check(status, path)
        if status.st_size > largest:
            raise Untrusted(path, f"has {status.st_size} bytes, and at most {largest} can be read")
        with open(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)  # not more, if it grows meanwhile
    finally:
        os.close(handle)


def write(path: Path, content: bytes) -> None:
    """Make or replace a file in a checked folder, atomically; only this user can read and write it.

    Raises:
        OSError: the file cannot be written.
    """
    new = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def check(path: Path, *, make: bool = False, shared: bool = False) -> None:
    """Check the folder of an absolute path, and all folders above it.

    Args:
        path: the folder.
        make: make missing folders, for this user alone (0700).
        shared: also accept a folder like /tmp, in which others may make files.

    Raises:
        FileNotFoundError: the folder does not exist, and `make` is False.
        Untrusted: others can put files there.
        OSError: the folder cannot be reached or made.
    """
    if not HAS_OWNERS:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    here, names, links = "/", str(path).split("/")[::-1], 0
    try:
        while names:
            here = os.path.normpath(os.path.join(here, names.pop()))  # no component of it is a link
            try:
                status = os.lstat(here)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):  # another process made it
                    os.mkdir(here, 0o700)
                status = os.lstat(here)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                _check(status, here, within=True)
                target = os.readlink(here)
                names += target.split("/")[::-1]
                here = "/" if target.startswith("/") else os.path.dirname(here)
            elif stat.S_ISDIR(status.st_mode):
                _check(status, here, within=shared or bool(names))
            else:
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except Untrusted:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, here) from error


def temporary() -> str:
    """A folder for temporary files in which no other user can replace a file.

    Under sudo, $TMPDIR may name another user's folder. A warning names, once, a folder that is refused.

    Raises:
        OSError: every folder is refused.
    """
    chosen = tempfile.gettempdir()
    refused: list[str] = []
    for folder in dict.fromkeys((chosen, *TEMPORARY)) if HAS_OWNERS else (chosen,):
        try:
            check(Path(folder).absolute(), shared=True)
        except OSError as error:
            refused.append(str(error))
            continue
        if refused:
            warn_once(
                refused[0],
                f"{refused[0]}; temporary files go to {folder}. Set TMPDIR to a folder of your own",
            )
        return folder
    raise OSError(
        f"no folder for temporary files is safe from other users: {'; '.join(refused)}. Set TMPDIR to a folder "
        "that, like all folders above it, belongs to you or root and that nobody else may write to"
    )


def _check(status: os.stat_result, path: str | Path, within: bool = False) -> None:
    """Raise Untrusted if others can write to it; with `within`, if they can replace files that are not theirs."""
    owner, mode = status.st_uid, status.st_mode
    if owner not in (os.geteuid(), 0) and not (within and _hides_root(owner)):
        user = os.geteuid()
        raise Untrusted(path, f"belongs to user {owner}, and this process runs as user {user}")
    if stat.S_ISLNK(mode):  # its mode bits mean nothing
        return
    if mode & _OTHERS_WRITE and not (within and mode & stat.S_ISVTX):
        raise Untrusted(path, f"can be written to by others (mode {stat.S_IMODE(mode):04o})")


def _hides_root(owner: int) -> bool:
    """True if root's files appear to belong to `owner`, as in a container whose user namespace has no root.

    The files of all users outside the namespace then appear to belong to `owner`. Such a user could replace a folder
    above the last one, but only by another folder of this user: the last folder and its files must be this user's own.
    """
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
        maps = Path("/proc/self/uid_map").read_text().splitlines()
    except (OSError, ValueError):
        return False
    return owner == unknown and all(int(line.split()[0]) != 0 for line in maps)
