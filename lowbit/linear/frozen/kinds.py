"""Which class stores a frozen weight. Classes of `lowbit.tensor` enter themselves, and products find them by a spec."""

from __future__ import annotations

from typing import Any

from lowbit.numerics.spec import Spec

KINDS: list[Any] = []
"""Classes with `stores(spec)`. The latest stands first, and the class for all other specs stands last."""


def representation_of(spec: Spec) -> Any:
    """The subclass of AffineTensor that stores a weight of this spec."""
    for kind in KINDS:  # not a generator: every QAT product asks
        if kind.stores(spec):
            break
    return kind
