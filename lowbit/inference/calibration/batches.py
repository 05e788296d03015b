"""The batches of a calibration: which of them it uses, and which of their tokens count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.inference.calibration.ranks import Ranks
from lowbit.tracing.batches import on_device_of

HELD_OUT = 8
"""One batch in so many is held out of steps on layers, and one sequence in so many of learned rounding."""
MASK = "attention_mask"
"""The entry of a batch, and the keyword of a model, that says which tokens count."""


class Batches(list[Any]):
    """The batches of this process.

    Args:
        batches: on the device of the model, none of them empty.
        ranks: the processes that calibrate together.
        held_out: batches that only tell whether the steps did well. They come after the others.

    Attributes:
        seen: how many of the batches the steps see, the first ones.
        counts: the same of each process.
        held_out: how many others all processes have.
    """

    def __init__(
        self,
        batches: Iterable[Any] = (),
        ranks: Ranks | None = None,
        held_out: Iterable[Any] = (),
    ) -> None:
        super().__init__(batches)
        self.ranks = Ranks() if ranks is None else ranks
        self.seen = len(self)
        self.extend(held_out)
        found = self.ranks.gathered((self.seen, len(self)))
        self.counts = [seen for seen, _ in found]
        self.held_out = sum(count - seen for seen, count in found)

    @property
    def total(self) -> int:
        """The batches of all processes that the steps see."""
        return sum(self.counts)

    @property
    def first(self) -> int:
        """The first rank that has a batch."""
        return next(rank for rank, count in enumerate(self.counts) if count)


def mask_of(batch: Any) -> Tensor | None:
    """The tokens that count, bool [B, T], by the attention mask of a mapping. None: all, also where the tokens of a
    decoder have the shape of the encoder's and another mask, since rows do not tell whose they are."""
    mask = batch.get(MASK) if hasattr(batch, "get") else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    mask, tokens = mask.bool(), batch.get("decoder_input_ids")
    if isinstance(tokens, Tensor) and tokens.shape == mask.shape:
        other = batch.get("decoder_attention_mask")
        other = torch.ones_like(mask) if other is None else other.bool()
        return mask if torch.equal(mask, other) else None
    return mask


def counted_rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """The rows [T, K] of x [..., K] that count: those of `mask`, where it has as many as x."""
    lead = x.shape[:-1]
    if mask is not None and lead == mask.shape:
        return x[mask.to(x.device)]
    if mask is not None and lead == (mask.numel(),):
        return x[mask.flatten().to(x.device)]
    return x.reshape(-1, x.shape[-1])


def usable_batches(
    model: nn.Module,
    batches: Iterable[Any],
    ranks: Ranks | None = None,
    held_out: Iterable[Any] | None = (),
) -> Batches:
    """The batches that have something that counts, on the device of the model's first parameter. `held_out`: those of
    `Batches`; None: the last one in `HELD_OUT` of these. Raises ValueError if no process has a batch besides those held
    out, or none of those that are given as `held_out` counts, and TypeError as `as_list`."""
    given = as_list(batches), as_list(() if held_out is None else held_out, "held_out")
    usable, others = (
        [batch for batch in (on_device_of(model, b) for b in own) if not _is_empty(batch)]
        for own in given
    )
    if held_out is None:
        last = len(usable) - len(usable) // HELD_OUT
        usable, others = usable[:last], usable[last:]
    kept = Batches(usable, ranks, others)
    counted = f"with an element, and with a 1 in {MASK} if they have that"
    if not kept.total:
        raise ValueError(
            f"got {len(given[0])} batches, none of which has elements that count; accepted: one or more {counted}, a "
            "few thousand tokens in all"
        )
    if given[1] and not kept.held_out:
        raise ValueError(
            f"held_out has {len(given[1])} batches, none of which has elements that count; accepted: some {counted}, "
            "or [] to hold out none"
        )
    return kept


def as_list(batches: Iterable[Any], name: str = "batches") -> list[Any]:
    """The batches as a list. Raises TypeError for one batch in its place. `name`: of the argument."""
    if not isinstance(batches, Tensor | str | Mapping):
        with suppress(TypeError):
            return list(batches)
    raise TypeError(
        f"{name} must be a list of batches, got one {type(batches).__name__}; give [batch]"
    )


def _is_empty(batch: Any) -> bool:
    """True if the batch's first tensor has no element, the batch no entry, or its mask no token that counts."""
    if (mask := mask_of(batch)) is not None and not bool(mask.any()):
        return True
    entries = list(batch.values()) if isinstance(batch, dict) else batch
    if isinstance(entries, Tensor):
        return entries.numel() == 0
    if not isinstance(entries, list | tuple):
        return False
    return not entries or (isinstance(entries[0], Tensor) and entries[0].numel() == 0)
