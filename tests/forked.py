"""Programs in processes of their own that start within milliseconds: forks of one that has imported torch and lowbit.

`lowbit.testing.forked` says how. Each program has its own folder, environment variables and output.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lowbit.testing import forked

ENDS = ("out", "err")


class Program:
    """A program of Python that runs, as `python -c` runs it.

    Args:
        code: its source.
        arguments: its `sys.argv[1:]`.
        folder: its current folder.
        environment: variables beside those of this process.
    """

    def __init__(self, code: str, *arguments: object, folder: Path, **environment: str) -> None:
        self._outputs = tempfile.TemporaryDirectory(prefix="forked-")
        for end in ENDS:
            Path(self._outputs.name, end).touch()
        given = (code, [*map(str, arguments)], str(folder), self._outputs.name)
        self._process = forked.start(_run, *given, variables=environment, daemon=False)

    def status(self) -> int | None:
        """As `subprocess.Popen.poll`."""
        return self._process.exitcode

    def kill(self, signal: int) -> None:
        os.kill(self._process.pid, signal)

    def finished(self, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end. After `timeout` seconds it is killed, and TimeoutExpired raised."""
        self._process.join(timeout)
        if self.status() is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(f"process {self._process.pid}", timeout)
        return subprocess.CompletedProcess("python -c", self.status() or 0, *self.printed())

    def printed(self) -> list[str]:
        """Its output and its errors so far."""
        return [Path(self._outputs.name, end).read_text() for end in ENDS]


def run(
    code: str, *arguments: object, folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a `Program` to its end."""
    return Program(code, *arguments, folder=folder, **environment).finished()


def ranks(code: str, *arguments: object, processes: int, folder: Path) -> list[Program]:
    """Programs with the variables that torchrun sets. Without it they do not import torch again and again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    variables = {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Program(code, *arguments, folder=folder, RANK=rank, LOCAL_RANK=rank, **variables)
        for rank in map(str, range(processes))
    ]


def all_finished(programs: list[Program], timeout: float = 240.0) -> str:
    """What all print, with errors. AssertionError with the errors of the first that fails, or after `timeout`."""
    running, printed, deadline = list(programs), "", time.monotonic() + timeout
    while running:
        failed = time.monotonic() > deadline
        for program in [p for p in running if p.status() is not None]:
            running.remove(program)
            printed += "".join(program.printed())
            failed = failed or program.status() != 0
        if failed:  # the others would wait for it
            for program in running:
                program.kill(signal.SIGKILL)
            raise AssertionError(printed or [program.printed() for program in running])
        time.sleep(0.01)
    return printed


def _run(code: str, arguments: list[str], folder: str, outputs: str) -> None:
    """In the fork: its own output, folder and arguments, then the program."""
    for number, end in enumerate(ENDS, start=1):
        os.dup2(os.open(Path(outputs, end), os.O_WRONLY), number)
    os.chdir(folder)
    sys.argv[:] = ["-c", *arguments]
    sys.path.insert(0, "")
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
