"""Shared by every test: seeds, the GPU marker, how hypothesis searches, and what keeps a run of all tests short.

A test marked ``gpu`` is skipped, with its reason in the summary, on a machine without CUDA. Under CI
hypothesis is derandomized, so that the same commit gives the same verdict twice.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

# There are many small tests. On a busy machine, threads that wait for each other make them several times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import covering

# Each process that a test starts would compile the modules of lowbit anew, which takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest.register_assert_rewrite("lowbit.testing")

# Otherwise inductor starts a process for each core, and each of them imports torch. C++ for the CPU needs none of them.
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Without this, inductor compiles a program of 2 s for each set of vector instructions that the processor has.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

SEED = 20260101

settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Compiled kernels stay from run to run. Processes that tests start share them, and so do the workers of pytest-xdist.
# The key of a kernel has its source, the compiler with its version and options, and the processor: no earlier run can
# hide that a compiler refuses a kernel now.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lowbit-tests")
    try:
        _KEPT.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a user without a home
        _TEMPORARY = tempfile.TemporaryDirectory(prefix="lowbit-tests-")
        _KEPT = Path(_TEMPORARY.name)
    os.environ["LOWBIT_CACHE_DIR"] = str(_KEPT / "kernels")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(covering)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    covering.leave_out("pages", config, items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The collected tests stay until the end: garbage collections find nothing there and take half of the time to
    collect them. Frozen, they cost later garbage collections nothing. A collection over all tests of this folder takes
    about 1 s, and many tests and benchmarks call one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(700, 10, 50)  # full collections, of 0.1 s each, five times rarer


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"


@pytest.fixture(autouse=True)
def _seed_everything() -> None:
    """Each test starts from the same random state, whichever tests ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    if torch.cuda.is_available():
        torch.manual_seed(SEED)
    else:  # the function above formats the stack of calls for each kind of device, which takes longer than many tests
        torch.default_generator.manual_seed(SEED)
