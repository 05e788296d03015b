"""New processes that form a process group, for measurements on several GPUs."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def in_ranks(
    function: Callable[..., Any], ranks: int, device: str, seconds: float, *arguments: Any
) -> list[Any]:
    """The results of ``function(*arguments)`` on each rank, in the order of the ranks.

    ``function`` is at the top level of its module. On "cuda" each rank uses the GPU of its number, and NCCL as the
    environment configures it; on "cpu" it uses gloo. All processes have ended when this function returns or raises.

    Raises:
        RuntimeError: there are fewer GPUs than ranks; or ranks failed, with their tracebacks or exit codes.
        TimeoutError: a rank has not answered within ``seconds`` of the start of the processes.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise RuntimeError(
            f"{ranks} GPUs are needed, and {torch.cuda.device_count()} are visible; run on a machine with more"
        )
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + seconds
    pipes: list[Connection] = []
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                place = (rank, ranks, device, f"file://{folder}/store", seconds)
                process = context.Process(
                    target=_serve, args=(theirs, place, function, arguments), daemon=True
                )
                process.start()
                theirs.close()  # so that the pipe closes when the process ends
                pipes.append(ours)
                processes.append(process)
            answers = _answers(pipes, processes, deadline, seconds)
            for process in processes:
                process.join(10)  # until it has left the group
            return answers
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.terminate()
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _answers(
    pipes: list[Connection], processes: list[Any], deadline: float, seconds: float
) -> list[Any]:
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while missing := [r for r in range(len(pipes)) if r not in answers and r not in failures]:
        left = deadline - time.monotonic()
        # Once a rank has failed, the others hang or fail too: do not wait for them.
        ready = wait([pipes[r] for r in missing], max(0.0, min(left, 1.0) if failures else left))
        if not ready:
            break
        for rank in missing:
            if pipes[rank] not in ready:
                continue
            try:
                worked, answer = pipes[rank].recv()
            except EOFError:
                processes[rank].join(5)
                worked, answer = False, f"ended with exit code {processes[rank].exitcode}"
            (answers if worked else failures)[rank] = answer
    if failures:
        raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
    if missing:
        names = " and ".join(map(str, missing))
        raise TimeoutError(f"rank {names} gave no answer within {seconds:g} s")
    return [answers[rank] for rank in range(len(pipes))]


def _serve(
    pipe: Connection,
    place: tuple[int, int, str, str, float],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """The main function of a process: join the group, then send (True, result) or (False, error and traceback)."""
    rank, ranks, device, store, seconds = place
    try:
        options: dict[str, Any] = {}
        if device == "cuda":
            torch.cuda.set_device(rank)
            options["device_id"] = torch.device("cuda", rank)
        elif sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=max(seconds, 1.0)),
            **options,
        )
        pipe.send((True, function(*arguments)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
