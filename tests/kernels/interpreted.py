"""Triton kernels on the CPU: a module's cases in a fresh process, under Triton's interpreter."""

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
    """What `code` prints, as JSON. The test is skipped where Triton isn't installed."""
    pytest.importorskip("triton")
    path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    environment = {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
