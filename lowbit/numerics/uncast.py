"""Buffers that keep their dtype where `model.half()` or `.to(torch.bfloat16)` casts the model, such as scales, which
a cast would round."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

from torch import Tensor, nn


class Uncast(nn.Module):
    """The base of modules whose buffers of the names in `uncast` stay in their dtype. Parameters are cast."""

    uncast: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        held = {name: self._buffers[name] for name in self.uncast if name in self._buffers}
        super()._apply(fn, recurse)
        for name, before in held.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self
