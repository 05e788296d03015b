"""C++ that this machine's compiler compiles at first use, for this machine's processor, cached on disk.

The compiler is ``$CXX``, or else ``c++``, ``g++`` or ``clang++`` on the path. Installing lowbit compiles nothing.
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

from lowbit_kernels.runtime import disk_cache, trusted_folder
from lowbit_kernels.runtime.compiling import compiling

# Without contraction into FMA, all compilers give the same results. Kernels read neither errno nor the flags of
# floating-point exceptions.
OPTIONS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-strict-aliasing", "-fPIC", "-shared", "-pthread", "-w"),
)
C_HEADERS = ("-nostdinc++",)
"""The option for sources that include headers of C only: those that libstdc++ puts in their place (<math.h>) take a
third of the time of compiling a kernel."""
_LOADS = itertools.count(1)
NATIVE = ("-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",)


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of this machine's C++ compiler; empty if the machine has none.

    Raises:
        RuntimeError: ``$CXX`` cannot be parsed as a command.
    """
    chosen = os.environ.get("CXX", "")
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise RuntimeError(
            f"$CXX is not a command: {chosen!r} ({error}); correct it or unset it"
        ) from error
    for command in (words, ["c++"], ["g++"], ["clang++"]):
        if command and (path := shutil.which(command[0])):
            if words and command is not words:
                message = f"$CXX is {chosen!r}, which cannot be run; lowbit uses {path}"
                warnings.warn(message, stacklevel=2)
            return path, *command[1:]
    return ()


@functools.cache
def library(source: str, *options: str) -> ctypes.CDLL:
    """The loaded library of a C++ source, from the disk if it has been compiled before. Calls release the GIL.

    Args:
        source: the text of the program.
        options: further options of the compiler, such as `C_HEADERS`.

    Raises:
        RuntimeError: the machine has no compiler, the compiler rejects the source, or the library cannot be written or
            loaded.
    """
    if not compiler():
        raise RuntimeError("no C++ compiler was found; install g++ or clang++, or name one in $CXX")
    key = (".so", source, _version(), _processor(), *compiler(), *OPTIONS, *NATIVE, *options)

    def make() -> bytes:
        with compiling("the CPU"):
            return _compile(source, *options)

    try:
        code = disk_cache.find_or_make(make, *key)
        with contextlib.suppress(OSError):
            return _loaded(code)
        code = make()  # the kept one may have been compiled for another C library
        disk_cache.keep(code, *key)
        return _loaded(code)
    except (OSError, ValueError) as error:  # no folder for temporary files, a full disk, ...
        raise RuntimeError(f"a compiled kernel cannot be made or loaded: {error}") from error


def _compile(source: str, *options: str) -> bytes:
    with _private_folder() as folder:
        text, made = folder / "kernel.cpp", folder / "kernel.so"
        text.write_text(source, encoding="utf-8")
        command = [*compiler(), *OPTIONS, *NATIVE, *options, str(text), "-o", str(made)]
        # TMPDIR: for files between the compiler's passes
        environment = {**os.environ, "TMPDIR": str(folder)}
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
    """Load the library with this content, from a copy that no other user can change. Raises OSError.

    The loader takes a path, and would look up a path of the shared cache again, after its check.
    """
    if hasattr(os, "memfd_create"):  # Linux
        with contextlib.suppress(OSError):  # a sandbox without memfd_create or /proc
            return _loaded_from_memory(code)
    with _private_folder() as folder:
        path = folder / "kernel.so"
        path.write_bytes(code)
        return ctypes.CDLL(str(path))


def _loaded_from_memory(code: bytes) -> ctypes.CDLL:
    with open(os.memfd_create("lowbit-kernel"), "wb") as file:
        file.write(code)
        file.flush()
        # For a path that it knows, the loader returns the earlier library, and the next file gets the same number. More
        # slashes make a new path to the same file.
        slashes = "/" * next(_LOADS)
        return ctypes.CDLL(f"/proc/self/fd{slashes}{file.fileno()}")


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A temporary folder that only this user can enter and that others cannot replace."""
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
    """A description of the processor, on which the machine code depends: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part")
    found = dict.fromkeys(line for line in lines if line.startswith(wanted))
    return "\n".join(found) or f"{platform.machine()} {platform.processor()} {platform.node()}"
