"""Triton kernels for GPUs that no test machine has: they compile, and their tiles fit each GPU's shared memory and
registers. Nothing runs there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from lowbit_kernels.matmul import batched_mm
from tests.kernels.targets import GPUS, compiled_for, launches

LAUNCHES = dict(launches())
QUICK = [("sm_86", "int8_mm-4096"), ("sm_120", "batched_mm-2048")]


@pytest.mark.parametrize(("gpu", "name"), QUICK)
def test_the_largest_tiles_fit(gpu: str, name: str) -> None:
    kernels = compiled_for(GPUS[gpu], LAUNCHES[name])
    assert kernels and all(kernel.fits(GPUS[gpu]) for kernel in kernels), kernels
    assert not any(kernel.spilled for kernel in kernels), kernels


def test_the_tiles_of_a_data_centre_gpu_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice asks for the memory of a block, since compute capability 12.0 has less of it than 9.0."""
    monkeypatch.setattr(batched_mm, "has_large_tiles", lambda device: True)
    (kernel,) = compiled_for(GPUS["sm_120"], LAUNCHES["batched_mm-2048"])
    assert kernel.shared > 1024 * GPUS["sm_120"].shared and not kernel.fits(GPUS["sm_120"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_compiles_and_fits(gpu: str) -> None:
    has_float8 = (GPUS[gpu].major, GPUS[gpu].minor) >= (
        8,
        9,
    )  # without it no product of e4m3 codes is launched
    found = {
        name: compiled_for(GPUS[gpu], launch)
        for name, launch in LAUNCHES.items()
        if has_float8 or not (name.startswith("grouped_mm") and "float8" in name)
    }
    assert sum(map(len, found.values())) > 100
    misfits = [k for kernels in found.values() for k in kernels if not k.fits(GPUS[gpu])]
    assert not misfits
