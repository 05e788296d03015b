"""Run a module-level function in several processes and return their results.

    from lowbit.testing import launch

    def check(rank, world_size, size):          # module-level, so that another process finds it
        ...
        return {"loss": loss}                   # anything picklable; tensors travel by value

    def test_it():
        first, second = launch(check, 2, 33)

The processes communicate over gloo, or with ``nccl=True`` over NCCL with a GPU each (gloo still moves tensors in host
memory). Calls with the same ``world_size`` and transport share their processes and the process group. A call that
raises, dies or runs out of time takes its processes down, and the next call starts fresh ones. ``fresh=True`` starts
fresh ones at once, for a function that needs processes without global state of earlier calls. Workers end when this
process ends, in any way.

On Linux, processes of gloo are forks of one server that has imported torch and lowbit, because importing torch costs
seconds. Environment variables that torch reads at import are therefore those of the first call.

A worker finds `check` and its arguments by the names of their modules, so these must be importable: a test file that
pytest has put on ``sys.path`` is, a cell of a notebook is not. Each call sends this process's ``sys.path`` along.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from lowbit.testing import forked


class ChildError(AssertionError):
    """One or more processes failed; the message holds their tracebacks."""


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    fresh: bool = False,
    nccl: bool = False,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` processes; results in rank order.

    Args:
        fn: a function that can be pickled.
        world_size: number of processes, which are one process group, of gloo unless `nccl`.
        args: the other arguments of `fn`.
        timeout: seconds that the call may take. A longer timeout than that of the running processes starts new ones,
            because a process group keeps the limit of its first call.
        fresh: start new processes. Otherwise calls with the same `world_size` and `nccl` share theirs.
        nccl: a process group of NCCL, one CUDA device a rank.

    Raises ChildError with every failed process's traceback, or naming the ranks that did not answer within `timeout`
    seconds or died without an answer.
    """
    key = (world_size, nccl)
    if key in _groups and (fresh or timeout > _groups[key].timeout):
        _groups.pop(key).stop()
    if key not in _groups:
        _groups[key] = _Group(world_size, nccl, timeout)
    group = _groups[key]
    try:
        return group.call(fn, args, timeout)
    except BaseException:
        _groups.pop(key, None)
        group.stop()
        raise


class _Group:
    """Processes of one process group, each behind a pipe. `timeout`: of its collectives, in seconds."""

    def __init__(self, world_size: int, nccl: bool, timeout: float) -> None:
        self.timeout = timeout
        self.folder = tempfile.mkdtemp(prefix="gloo-")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        variables = {"OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            arguments = (theirs, rank, world_size, f"{self.folder}/store", nccl, timeout)
            # CUDA does not work in a fork of a process that used CUDA. The server did not, but a fork gains nothing.
            process = forked.start(_serve, *arguments, variables=variables, spawned=nccl)
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        request = pickle.dumps((sys.path, fn.__module__, fn.__qualname__, pickle.dumps(args)))
        failures: dict[int, str] = {}
        results: dict[int, Any] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(request)
            except OSError:
                failures[rank] = "was gone before the call"
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(self.pipes):
            # once one has failed, the others usually hang in a collective: don't wait for them
            left = min(deadline - time.monotonic(), 2.0 if failures else timeout)
            rest = [p for r, p in enumerate(self.pipes) if r not in results and r not in failures]
            ready = wait(rest, max(left, 0.0))
            if not ready:
                for rank in range(len(self.pipes)):
                    if rank not in results and rank not in failures:
                        failures[rank] = f"gave no answer (limit {timeout:.0f} s)"
                break
            for rank in [r for r, pipe in enumerate(self.pipes) if pipe in ready]:
                try:
                    ok, value = pickle.loads(self.pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    failures[rank] = f"died with exit code {self.processes[rank].exitcode}"
                    continue
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = "raised\n" + value
        if failures:
            lines = [f"rank {rank} {text}" for rank, text in sorted(failures.items())]
            raise ChildError(f"{fn.__qualname__}: " + "\n".join(lines))
        return [results[rank] for rank in range(len(self.pipes))]

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(
    pipe: Connection, rank: int, world_size: int, store: str, nccl: bool, timeout: float
) -> None:
    """A worker: answer calls until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if nccl:
        torch.cuda.set_device(rank)
    joined = False
    while True:
        try:
            paths, module, name, packed = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        sys.path += [path for path in paths if path not in sys.path]
        try:
            if not joined:
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if nccl else "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout),
                )
                joined = True
            fn: Any = importlib.import_module(module)
            for part in name.split("."):
                fn = getattr(fn, part)
            value = fn(rank, world_size, *pickle.loads(packed))
            answer = pickle.dumps((True, value))
        except BaseException:  # SystemExit and CheckpointException are not Exceptions
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


_groups: dict[tuple[int, bool], _Group] = {}


@atexit.register
def _stop_all() -> None:
    while _groups:
        _groups.popitem()[1].stop()
