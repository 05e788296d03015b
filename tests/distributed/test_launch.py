"""The launcher itself: results, errors, dead and hanging processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lowbit.testing.launch import ChildError, launch

ROOT = Path(__file__).resolve().parents[2]


def sum_of_ranks(rank, world_size, offset):
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return rank, value


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("a broken rank")
    dist.barrier()


def die(rank, world_size):
    os._exit(3)


def process_id(rank, world_size):
    return os.getpid()


def hang(rank, world_size):
    time.sleep(60)


def server_threads(rank, world_size):
    """The threads of the process that forked this one, and how many compiled kernels that process has loaded."""
    server = Path("/proc", str(os.getppid()))
    threads = [Path(task, "comm").read_text() for task in (server / "task").iterdir()]
    return threads, (server / "maps").read_text().count("lowbit-kernel")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are spawned")
def test_processes_are_forks_of_one_thread_that_ran_no_kernel():
    """A fork while another thread allocates copies a heap in the middle of a change."""
    for threads, kernels in launch(server_threads, 2):
        assert len(threads) == 1 and kernels == 0, threads


def test_returns_every_ranks_result_in_order():
    assert launch(sum_of_ranks, 2, 10) == [(0, torch.tensor([21.0])), (1, torch.tensor([21.0]))]
    assert [r for r, _ in launch(sum_of_ranks, 2, 0)] == [0, 1]


def test_failures_name_the_rank_and_the_next_call_works():
    with pytest.raises(ChildError, match=r"(?s)rank 1 raised.*a broken rank"):
        launch(fail_on_one, 2)
    with pytest.raises(ChildError, match="rank 0 died with exit code 3"):
        launch(die, 1)
    with pytest.raises(ChildError, match="gave no answer"):
        launch(hang, 1, timeout=1.0)
    assert launch(sum_of_ranks, 1, 5) == [(0, torch.tensor([5.0]))]


def test_a_longer_limit_starts_new_processes():
    """A process group keeps the limit of its collectives, so running processes cannot take a longer one."""
    (first,) = launch(process_id, 1, timeout=50.0, fresh=True)
    assert launch(process_id, 1, timeout=40.0) == [first]
    (second,) = launch(process_id, 1, timeout=60.0)
    assert second != first and launch(process_id, 1, timeout=50.0) == [second]


def modules_and_folder(rank, world_size):
    """What has been imported before a call, and what a shell would have set for it."""
    return {"lowbit", "torch._dynamo"} <= {*sys.modules}, os.getcwd(), os.environ.get("SAID")


def parent_of(rank, world_size):
    return os.getppid()


def test_processes_are_forks_that_take_the_environment_of_their_start(monkeypatch, tmp_path):
    monkeypatch.setenv("SAID", "now")
    monkeypatch.chdir(tmp_path)
    assert launch(modules_and_folder, 1, fresh=True) == [(True, str(tmp_path), "now")]
    if sys.platform == "linux":  # one server forks them all, and it is not this process
        parents = {*launch(parent_of, 1), *launch(parent_of, 2, fresh=True)}
        assert len(parents) == 1 and os.getpid() not in parents
    launch(parent_of, 1, fresh=True)


STARTS = """
import os, sys
from lowbit.testing import launch
from tests.distributed.test_launch import process_id
print(*launch(process_id, 2), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_when_their_parent_is_killed():
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    running = [int(number) for number in done.stdout.split()]
    assert len(running) == 2
    deadline = time.monotonic() + 30
    while any(is_running(process) for process in running):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
