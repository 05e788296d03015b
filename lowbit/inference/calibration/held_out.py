"""Batches that no step sees tell whether a place is better with what the steps left, or with min-max rounding.

A search finds the least error over the batches that it sees. With few of them, or at many bits, where both are about as
good, the outputs for others may be further from those in high precision than with scales of the largest values. Then
the weights of the place are rounded by these. The errors of single blocks do not tell what the model loses by all of
them. So a model in memory is compared as a whole at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowbit.convert import Target
from lowbit.inference.calibration.learned_rounding import mean_loss

if TYPE_CHECKING:
    from lowbit.inference.calibration.report import LayerResult
    from lowbit.inference.calibration.stages import HeldOut


class HeldOutLosses(NamedTuple):
    """The mean loss of a place over the batches held out: the squared error of a block's output, or the KL divergence
    of the model's.

    Attributes:
        minmax: with scales of the largest values.
        found: with what the steps left.
        back: the places that take min-max where the model as a whole is better by it. Others keep what the steps left.
        left: the loss of the model then.
    """

    minmax: float
    found: float
    back: tuple[str, ...] = ()
    left: float | None = None

    @property
    def kept(self) -> bool:
        """True if the weights are those of the steps; for the whole model, in all places that kept them."""
        return self.found <= self.minmax or math.isnan(self.minmax)

    def __str__(self) -> str:
        text = f"held-out loss {self.found:.3e}, by min-max {self.minmax:.3e}"
        if math.isnan(self.minmax):
            return f"{text}: nothing is compared"
        if self.back:
            return f"{text}; with min-max in {', '.join(self.back)} {self.left:.3e}, which is kept"
        return text if self.kept else f"{text}, which is kept"


Beside = list[tuple["Target", Any, "LayerResult"]]
"""For each weight of a place: its target; the other weight, by min-max, or by the steps once the two are exchanged; and
what the report says of min-max."""


@dataclass
class MinMax:
    """The low-bit weights that min-max rounding gives, beside those of the steps, in the same form.

    Attributes:
        weights: those of the place that is being rounded.
        places: for each earlier place that kept the weights of the steps, its name, its losses and the weights by
            min-max, which lie in host memory.
        keeps: False leaves `places` empty, and the whole model is not compared.
    """

    weights: Beside = field(default_factory=list)
    places: list[tuple[str, HeldOutLosses, Beside]] = field(default_factory=list)
    keeps: bool = True

    @torch.no_grad()
    def chosen(self, place: HeldOut) -> tuple[HeldOutLosses, list[LayerResult]]:
        """Leave the better weights in the place. Returns the losses, and what the report says of the weights by
        min-max, if they stay."""
        own, self.weights = self.weights, []
        losses = _compared(place, [own])
        if not losses.kept:
            _exchange(own)
        elif self.keeps:
            kept = [(t, other.to("cpu"), r) for t, other, r in own]
            self.places.append((place.block.name, losses, kept))
        return losses, [] if losses.kept else [result for _, _, result in own]

    @torch.no_grad()
    def chosen_together(self, model: HeldOut) -> tuple[HeldOutLosses, list[LayerResult]]:
        """Leave weights by which the whole model loses no more than by min-max. While it loses more, the half of the
        places that gained least takes the weights of min-max. Returns what `chosen` does."""
        left = sorted(self.places, key=lambda one: one[1].found / (one[1].minmax or 1.0))
        order = [name for name, _, _ in self.places]
        self.places, results = [], []
        losses = _compared(model, [own for _, _, own in left])
        loss = losses.found
        while left and not HeldOutLosses(losses.minmax, loss).kept:
            weaker = left[len(left) // 2 :]
            left = left[: len(left) // 2]
            for _, _, own in weaker:
                _exchange(own)
                results += [result for _, _, result in own]
            loss = mean_loss(model.block, model.over)
        if results:
            stay = {name for name, _, _ in left}
            back = tuple(name for name in order if name not in stay)
            losses = losses._replace(back=back, left=loss)
        return losses, results


def _compared(place: HeldOut, weights: list[Beside]) -> HeldOutLosses:
    """The losses of a place as it is, and by min-max. Afterwards the place is as it was."""
    found = mean_loss(place.block, place.over)
    for own in weights:
        _exchange(own)
    losses = HeldOutLosses(mean_loss(place.block, place.over), found)
    for own in weights:
        _exchange(own)
    return losses


def _exchange(weights: Beside) -> None:
    """Write these weights into the memory of those in the model, and the other way round."""
    for target, other, _ in weights:
        owner = target.owners[0]
        held: Any = owner.module._parameters[owner.attribute]
        for own, new in zip(
            held.inner_tensors().values(), other.inner_tensors().values(), strict=True
        ):
            kept = own.clone()
            own.copy_(new)
            new.copy_(kept)
