"""The ``lowbit`` namespace of ``torch.ops``. Modules of ops define, implement and fake theirs in it."""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")


def check_one_device(**tensors: Tensor | None) -> None:
    """ValueError unless all are on the first one's device: kernels would take addresses of other memory."""
    devices = {name: part.device for name, part in tensors.items() if part is not None}
    if len(set(devices.values())) > 1:
        named = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all must be on one device, got {named}; move them with .to(device)")


def aligned(x: Tensor, to: int = 16) -> Tensor:
    """x, or a copy of it, without gaps and from a multiple of `to` bytes, as some kernels read it."""
    x = x.contiguous()
    return x if x.data_ptr() % to == 0 else x.clone()
