"""Compiles kernels for the CPU by the machine's C++ compiler, without the headers of the standard library of C++.

The libraries stay from run to run beside the kernels of tests/conftest.py, and processes share them. The key of each
has its source, the emulation and the compiler with its version and options.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from lowbit_kernels.runtime import host_compiler

COMPILER = host_compiler.compiler()
OPTIONS = (
    *("-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC"),
    *("-shared", "-Wl,-Bsymbolic"),
    "-U_FORTIFY_SOURCE",  # its longjmp takes a jump to another fiber's stack for an error
)
RUNTIMES = {
    header: header.with_suffix(".cpp")
    for header in sorted(Path(__file__).parent.glob("*_on_cpu.h"))
}
"""For each header of an emulation, what all its kernels share, compiled once."""
KEPT = Path(os.environ["LOWBIT_CACHE_DIR"]).parent / "emulated"


@functools.cache
def _folder() -> Path:
    """The folder of the libraries of this compiler."""
    sources = (part.read_text() for parts in RUNTIMES.items() for part in parts)
    key = "\n".join([*COMPILER, *OPTIONS, host_compiler._version(), *sources])
    folder = KEPT / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _made(path: Path, source: str, *options: str) -> Path:
    """Compile the source to a library at the path, unless a process has done so, and return the path."""
    if path.exists():
        return path
    text = path.with_suffix(".cpp")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            text.write_text(source)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder, "made")
                command = [*COMPILER, *OPTIONS, str(text), *options, "-o", str(made)]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                made.rename(path)
    return path


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """The loaded library of a source, which holds the text of one of the headers."""
    path = _folder() / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        (runtime,) = (
            runtime for header, runtime in RUNTIMES.items() if header.read_text() in source
        )
        made = _made(_folder() / f"{runtime.stem}.so", f'#include "{runtime}"')
        _made(path, source, *host_compiler.C_HEADERS, str(made))
    return ctypes.CDLL(str(path))
