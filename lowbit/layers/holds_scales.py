"""HoldsScales: a module with learned scales, which its weights know, so that any operation can read them rounded."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

SCALE, ZERO = "_scale", "_zero"
"""The ends of the names of the parameters beside a weight, after the weight's own name."""


class HoldsScales:
    """Mixin of the modules that `lowbit.tensor.trained.learned_scales.give_scales` makes. Copies of a module hold their
    own."""

    def __setstate__(self: Any, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        hold(self)


def hold(module: nn.Module) -> None:
    """Tell the weights of a module that their scales are here."""
    for name, weight in module._parameters.items():
        if hasattr(type(weight), "holder") and name + SCALE in module._parameters:
            weight.holder = weakref.ref(module)  # type: ignore[union-attr]
