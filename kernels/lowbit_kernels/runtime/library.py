"""The ``lowbit`` namespace of ``torch.ops``, in which each module registers its op, and checks that ops share.

A saved program, such as a package of AOTInductor, names its ops, and torch loads it only when they are defined. So all
ops are defined when `lowbit` is imported, by the lines of ``schemas.txt``. A module, and Triton with it, is imported
only when one of its ops is first called: all modules and Triton take 0.2 s to import, `lowbit` itself 0.13 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import lowbit_kernels
from lowbit_kernels.runtime import flop_formulas

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
SCHEMAS = Path(__file__).with_name("schemas.txt")
"""The module and the schema of each op; ``python -m lowbit_kernels.runtime.schemas`` writes them."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations, scales and results."""

Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., int]]
_registered: dict[str, Functions] = {}
"""The function that computes each op, its fake, and its count of operations, for the modules that are imported."""


def register(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], flops: Callable[..., int]
) -> Any:
    """Let `run` compute the op of this schema in ``torch.ops.lowbit`` on every device; returns its only overload.

    Args:
        schema: of the op.
        run: computes it.
        fake: makes uninitialised results.
        flops: the operations that FlopCounterMode counts. All three take the op's arguments by position.
    """
    name = schema[: schema.index("(")]
    if not hasattr(torch.ops.lowbit, name):
        _define(name, schema)  # `SCHEMAS` does not list it yet
    _registered[name] = run, fake, flops
    return getattr(torch.ops.lowbit, name).default


def _define(module: str, schema: str) -> None:
    """Define an op whose module is imported at the first call."""
    name = schema[: schema.index("(")]

    def found() -> Functions:
        with _disable_current_modes():  # tensors that the module makes are real ones
            getattr(lowbit_kernels, module)  # imports it
        return _registered[name]

    def run(*args: Any) -> Any:
        return (_registered.get(name) or found())[0](*args)

    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"lowbit::{name}", lambda *args: (_registered.get(name) or found())[1](*args), lib=LIBRARY
    )
    flop_formulas.add(
        getattr(torch.ops.lowbit, name),
        lambda *args, out_val, **kwargs: (_registered.get(name) or found())[2](*args, **kwargs),
    )


for _line in SCHEMAS.read_text(encoding="utf-8").splitlines():
    _define(*_line.split(" ", 1))


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
