"""The ``lowbit`` namespace of ``torch.ops``, in which each module registers its op, and checks that ops share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations, scales and results."""


def register(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, planned: bool = False
) -> Any:
    """Define ``torch.ops.lowbit.<name>``, which `run` computes on every device; returns its only overload.

    ``planned``: `lowbit_kernels.launcher` may take the op over on GPUs. Call such an op by `called`.
    """
    name, arguments = schema[: schema.index("(")], schema[schema.index("(") :]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{name}", fake, lib=LIBRARY)
    if planned:
        LIBRARY.define(f"{name}_in_python{arguments}")
        LIBRARY.impl(f"{name}_in_python", _keeping_error(run), "CompositeExplicitAutograd")
    return getattr(torch.ops.lowbit, name).default


class _Raised(threading.local):
    """The exception of the planned op that this thread has `called`, if that ran in Python."""

    wanted: bool = False
    error: BaseException | None = None


_raised = _Raised()


def _keeping_error(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose exception stays known. The launcher throws a RuntimeError with its message instead."""

    def kept(*arguments: Any) -> Any:
        try:
            return run(*arguments)
        except BaseException as error:
            from lowbit_kernels import launcher  # which imports this module

            if _raised.wanted:
                _raised.error = error
            launcher.tell(error)
            raise

    return kept


def called(op: Any, *arguments: Any) -> Any:
    """The result of an op that was registered as ``planned``, or the exception of its `run`.

    A compiled graph calls the op itself. There the exception is a RuntimeError with the same message.
    """
    if torch.compiler.is_compiling():
        return op(*arguments)
    _raised.wanted, _raised.error = True, None
    try:
        return op(*arguments)
    except RuntimeError:
        error, _raised.error = (
            _raised.error,
            None,
        )  # not kept, since it holds the tensors of its frames
        if error is None:
            raise
        raise error from None
    finally:
        _raised.wanted = False


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
