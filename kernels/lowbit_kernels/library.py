"""The ``lowbit`` namespace of ``torch.ops``, in which each module registers its op, and checks that ops share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations, scales and results."""


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``torch.ops.lowbit.<name>``, which `run` computes on every device; returns its only overload."""
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lowbit, name).default


def check_one_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device: kernels take addresses, which only one device can read."""
    devices = {name: part.device for name, part in tensors.items() if part is not None}
    if len(set(devices.values())) > 1:
        named = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all must be on one device, got {named}; move them with .to(device)")


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of x, that is contiguous and begins at a multiple of 16 bytes, as some kernels require."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
