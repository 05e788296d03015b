"""The devices on which the kernels of an optimizer's step run."""

from __future__ import annotations

import pytest
import torch

from lowbit.optim.step import fused
from lowbit_kernels.runtime import host_compiler
from tests.kernels.compiled_on_cpu import COMPILER
from tests.optim.counted import LAUNCHES, count, emulate


@pytest.fixture
def operations(monkeypatch):
    """Steps by PyTorch operations, where formulas, formats and files are the point: each kernel compiles for a second.
    `test_fused` and `test_reference` compare the kernels with the operations."""
    monkeypatch.setattr(fused, "device_obstacle", lambda device, float8: "a test without kernels")


@pytest.fixture(params=["operations", pytest.param("kernels", marks=pytest.mark.exhaustive)])
def steps(request):
    """As `operations`; the other point, steps by kernels, is one of a product of axes."""
    if request.param == "operations":
        request.getfixturevalue("operations")


needs_compiler = pytest.mark.skipif(not host_compiler.compiler(), reason="no C++ compiler")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=needs_compiler),
        pytest.param("emulated", marks=pytest.mark.skipif(not COMPILER, reason="no g++")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request, monkeypatch):
    """The device of the parameters. `LAUNCHES` lists the kernels that ran."""
    emulate(monkeypatch) if request.param == "emulated" else count(monkeypatch)
    LAUNCHES.clear()
    return torch.device("cuda" if request.param == "cuda" else "cpu", 0)
