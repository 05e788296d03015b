"""Operators in ``torch.ops.lowbit`` that torch.compile, fake tensors and tensor subclasses take whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
Run = TypeVar("Run", bound=Callable[..., Tensor])


def opaque(schema: str, fake: Callable[..., Tensor]) -> Callable[[Run], Run]:
    """Decorator of the function that computes the operator of this schema on every device. `fake` gives a tensor of its
    shape and dtype."""

    def declared(run: Run) -> Run:
        _LIBRARY.define(schema)
        name = schema[: schema.index("(")]
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lowbit::{name}", fake, lib=_LIBRARY)
        return run

    return declared


def for_subclasses(schema: str) -> Any:
    """Define an operator that tensor subclasses compute. Its gradient is that of its second argument. Returns its
    overload."""
    _LIBRARY.define(schema)
    name = schema[: schema.index("(")]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.count = len(inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(grad if at == 1 else None for at in range(ctx.count))

    torch.library.register_autograd(f"lowbit::{name}", backward, setup_context=setup, lib=_LIBRARY)
    return getattr(torch.ops.lowbit, name).default
