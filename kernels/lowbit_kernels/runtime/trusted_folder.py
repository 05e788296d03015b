"""Folders whose files only this user or root can have written: checked by owner and mode, written by atomic rename.

A user who can write to a folder, or to any folder above it, can replace its files. So `trusted` resolves the links of a
path and checks the real folders from the root down: each must belong to this user or to root, and no other user may
write to it. Once a folder has passed, nobody else can replace it, so the check of the next one holds too, and files
need no more than a check of their own owner and mode.

A folder above the last one may be writable by all if it is sticky, like /tmp. Others can make files in it, but cannot
rename or delete those of this user and of root, and the next folder must belong to one of these two.

A POSIX access list that lets others write shows in the group's mode bits, which hold the list's mask.

On systems whose file owners Python cannot read (Windows), no owner and no mode is checked.
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
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
TEMPORARY = ("/tmp", "/var/tmp")
"""Folders for temporary files where the one that $TMPDIR names is untrusted."""


class Untrusted(OSError):
    """A file or folder is untrusted. `reason` says why; the message is the path and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


def trusted(path: Path, *, make: bool = False, shared: bool = False) -> Path:
    """The real path of a folder in which no other user can replace a file.

    Args:
        path: the folder, absolute. Links on the way must belong to this user or to root.
        make: make missing folders, for this user alone (0700).
        shared: also accept a folder like /tmp, in which others may make files.

    Raises:
        FileNotFoundError: the folder does not exist, and `make` is False.
        Untrusted: others can put files there.
        OSError: the folder cannot be read or made.
    """
    for link in filter(Path.is_symlink, (path, *path.parents)):
        _check(link.lstat(), link, within=True)
    real = Path(os.path.realpath(path))
    for folder in (*reversed(real.parents), real):
        if make and not os.path.lexists(folder):
            with contextlib.suppress(FileExistsError):  # another process made it
                folder.mkdir(0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            reason = errno.ELOOP if stat.S_ISLNK(status.st_mode) else errno.ENOTDIR
            raise OSError(reason, os.strerror(reason), str(folder))
        _check(status, folder, within=shared or folder != real)
    return real


def read(path: Path) -> bytes:
    """The content of a file in a trusted folder.

    Raises:
        FileNotFoundError: there is no such file.
        Untrusted: it is not a regular file, belongs to another user, or others may write to it.
        OSError: it cannot be read.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Untrusted(path, "is not a regular file")
    _check(status, path)
    return path.read_bytes()


def write(path: Path, content: bytes) -> None:
    """Make or replace a file in a trusted folder, atomically; only this user can read and write it. Raises OSError."""
    new = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with open(new, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def temporary() -> str:
    """A folder for temporary files in which no other user can replace a file.

    Under sudo, $TMPDIR may name another user's folder. A warning names, once, a folder that is refused.

    Raises:
        OSError: every folder is refused.
    """
    refused: list[str] = []
    for folder in dict.fromkeys((tempfile.gettempdir(), *TEMPORARY)):
        try:
            trusted(Path(folder).absolute(), shared=True)
        except OSError as error:
            refused.append(str(error))
            continue
        if refused:
            way_out = f"temporary files go to {folder}. Set TMPDIR to a folder of your own"
            warn_once(refused[0], f"{refused[0]}; {way_out}")
        return folder
    raise OSError(
        f"no folder for temporary files is safe from other users: {'; '.join(refused)}. Set TMPDIR to a folder "
        "that, like all folders above it, belongs to you or root and that nobody else may write to"
    )


def _check(status: os.stat_result, path: Path, within: bool = False) -> None:
    """Raise Untrusted if others can write to it; with `within`, if they can replace files that are not theirs."""
    if not HAS_OWNERS:
        return
    user, owner, mode = os.geteuid(), status.st_uid, stat.S_IMODE(status.st_mode)
    if owner not in (user, 0) and not (within and _hides_root(owner)):
        raise Untrusted(path, f"belongs to user {owner}, and this process runs as user {user}")
    if stat.S_ISLNK(status.st_mode):  # its mode bits mean nothing
        return
    if mode & _OTHERS_WRITE and not (within and mode & stat.S_ISVTX):
        raise Untrusted(path, f"can be written to by others (mode {mode:04o})")


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
