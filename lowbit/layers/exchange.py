"""Exchange weights of modules for a while, and put them back.

`Held` is what a module may hold: parameters, and with them its class. Nothing is copied, so what is put back are the
same parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from lowbit.layers.frozen import hide_frozen, show_frozen, shown_class


@dataclass(frozen=True)
class Held:
    """A module, its class before `show_frozen`, and parameters of it by name."""

    module: nn.Module
    kind: type[nn.Module]
    parameters: Mapping[str, nn.Parameter | None]

    @classmethod
    def of(cls, module: nn.Module) -> Held:
        """All that the module holds now."""
        return cls(module, shown_class(module), dict(module._parameters))

    def put(self) -> None:
        """Give the module this class and these parameters. Others stay."""
        hide_frozen([self.module])
        self.module.__class__ = self.kind
        self.module._parameters.update(self.parameters)
        show_frozen([self.module])

    def put_back(self) -> None:
        """Give the module this class and exactly these parameters, in their order."""
        self.module._parameters.clear()
        self.put()


@contextmanager
def exchanged(changes: Iterable[Held]) -> Iterator[None]:
    """The context in which modules hold `changes`. Afterwards they hold what they held before."""
    changes = list(changes)
    before = {id(change.module): Held.of(change.module) for change in changes}
    try:
        for change in changes:
            change.put()
        yield
    finally:
        for held in before.values():
            held.put_back()
