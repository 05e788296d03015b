"""C++ compiled at first use by this machine's compiler, for this machine's processor, and kept on disk.

The compiler is ``$CXX``, else ``c++``, ``g++`` or ``clang++`` on the path. Nothing is compiled when lowbit is
installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from lowbit_kernels import disk_cache, trusted_folder

# Without contraction into fma, results are the same from every compiler. What the last two give up, no kernel reads:
# errno, and the flags of floating-point exceptions.
OPTIONS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-strict-aliasing", "-fPIC", "-shared", "-pthread", "-w"),
)
_LOADS = itertools.count(1)
NATIVE = ("-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",)


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of this machine's C++ compiler; empty if there is none.

    Raises:
        RuntimeError: ``$CXX`` cannot be read as a command.
    """
    chosen = os.environ.get("CXX", "")
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise RuntimeError(
            f"$CXX is no command: {chosen!r} ({error}); set it, or unset it"
        ) from error
    for command in (words, ["c++"], ["g++"], ["clang++"]):
        if command and (path := shutil.which(command[0])):
            if words and command is not words:
                message = (
                    f"$CXX is {chosen!r}, which is no program that can be run; {path} is taken"
                )
                warnings.warn(message, stacklevel=2)
            return path, *command[1:]
    return ()


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """The loaded library of a C++ source: from the disk if it has been compiled before. Calls release the GIL.

    Raises:
        RuntimeError: there is no compiler, it refuses the source, or what it made can't be written or loaded.
    """
    if not compiler():
        raise RuntimeError("no C++ compiler was found; install g++ or clang++, or name one in $CXX")
    key = (".so", source, _version(), _processor(), *compiler(), *OPTIONS, *NATIVE)
    kept = disk_cache.find(*key)
    if kept is not None:
        with contextlib.suppress(OSError):  # made for another version of the C library, say
            return _loaded(kept)
    try:
        code = _compile(source)
        disk_cache.keep(code, *key)
        return _loaded(code)
    except (OSError, ValueError) as error:  # no place for temporary files, a full disk, ...
        raise RuntimeError(f"a compiled kernel cannot be made or loaded: {error}") from error


def _compile(source: str) -> bytes:
    with _private_folder() as folder:
        text, made = folder / "kernel.cpp", folder / "kernel.so"
        text.write_text(source, encoding="utf-8")
        command = [*compiler(), *OPTIONS, *NATIVE, str(text), "-o", str(made)]
        environment = {
            **os.environ,
            "TMPDIR": str(folder),
        }  # for files between the compiler's passes
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace"
            )
        except OSError as error:
            raise RuntimeError(f"{compiler()[0]} cannot be run: {error}") from error
        if done.returncode != 0:
            log = done.stderr.replace(f"{folder}{os.sep}", "").strip()
            log = log or f"exit status {done.returncode}"
            raise RuntimeError(f"{compiler()[0]} cannot compile a kernel: {log}")
        return made.read_bytes()


def _loaded(code: bytes) -> ctypes.CDLL:
    """The library whose file has this content. Only a copy that nobody else can touch is given to the loader, which
    takes a path and would look up a shared one once more.

    Raises:
        OSError: the loader refuses it, or nothing may be run from memory and from temporary folders.
    """
    if hasattr(os, "memfd_create"):  # Linux
        with contextlib.suppress(OSError):  # a sandbox without it, or without /proc
            return _loaded_from_memory(code)
    with _private_folder() as folder:
        path = folder / "kernel.so"
        path.write_bytes(code)
        return ctypes.CDLL(str(path))


def _loaded_from_memory(code: bytes) -> ctypes.CDLL:
    with open(os.memfd_create("lowbit-kernel"), "wb") as file:
        file.write(code)
        file.flush()
        # The loader gives back an earlier library for a path that it has seen, and the next file has the same number.
        # More slashes make another path of the same file.
        slashes = "/" * next(_LOADS)
        return ctypes.CDLL(f"/proc/self/fd{slashes}{file.fileno()}")


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A temporary one, which this user alone can enter and others can't exchange."""
    where = trusted_folder.temporary()
    with tempfile.TemporaryDirectory(
        prefix="lowbit-", dir=where, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


@functools.cache
def _version() -> str:
    try:
        done = subprocess.run(
            [*compiler(), "--version"], capture_output=True, text=True, errors="replace"
        )
    except (OSError, ValueError):
        return ""
    return done.stdout


@functools.cache
def _processor() -> str:
    """What decides which instructions the compiler may take: a folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = ("flags", "Features", "model name", "CPU part")
    found = dict.fromkeys(line for line in lines if line.startswith(told))
    return "\n".join(found) or f"{platform.machine()} {platform.processor()} {platform.node()}"
