"""The paths by PyTorch run without what other systems lack. `.github/workflows/ci.yml` runs them on those systems."""

from __future__ import annotations

import os
import subprocess
import sys

ABSENT = """
import builtins, ctypes, os, platform, sys
import torch
for name in ("fcntl", "resource", "grp", "termios", "triton"):
    sys.modules[name] = None
sys.modules.pop("pwd", None); sys.modules["pwd"] = None
for name in ("getuid", "geteuid", "fork", "memfd_create", "sched_getaffinity", "O_NOFOLLOW", "O_DIRECTORY", "uname"):
    if hasattr(os, name):
        delattr(os, name)
CDLL = ctypes.CDLL
class NoProcess(CDLL):
    def __init__(self, name, *args, **kwargs):
        if name is None:
            raise TypeError("Windows has no handle of the process itself")
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = NoProcess
os.environ["PATH"] = ""
from tests import on_platform
on_platform.main()
from lowbit_kernels.runtime import host_compiler, triton_runtime
assert host_compiler.compiler() == () and triton_runtime.triton is None
"""


def test_without_a_compiler_triton_and_the_functions_of_linux() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", ABSENT], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "ran on" in done.stdout
