"""Scales that keep their dtype where `model.half()` or `.to(torch.bfloat16)` casts the model, since a cast would round
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

from torch import Tensor, nn


class Uncast(nn.Module):
    """The base of modules whose buffers and parameters of the names in `uncast` stay in their dtype."""

    uncast: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        held = [getattr(self, name, None) for name in self.uncast]
        # torch gives `fn` a parameter and its gradient one after the other
        kept = {id(t) for one in held if one is not None for t in (one, one.grad)}

        def apply(t: Tensor) -> Tensor:
            found = fn(t)
            is_kept = id(t) in kept and found.dtype != t.dtype
            return t.to(found.device) if is_kept else found

        return super()._apply(apply, recurse)
