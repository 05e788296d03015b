"""Compiles kernels for the CPU by the machine's C++ compiler, with the standard headers precompiled."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

from lowbit_kernels import host_compiler

COMPILER = host_compiler.compiler()
OPTIONS = (
    *("-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC"),
    "-U_FORTIFY_SOURCE",  # its longjmp takes a jump to another fiber's stack for an error
)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of the libraries, and of ``system.h``: the precompiled standard headers of all emulations."""
    folder = tempfile.TemporaryDirectory(prefix="kernels-on-cpu-")
    lines = [
        line
        for header in Path(__file__).parent.glob("*_on_cpu.h")
        for line in header.read_text().splitlines()
        if line.startswith("#include <")
    ]
    system = Path(folder.name) / "system.h"
    system.write_text("\n".join([*sorted(set(lines)), ""]))
    _compile("-x", "c++-header", str(system), "-o", f"{system}.gch")
    return folder


def _compile(*arguments: str) -> None:
    assert COMPILER
    done = subprocess.run([*COMPILER, *OPTIONS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """The loaded library of a source."""
    folder = Path(_folder().name)
    path = folder / hashlib.sha256(source.encode()).hexdigest()[:16]
    path.with_suffix(".cpp").write_text(source)
    files = [str(path.with_suffix(".cpp")), "-o", str(path.with_suffix(".so"))]
    _compile("-include", str(folder / "system.h"), "-shared", "-Wl,-Bsymbolic", *files)
    return ctypes.CDLL(str(path.with_suffix(".so")))
