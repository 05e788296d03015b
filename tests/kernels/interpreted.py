"""Triton kernels on the CPU: the cases of a module in a fresh process, under Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def interpreted(code: str) -> Any:
    """The JSON that `code` prints where Triton kernels run on CPU tensors. Skips the test if Triton is missing."""
    pytest.importorskip("triton")
    check = """import torch
from lowbit_kernels.runtime.triton_runtime import runs_on
assert runs_on(torch.device("cpu"))"""
    quick = "from tests.kernels import quick_interpreter; quick_interpreter.install()"
    code = f"{check}\n{quick}\n{code}"
    return in_new_process(code, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def names(request: pytest.FixtureRequest) -> list[str]:
    """The names of the cases that the collected tests with the fixture of this request run over."""
    tests = [t for t in request.session.items if t.path == request.path]
    tests = [t for t in tests if request.fixturename in t.fixturenames and hasattr(t, "callspec")]
    cases = [t.callspec.params.get("case", t.callspec.params.get("name")) for t in tests]
    return [getattr(case, "name", case) for case in cases]


def in_new_process(code: str, **environment: str) -> Any:
    """The JSON that `code` prints in a new process."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
