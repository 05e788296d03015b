"""Programs in processes of their own that start within milliseconds: forks of a process that has imported torch.

A new process takes seconds to import torch and lowbit. One process imports them, once, and runs nothing else. Each
program runs in a fork of it, with its own folder, environment variables and output, and ends as an interpreter ends.
Variables that torch or lowbit reads at import come from the environment of the first process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Forks:
    """A process that has imported `modules`, and forks. `environment`: all its variables."""

    def __init__(self, *modules: str, environment: dict[str, str]) -> None:
        self._outputs = tempfile.TemporaryDirectory(prefix="forks-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
            cwd=ROOT,
        )

    def start(self, code: str, *arguments: object, folder: Path, **environment: str) -> int:
        """Start `code` in `folder` with these arguments and more variables; the number of its process."""
        program = {"code": code, "arguments": [*map(str, arguments)], "folder": str(folder)}
        return self._answer({**program, "outputs": self._outputs.name, "environment": environment})

    def status(self, process: int) -> int | None:
        """As `subprocess.Popen.poll` for a process of `start`, until it has given the status once."""
        return self._answer({"status_of": process})

    def finished(self, process: int, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Wait for a process of `start`. After `timeout` seconds it is killed, and TimeoutExpired raised."""
        deadline = time.monotonic() + timeout
        while (status := self.status(process)) is None:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                raise subprocess.TimeoutExpired(f"process {process}", timeout)
            time.sleep(0.01)
        return subprocess.CompletedProcess(process, status, *self.printed(process))

    def printed(self, process: int) -> list[str]:
        """The output and the errors of a process of `start` so far."""
        return [Path(self._outputs.name, f"{process}.{end}").read_text() for end in ENDS]

    def run(
        self, code: str, *arguments: object, folder: Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """`start` and `finished`."""
        return self.finished(self.start(code, *arguments, folder=folder, **environment))

    def close(self) -> None:
        self._process.communicate()
        self._outputs.cleanup()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended; its output says why"
        return json.loads(answer)


ENDS = ("out", "err")


def serve() -> dict[str, Any] | None:
    """Answer requests until there are no more. In a fork: what is to run there."""
    for line in sys.stdin:
        request = json.loads(line)
        if "status_of" in request:
            process, status = os.waitpid(request["status_of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if process else None
        else:
            answer = os.fork()
            if not answer:
                return request
        print(json.dumps(answer), flush=True)
    return None


def settle(program: dict[str, Any]) -> None:
    """Give the fork its own input, output, folder, variables and arguments."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, end in enumerate(ENDS, start=1):
        path = Path(program["outputs"], f"{os.getpid()}.{end}")
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(program["folder"])
    os.environ.update(program["environment"])
    sys.argv[1:] = program["arguments"]
    sys.path[0] = ""  # the current folder, as for `python -c`


if __name__ == "__main__":
    for _module in sys.argv[1:]:
        __import__(_module)
    gc.freeze()  # else each fork, as it ends, takes a second to collect what was imported
    if (_program := serve()) is not None:
        settle(_program)
        exec(compile(_program["code"], "<program>", "exec"), {"__name__": "__main__"})
