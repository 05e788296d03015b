"""Which devices have the matrix units that training schemes multiply on."""

from __future__ import annotations

import torch

from lowbit_kernels.runtime import nvrtc


def missing_units(device: torch.device, capability: tuple[int, int]) -> str | None:
    """Why a device lacks the matrix units of a GPU of this capability; None if it has them, and for CPU and meta."""
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return "it is not an NVIDIA GPU"
    found = nvrtc.capability(device)
    needed = ".".join(map(str, capability))
    has = ".".join(map(str, found))
    return None if found >= capability else f"its compute capability is {has}, below {needed}"


def missing_block_products(device: torch.device) -> str | None:
    """Why a GPU from compute capability 9.0 on has no products of float8 blocks; None if it has them."""
    if device.type != "cuda":
        return None
    found = nvrtc.capability(device)
    if found != (9, 0):
        return f"its compute capability is {'.'.join(map(str, found))}, and cuBLAS has products of blocks for 9.0"
    if nvrtc.cuda_version() < (12, 9):
        return f"torch is built for CUDA {torch.version.cuda}, and cuBLAS has products of blocks from CUDA 12.9 on"
    return None


# The effect of torch.compiler.assume_constant_result, whose call would import the compiler along with lowbit.
missing_units._dynamo_marked_constant = True  # type: ignore[attr-defined]
missing_block_products._dynamo_marked_constant = True  # type: ignore[attr-defined]
