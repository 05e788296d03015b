"""Processes that start within milliseconds: forks of one that has imported torch and lowbit.

A new process takes seconds to import torch. On Linux, one process, Python's own fork server, imports it once and
computes nothing; the processes that `start` starts are its forks. Elsewhere they are spawned, and each imports torch.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

PRELOADED = [
    "lowbit.testing",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
"""The modules that the server imports. None of them may start a thread or ask for a device."""


def start_method(spawned: bool = False) -> str:
    """The start method of `multiprocessing` for these processes: "forkserver", or "spawn" if `spawned` or outside
    Linux. A server that starts imports `PRELOADED`; a server that runs already stays as it is."""
    if spawned or sys.platform != "linux":
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    return "forkserver"


def start(
    target: Callable[..., None],
    *arguments: Any,
    variables: Mapping[str, str],
    spawned: bool = False,
    daemon: bool = True,
) -> Any:
    """Start a process that calls `target`, and return its `multiprocessing.Process`. Both find modules in one place.

    Args:
        target: a function of a module that can be imported.
        arguments: its arguments, which can be pickled.
        variables: environment variables beside those of this process. Variables that torch reads at import are the
            server's, which starts at the first call.
        spawned: start an interpreter of its own instead of a fork.
        daemon: end the new process with this one. A daemon must not start processes of its own.
    """
    context: Any = multiprocessing.get_context(start_method(spawned))
    saved = dict(os.environ)
    environment = {**saved, **variables}
    process = context.Process(target=_call, args=(environment, target, arguments), daemon=daemon)
    # An interpreter that starts now looks for lowbit where this one does, and not in the current folder first.
    os.environ.update(variables, PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1")
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(saved)
    return process


def _call(
    environment: Mapping[str, str], target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)
