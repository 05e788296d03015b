"""Compiled kernels on disk: in ``$LOWBIT_CACHE_DIR``, else ``$XDG_CACHE_HOME/lowbit``, else ``~/.cache/lowbit``; for
a user without a home in a folder of that user's own among the temporary ones.

What is read here runs. So a file is taken only if nobody but this user or root can have written it: `trusted_folder`
says how that is known. An untrusted folder is not used, and a warning says so once per process. The mode of an existing
folder is never changed, since the path may name any folder at all, /tmp included. An untrusted file is replaced by the
one compiled instead.

A file is named by a digest of all that its machine code depends on (source, compiler, options, processor). It holds
the code, then a digest of name and code: a file that has been cut off, damaged, or renamed is not taken. Tools for
ELF files ignore what follows the code.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from pathlib import Path

from lowbit_kernels import trusted_folder
from lowbit_kernels.warned import warn_once

# 64 MiB: kernels are under 2 MiB, and reading this much is faster than compiling one.
LARGEST = 64 << 20
DIGEST = 32  # bytes


def cache_folder() -> Path:
    """Where compiled kernels are kept; an absolute path.

    Raises:
        OSError: there is no folder for temporary files, or no current one, where one is needed.
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
    """The machine code of the kernel that depends on `parts`. None if it isn't there, or isn't to be trusted, which
    a warning says once."""
    try:
        with trusted_folder.opened(cache_folder()) as folder:
            return _read(folder, suffix, parts)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_of_folder(error)
        return None


def keep(code: bytes, suffix: str, *parts: str) -> bool:
    """Write a kernel whole or not at all, whoever else does. False where that can't be done or the folder isn't to be
    trusted, which a warning says once."""
    name = _name(suffix, parts)
    content = code + _digest(name, code)
    try:
        with trusted_folder.opened(cache_folder(), make=True) as folder:
            if len(content) > LARGEST:
                reason = f"would have {len(content)} bytes, and at most {LARGEST} are read"
                raise OSError(errno.EFBIG, reason, str(folder.path / name))
            folder.write(name, content)
    except OSError as error:
        _warn_of_folder(error)
        return False
    return True


def _read(folder: trusted_folder.Folder, suffix: str, parts: tuple[str, ...]) -> bytes | None:
    name = _name(suffix, parts)
    try:
        content = folder.read(name, LARGEST)
        code, digest = content[:-DIGEST], content[-DIGEST:]
        if digest != _digest(name, code):
            raise trusted_folder.Untrusted(folder.path / name, "is damaged")
    except trusted_folder.Untrusted as error:
        warn_once(
            error.reason,
            f"a compiled kernel is not run: {error}. It is compiled anew, and the file replaced. If that recurs, "
            "remove the file, or set LOWBIT_CACHE_DIR to a folder of your own",
        )
        return None
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
    """Without a home a "~" stays, where `Path.expanduser` would raise."""
    return Path(os.path.expanduser(folder)).absolute()


def _name(suffix: str, parts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() + suffix


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + code).digest()
