"""The ``lowbit`` namespace of ``torch.ops``, in which each module registers its op, and checks that ops share."""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations, scales and results."""


def check_one_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device: kernels take addresses, which only one device can read."""
    devices = {name: part.device for name, part in tensors.items() if part is not None}
    if len(set(devices.values())) > 1:
        named = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all must be on one device, got {named}; move them with .to(device)")


def aligned(x: Tensor, to: int = 16) -> Tensor:
    """x, or a copy of x, that is contiguous and begins at a multiple of `to` bytes, as some kernels require."""
    x = x.contiguous()
    return x if x.data_ptr() % to == 0 else x.clone()
