"""Folders whose files only this user or root can have written.

A user who can write to a folder, or to any folder above it, can replace its files. So this module walks a path from the
root and opens each component relative to the previous one. Each folder on the way must belong to this user or to root,
and no other user may write to it. Files are opened relative to the last folder, so the checked folder is the one used.

Two things on the way are allowed:

- A folder above the last one may be writable by all if it is sticky, like /tmp. Others can make files in it, but cannot
  rename or delete those of this user and of root, and the next folder must belong to one of these two.
- A symbolic link is followed if it belongs to this user or to root; its target is walked in the same way. Links lie in
  checked folders, so nobody else can replace one between the check of its owner and its reading.

A POSIX access list that lets others write shows in the group's mode bits, which hold the list's mask.

On systems whose file owners Python cannot read (Windows), nothing is checked and folders are opened by path.
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

from lowbit_kernels.runtime.warned import warn_once

HAS_OWNERS = hasattr(os, "geteuid") and os.open in os.supports_dir_fd
# Read by name, since Windows has none of them. O_PATH (Linux) opens a folder that can be entered but not listed.
_FOLDER = sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_PATH"))
# O_NONBLOCK: opening a FIFO, or a file with a lease, returns at once.
_FILE = sum(getattr(os, n, 0) for n in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # the limit of Linux
TEMPORARY = ("/tmp", "/var/tmp")
"""Folders for temporary files where the one that $TMPDIR names is untrusted."""


class Untrusted(OSError):
    """A file or folder is untrusted. `reason` says why; the message is the path and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Folder:
    """An open folder. If `descriptor` is None (see `HAS_OWNERS`), files are opened by path."""

    path: Path
    descriptor: int | None

    def read(self, name: str, largest: int) -> bytes:
        """The content of a file, which is opened once.

        Raises:
            FileNotFoundError: there is no such file.
            Untrusted: it is not a regular file, belongs to another user, others may write to it, it has more than
                `largest` bytes, or it cannot be opened.
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
                raise Untrusted(path, "is not a regular file")
            if self.descriptor is not None:
                _check(status, path)
            if status.st_size > largest:
                raise Untrusted(
                    path, f"has {status.st_size} bytes, and at most {largest} can be read"
                )
            with open(handle, "rb", closefd=False) as file:
                return file.read(status.st_size)  # not more, if it grows meanwhile
        finally:
            os.close(handle)

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file, atomically; only this user can read and write it.

        Raises:
            OSError: the file cannot be written.
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
    """Open the folder of an absolute path.

    Args:
        path: the folder.
        make: make missing folders, for this user alone (0700).
        shared: also accept a folder like /tmp, in which others may make files.

    Raises:
        FileNotFoundError: the folder does not exist, and `make` is False.
        Untrusted: others can put files there.
        OSError: the folder cannot be opened or made.
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
    """A folder for temporary files in which no other user can replace a file.

    Under sudo, $TMPDIR may name another user's folder. A warning names, once, a folder that is refused.

    Raises:
        OSError: every folder is refused.
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
    """A descriptor of the folder; every component of its path has been checked."""
    here, folder = Path(path.anchor), os.open(path.anchor, os.O_RDONLY | _FOLDER)
    # The first component is "/", which is the root whatever folder it is opened relative to.
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
            raise OSError(error.errno, error.strerror, str(here)) from error  # with the whole path
        raise
    return folder


def _status(name: str, folder: int, make: bool) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process made it; the caller checks it
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _check(status: os.stat_result, path: Path, within: bool = False) -> None:
    """Raise Untrusted if others can write to it; with `within`, if they can replace files that are not theirs."""
    _check_owner(status, path, within)
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS_WRITE and not (within and mode & stat.S_ISVTX):
        raise Untrusted(path, f"can be written to by others (mode {mode:04o})")


def _check_owner(status: os.stat_result, path: Path, within: bool) -> None:
    user, owner = os.geteuid(), status.st_uid
    if owner not in (user, 0) and not (within and _hides_root(owner)):
        raise Untrusted(path, f"belongs to user {owner}, and this process runs as user {user}")


def _hides_root(owner: int) -> bool:
    """Whether root's files appear to belong to `owner`, as in a container whose user namespace has no root.

    The files of all users outside the namespace then appear to belong to `owner`. Such a user could replace a folder
    above the last one, but only by another folder of this user: the last folder and its files must be this user's own.
    """
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
        maps = Path("/proc/self/uid_map").read_text().splitlines()
    except (OSError, ValueError):
        return False
    return owner == unknown and all(int(line.split()[0]) != 0 for line in maps)
