"""Products that users add: `register_linear`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lowbit.files import digests
from lowbit.linear.frozen.row import (
    Condition,
    Implementation,
    Row,
    Weight,
)
from lowbit.numerics.settings import check_flag

rows: tuple[Row, ...] = ()
"""The registrations of users, the last first."""


def register_linear(
    condition: Condition, impl: Implementation | None = None, *, takes_residual: bool = False
) -> Callable[[Implementation], Implementation]:
    """Try `impl` before everything that is in the list; as `@register_linear(condition)`, a decorator.

    Args:
        condition: `(x, weight, bias) -> bool`, of the activation [..., K], the quantized weight [N, K] and the bias [N]
            or None. Every product asks it, also about strides or global flags, so it should be cheap. Any size may
            be 0. Check `weight.stored_as` before reading `weight.codes` ("integers", "float8", "ternary", or the
            name that your own tensor class gives).
        impl: `(x, weight, bias) -> Tensor`, [..., N] in x's dtype. It needs no gradient: those of input, bias and
            residual are computed in the same way for all implementations.
        takes_residual: `impl` may be called with a fourth argument, a tensor [..., N] of x's dtype that it adds.

    A kernel that torch.compile cannot trace is an op of torch.library; `impl` calls the op. Its launcher calls
    `lowbit_kernels.runtime.launches.ran`, so that `lowbit.trace` names the kernel.

    A compiled model asks the condition while it compiles. After a registration, call `torch._dynamo.reset()`: torch
    does not notice that a graph is out of date. torch's caches on disk tell registrations apart by the files that
    define the two functions, not by the modules that those import. Functions with a closure, methods, and functions
    without a file share no graph with another process.

    Returns:
        The decorator.

    Raises TypeError for anything but functions, and for a `takes_residual` that is not a bool.
    """

    for given in (condition, condition if impl is None else impl):
        if not callable(given):
            raise TypeError(
                "register_linear takes functions, condition(x, weight, bias) -> bool and impl(x, weight, bias), got "
                f"{given!r}"
            )

    check_flag("takes_residual", takes_residual)

    def register(fn: Implementation) -> Implementation:
        global rows
        name = getattr(fn, "__name__", type(fn).__name__)
        source = f"{_source(condition)} {_source(fn)} {takes_residual}"
        rows = (Row(name, condition, fn, takes_residual, source), *rows)
        return fn

    if impl is not None:
        register(impl)
    return register


def unregister_linear(impl: Implementation) -> None:
    """Remove every registration of `impl`.

    Raises ValueError if there is none.
    """
    global rows
    kept = tuple(row for row in rows if row.implementation is not impl)
    if len(kept) == len(rows):
        names = [row.name for row in rows]
        raise ValueError(f"{impl!r} is not registered; registered: {names}")
    rows = kept


def registered_sources() -> tuple[str, ...]:
    """The part of the keys of compiled graphs that stands for the registrations, the last first."""
    return tuple(row.source for row in rows)


def _source(fn: Callable[..., Any]) -> str:
    """A digest of a function's file and position; random where these do not determine what the function computes."""
    code = getattr(fn, "__code__", None)
    has_state = getattr(fn, "__closure__", None) or hasattr(fn, "__self__")
    if code is None or has_state or not os.path.isfile(code.co_filename):
        return os.urandom(16).hex()
    place = repr((fn.__module__, fn.__qualname__, *code.co_positions())).encode()
    return digests.of_pieces([Path(code.co_filename).read_bytes(), place])


def registered_row(x: Tensor, weight: Weight, bias: Tensor | None) -> Row | None:
    for row in rows:
        if row.condition(x, weight, bias):
            return row
    return None
