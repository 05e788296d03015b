"""Compiles kernels for the CPU by the machine's C++ compiler, with the standard headers precompiled.

The libraries stay from run to run beside the kernels of tests/conftest.py, and processes share them. The key of each
has its source, the standard headers and the compiler with its version and options.
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
    "-U_FORTIFY_SOURCE",  # its longjmp takes a jump to another fiber's stack for an error
)
PARTS = sorted(Path(__file__).parent.glob("*_on_cpu.*"))
RUNTIME = Path(__file__).with_name("sm90_on_cpu.cpp")
"""What the kernels of sm90_on_cpu.h share, compiled once."""
KEPT = Path(os.environ["LOWBIT_CACHE_DIR"]).parent / "emulated"


@functools.cache
def _folder() -> Path:
    """The folder of the libraries of this compiler."""
    sources = (part.read_text() for part in PARTS)
    key = "\n".join([*COMPILER, *OPTIONS, host_compiler._version(), *sources])
    folder = KEPT / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _headers() -> str:
    """The lines of ``system.h``: the standard headers of all emulations."""
    lines = [
        line
        for header in PARTS
        for line in header.read_text().splitlines()
        if header.suffix == ".h" and line.startswith("#include <")
    ]
    return "\n".join([*sorted(set(lines)), ""])


def _made(path: Path, source: str, *options: str) -> Path:
    """Compile the source to the path, unless a process has done so, and return the path."""
    if path.exists():
        return path
    text = path.with_suffix(".h" if path.suffix == ".gch" else ".cpp")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            text.write_text(source)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder, "made")
                command = [*COMPILER, *OPTIONS, *options, str(text), "-o", str(made)]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                made.rename(path)
    return path


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """The loaded library of a source."""
    path = _folder() / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        header = _folder() / "system.h"
        _made(header.with_name("system.h.gch"), _headers(), "-x", "c++-header")
        shared = ("-shared", "-Wl,-Bsymbolic,--no-as-needed")
        runtime = _made(_folder() / "runtime.so", f'#include "{RUNTIME}"', *shared)
        _made(path, source, "-include", str(header), *shared, str(runtime))
    return ctypes.CDLL(str(path))
