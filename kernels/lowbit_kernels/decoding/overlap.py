"""Programmatic dependent launch (PDL): a launch starts while the previous one still runs, and waits before it reads.

A kernel lets the next launch start as soon as it starts itself, and waits for the results of the previous kernel
before it reads them. Before its wait it may only read what is older than the previous launch but one: those two may
still run. A kernel of torch in between, which knows no PDL, waits for all before it and starts nothing early. The
decode kernel of `weight_linear` lets the next launch start only after its own wait.
"""

from __future__ import annotations

import functools

import torch

from lowbit_kernels.runtime.triton_runtime import jit, tl


@jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next launch start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous launch has finished and its results are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@functools.cache  # torch's query of the capability takes 10 us
def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with the constant `PDL`: True where the GPU knows it (compute capability 9.0)."""
    overlaps = (
        device.type == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}
