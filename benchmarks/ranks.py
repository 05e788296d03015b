"""Fresh processes: a program of this checkout, or several that form one process group on several GPUs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lowbit.testing import forked

GRACE_SECONDS = 2.0
"""Time for the other ranks to end after one has failed: they hang, or fail for that reason."""
FIRST_SECONDS = 1.0
"""How long a rank with a RuntimeError waits, so that the error of the rank that failed first is the one reported."""


def environment_of_programs() -> dict[str, str]:
    """The environment of a fresh Python that imports this checkout."""
    root = Path(__file__).resolve().parent.parent
    paths = (str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def in_ranks(
    function: Callable[..., Any], ranks: int, device: str, seconds: float, *arguments: Any
) -> list[Any]:
    """The results of ``function(*arguments)``, a function at the top level of a module, on each rank, in their order.

    On "cuda" each rank has the GPU of its number, and NCCL as the environment configures it; on "cpu" it has gloo. All
    processes have ended when this returns or raises.

    Raises:
        RuntimeError: fewer GPUs than ranks; or a rank failed: its traceback, or the status that it ended with.
        TimeoutError: a rank is still running after ``seconds``.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise RuntimeError(
            f"{ranks} GPUs are needed and {torch.cuda.device_count()} visible; run it where there are more"
        )
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        inputs = (ranks, device, folder, seconds, function, arguments)
        # With CUDA, new interpreters: it does not work in a fork of a process that has used it.
        method = forked.start_method(spawned=device == "cuda")
        context = multiprocessing.start_processes(
            _run_rank, inputs, ranks, join=False, start_method=method
        )
        try:
            while not context.join(max(0.0, deadline - time.monotonic()), GRACE_SECONDS):
                if time.monotonic() >= deadline:
                    running = [str(i) for i, p in enumerate(context.processes) if p.is_alive()]
                    names = " and ".join(running)
                    raise TimeoutError(f"rank {names} gave no answer within {seconds:g} s")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RuntimeError(f"rank {error.error_index}: {error.msg.strip()}") from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [torch.load(_answer(folder, rank), weights_only=False) for rank in range(ranks)]


def _answer(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank}.pt")


def _run_rank(
    rank: int,
    ranks: int,
    device: str,
    folder: str,
    seconds: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Join the process group, and save the function's result to a file."""
    options: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=max(seconds, 1.0)),
        **options,
    )
    try:
        result = function(*arguments)
    except RuntimeError:  # a collective raises it where another rank failed first
        time.sleep(FIRST_SECONDS)
        raise
    torch.save(result, _answer(folder, rank))
    dist.destroy_process_group()
