"""Which options the C++ compiler takes for kernels of a test run.

-O1 compiles a kernel in half the time of -O3, and gives the same values: no option lets a compiler change them. Tests
of each family of kernels for CPUs compare its results with those of the package's own options.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowbit_kernels.runtime import host_compiler

QUICK = "g++-with-O1"


def quick(folder: Path) -> None:
    """From now on ``$CXX``, also of processes that tests start, is a script of the folder: g++ with -O1 behind all
    other options. A user's ``$CXX`` stays."""
    found = shutil.which("g++")
    if found is None or os.environ.get("CXX"):
        return
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as script:
        script.write(f'#!/bin/sh\nexec {found} "$@" -O1\n')
    os.chmod(script.name, 0o700)
    os.replace(script.name, folder / QUICK)  # other runs may be executing it
    os.environ["CXX"] = str(folder / QUICK)


@contextlib.contextmanager
def of_the_package(*options: str, caches: tuple[Any, ...] = ()) -> Iterator[None]:
    """Compile as a user's machine does, with more options behind. `caches`: of what the kernels are kept in."""
    caches += (host_compiler.library, host_compiler.compiler, host_compiler._version)
    with pytest.MonkeyPatch.context() as patch:
        if Path(os.environ.get("CXX", "")).name == QUICK:
            patch.delenv("CXX")
        patch.setattr(host_compiler, "NATIVE", (*host_compiler.NATIVE, *options))
        try:
            for cache in caches:
                cache.cache_clear()
            yield
        finally:
            for cache in caches:
                cache.cache_clear()
