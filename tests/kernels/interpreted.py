"""Triton kernels on the CPU: the cases of a module in a process of their own, under Triton's interpreter.

Triton decides at its import whether it interprets. One process a session imports it so, and computes nothing; the cases
run in its forks, which start within milliseconds.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDS = ("out", "err")


def interpreted(code: str) -> Any:
    """The JSON that `code` prints where Triton kernels run on CPU tensors. Skips the test if Triton is missing."""
    pytest.importorskip("triton")
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="interpreted-") as folder:
        for end in ENDS:
            Path(folder, end).touch()
        server.stdin.write(json.dumps([code, folder]) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        printed, errors = (Path(folder, end).read_text() for end in ENDS)
        assert status == "0\n", f"{status}{errors}"
        return json.loads(printed)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that has imported Triton. It ends with this one."""
    environment = {**_environment(), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "from tests.kernels.interpreted import serve; serve()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def serve() -> None:
    """Run each program that comes in, a line of JSON with a folder for its output, in a fork; answer its status."""
    import torch

    import benchmarks.cases.formats  # noqa: F401
    import lowbit  # noqa: F401
    from lowbit_kernels.runtime.triton_runtime import runs_on
    from tests.kernels import quick_interpreter

    assert runs_on(torch.device("cpu"))
    quick_interpreter.install()
    for line in sys.stdin:
        code, folder = json.loads(line)
        if (child := os.fork()) == 0:
            _run(code, Path(folder))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(code: str, folder: Path) -> NoReturn:
    """In the fork: the program, its output in files, and the end of the process, after 280 s at the latest."""
    signal.alarm(280)
    for number, end in enumerate(ENDS, start=1):
        os.dup2(os.open(folder / end, os.O_WRONLY), number)
    status = 0
    try:
        exec(compile(code, "<interpreted>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def names(request: pytest.FixtureRequest) -> list[str]:
    """The names of the cases that the collected tests with the fixture of this request run over."""
    tests = [t for t in request.session.items if t.path == request.path]
    tests = [t for t in tests if request.fixturename in t.fixturenames and hasattr(t, "callspec")]
    cases = [t.callspec.params.get("case", t.callspec.params.get("name")) for t in tests]
    return [getattr(case, "name", case) for case in cases]


def in_new_process(code: str, **environment: str) -> Any:
    """The JSON that `code` prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
