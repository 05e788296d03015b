"""Programmatic dependent launch (PDL): a launch starts while the previous one still runs, and waits before it reads.

A kernel lets the next launch start as soon as it starts itself, and waits for the results of the previous kernel
before it reads them. Then that one is complete, and so are all before it, since each of them has waited too. Before its
wait a kernel may only read what no launch writes that may still run. In a series of such kernels these are all of the
series. The products of `weight_linear`, of int8 and of float8 end it: they let the next launch start only after their
own wait. A kernel of torch, which knows no PDL, waits for all before it and starts nothing early.
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
