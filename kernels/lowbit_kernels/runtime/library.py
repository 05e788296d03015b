"""The ``lowbit`` namespace of ``torch.ops``, in which each module registers its op, and checks that ops share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import lowbit_kernels
from lowbit_kernels.runtime.schemas import SCHEMAS

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations, scales and results."""

_registered: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""The function that computes each op, and its fake, for the modules that are imported."""


def register(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Let `run` compute ``torch.ops.lowbit.<name>`` on every device; returns its only overload.

    `lowbit_kernels.runtime.schemas` has its schema.
    """
    if not hasattr(torch.ops.lowbit, name):
        raise LookupError(
            f"the op {name} has no schema: add it to SCHEMAS in lowbit_kernels/runtime/schemas.py"
        )
    _registered[name] = run, fake
    return getattr(torch.ops.lowbit, name).default


def _define(module: str, schema: str) -> None:
    """Define an op whose module is imported at the first call."""
    name = schema[: schema.index("(")]

    def found() -> tuple[Callable[..., Any], Callable[..., Any]]:
        with _disable_current_modes():  # tensors that the module makes are real ones
            getattr(lowbit_kernels, module)  # imports it
        return _registered[name]

    def run(*args: Any) -> Any:
        return (_registered.get(name) or found())[0](*args)

    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"lowbit::{name}",
        lambda *args: (_registered.get(name) or found())[1](*args),
        lib=LIBRARY,
    )


for _module, _schemas in SCHEMAS.items():
    for _schema in _schemas:
        _define(_module, _schema)


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
