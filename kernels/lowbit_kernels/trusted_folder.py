"""Folders whose files only this user, or root, can have put there.

Whoever can write to a folder, or to any folder above it, can put a file of their own in the place of another. So a
path is walked from the root, one component at a time, each opened relative to the one before. Each folder on the way
has to belong to this user or to root, and nobody else may write to it. Files are then opened relative to the last
one: there is no second look-up by path, so what has been checked is what is used.

Two things on the way are not refused:

- A folder above may be writable by all if it is sticky, as /tmp is: others can make files in it, but can neither
  rename nor delete those of this user and of root, and the next folder has to belong to one of these two.
- A symbolic link is followed if it belongs to this user or to root; what it points to is walked in the same way.
  Links lie in checked folders, so nobody else can exchange one between the look at its owner and the reading of it.

A POSIX access list that lets others write shows in the bits of the group, which hold its mask. A file needs no look
at its number of links: whoever makes another link to it changes neither its owner nor who may write to it.

Systems whose files have no owners that Python can read (Windows) get no checks; their folders are opened by path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowbit_kernels.warned import warn_once

HAS_OWNERS = hasattr(os, "geteuid") and os.open in os.supports_dir_fd
# Absent on Windows, so read by name. O_PATH (Linux) opens a folder that one may pass through but not list.
_FOLDER = sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_PATH"))
# O_NONBLOCK: opening a FIFO returns at once, and so does opening a file on which somebody holds a lease.
_FILE = sum(getattr(os, n, 0) for n in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as Linux
TEMPORARY = ("/tmp", "/var/tmp")  # where the folder that $TMPDIR names is not to be trusted


class Untrusted(OSError):
    """What is wrong with a file or folder: `reason`, to be read after its path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Folder:
    """An open folder. Without a descriptor (see `HAS_OWNERS`) its files are opened by path."""

    path: Path
    descriptor: int | None

    def read(self, name: str, largest: int) -> bytes:
        """A file's content, from a single opening of it.

        Raises:
            FileNotFoundError: it isn't there.
            Untrusted: it is no regular file, belongs to somebody else, others may write to it, it has more than
                `largest` bytes, or it can't be opened.
        """
        path = self.path / name
        try:
            handle = os.open(self._at(name), os.O_RDONLY | _FILE, dir_fd=self.descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Untrusted(path, "is a symbolic link") from error
            raise Untrusted(path, f"cannot be opened ({error.strerror})") from error
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise Untrusted(path, "is no regular file")
            if self.descriptor is not None:
                _check(status, path)
            if status.st_size > largest:
                raise Untrusted(path, f"has {status.st_size} bytes, and at most {largest} are read")
            with open(handle, "rb", closefd=False) as file:
                return file.read(status.st_size)  # no more, should it grow meanwhile
        finally:
            os.close(handle)

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file that only this user can read and write: whole or not at all, whoever else does.

        Raises:
            OSError: the folder takes no file, or none of that name.
        """
        new, at = f".{secrets.token_hex(8)}", self.descriptor
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
            with open(os.open(self._at(new), flags, 0o600, dir_fd=at), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._at(new), self._at(name), src_dir_fd=at, dst_dir_fd=at)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(self._at(new), dir_fd=at)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path / name)) from error
            raise

    def _at(self, name: str) -> str:
        return name if self.descriptor is not None else str(self.path / name)


@contextlib.contextmanager
def opened(path: Path, *, make: bool = False, shared: bool = False) -> Iterator[Folder]:
    """The folder of an absolute path. `make`: with what is missing of it made, for this user alone (0700); `shared`:
    also one like /tmp, in which others may make files.

    Raises:
        FileNotFoundError: it isn't there, and `make` is False.
        Untrusted: others can put files there.
        OSError: it can't be opened or made.
    """
    if not HAS_OWNERS:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield Folder(path, None)
        return
    descriptor = _walk(path, make, shared)
    try:
        yield Folder(path, descriptor)
    finally:
        os.close(descriptor)


def temporary() -> str:
    """A folder for temporary files in which nobody else can exchange one: under sudo, $TMPDIR may name one of another
    user. A folder that is passed over is told once.

    Raises:
        OSError: there is none.
    """
    chosen = tempfile.gettempdir()
    refused: list[str] = []
    for folder in dict.fromkeys((chosen, *TEMPORARY)) if HAS_OWNERS else (chosen,):
        try:
            with opened(Path(folder).absolute(), shared=True):
                if refused:
                    warn_once(
                        refused[0],
                        f"{refused[0]}; temporary files go to {folder}. Set TMPDIR to a folder of your own",
                    )
                return folder
        except OSError as error:
            refused.append(str(error))
    raise OSError(
        f"no folder for temporary files is safe from other users: {'; '.join(refused)}. Set TMPDIR to a folder "
        "that, like all folders above it, belongs to you or root and that nobody else may write to"
    )


def _walk(path: Path, make: bool, shared: bool) -> int:
    """A descriptor of the folder, all of whose path has been checked."""
    here, folder = Path(path.anchor), os.open(path.anchor, os.O_RDONLY | _FOLDER)
    # "/" comes first: opened relative to any folder, it is the root.
    names = list(reversed(path.parts))
    links = 0
    try:
        while names:
            _check(os.fstat(folder), here, within=True)
            name = names.pop()
            here = here / name
            status = _status(name, folder, make)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                _check_owner(status, here, within=True)
                names += reversed(Path(os.readlink(name, dir_fd=folder)).parts)
                here = here.parent
            else:
                inner = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
        _check(os.fstat(folder), here, within=shared)
    except BaseException as error:
        os.close(folder)
        if isinstance(error, OSError) and not isinstance(error, Untrusted):
            raise OSError(error.errno, error.strerror, str(here)) from error  # all of its path
        raise
    return folder


def _status(name: str, folder: int, make: bool) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # made by another process meanwhile: checked as any
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _check(status: os.stat_result, path: Path, within: bool = False) -> None:
    """Untrusted, if others can write to it; `within`: if they can exchange what is in it and isn't theirs."""
    _check_owner(status, path, within)
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS_WRITE and not (within and mode & stat.S_ISVTX):
        raise Untrusted(path, f"can be written to by others (mode {mode:04o})")


def _check_owner(status: os.stat_result, path: Path, within: bool) -> None:
    user, owner = os.geteuid(), status.st_uid
    if owner not in (user, 0) and not (within and _hides_root(owner)):
        raise Untrusted(path, f"belongs to user {owner}, and this process runs as user {user}")


def _hides_root(owner: int) -> bool:
    """Whether root's files seem to belong to `owner`, as in a container whose user namespace has no root.

    Files of all users outside then seem to belong to that one. Such a user could exchange a folder above the last one,
    but only for another folder of this user: the last folder and its files have to be this user's own.
    """
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
        maps = Path("/proc/self/uid_map").read_text().splitlines()
    except (OSError, ValueError):
        return False
    return owner == unknown and all(int(line.split()[0]) != 0 for line in maps)
