"""Which class stores a frozen weight. Classes of `lowbit.tensor` enter themselves, and products find them by a spec."""

from __future__ import annotations

from typing import Any

from lowbit.numerics.spec import Spec

KINDS: list[Any] = []
"""Classes with `stores(spec)`. The latest stands first, and the one that stores what no other does stands last."""


def representation_of(spec: Spec) -> Any:
    """The subclass of AffineTensor that stores a weight of this spec."""
    return next((kind for kind in KINDS if kind.stores(spec)), KINDS[-1])
