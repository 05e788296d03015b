"""Batches that no step sees tell whether a place is better with what the steps left, or with min-max rounding.

A search finds the least error over the batches that it sees. With few of them, or at many bits, where both are about as
good, the outputs for others may be further from those in high precision than with scales of the largest values. Then
the weights of the place are rounded by these.
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
    """

    minmax: float
    found: float

    @property
    def kept(self) -> bool:
        """True if the weights are those of the steps."""
        return self.found <= self.minmax or math.isnan(self.minmax)

    def __str__(self) -> str:
        text = f"held-out loss {self.found:.3e}, by min-max {self.minmax:.3e}"
        if math.isnan(self.minmax):
            return f"{text}: nothing is compared"
        return text if self.kept else f"{text}, which is kept"


@dataclass
class MinMax:
    """The low-bit weights of a place that min-max rounding gives, beside those of the steps, in the same form.

    Attributes:
        weights: the target of each, the weight, and what the report says of it if it stays.
    """

    weights: list[tuple[Target, Any, LayerResult]] = field(default_factory=list)

    @torch.no_grad()
    def chosen(self, place: HeldOut) -> tuple[HeldOutLosses, list[LayerResult]]:
        """Leave the better weights in the place. Returns the losses, and what the report says of these weights."""
        found = mean_loss(place.block, place.over)
        self._exchange()
        losses = HeldOutLosses(mean_loss(place.block, place.over), found)
        if losses.kept:
            self._exchange()
        results = [result for _, _, result in self.weights]
        self.weights.clear()
        return losses, results

    def _exchange(self) -> None:
        """Write these weights into the memory of those in the place, and the other way round."""
        for target, other, _ in self.weights:
            owner = target.owners[0]
            held: Any = owner.module._parameters[owner.attribute]
            for own, new in zip(
                held.inner_tensors().values(), other.inner_tensors().values(), strict=True
            ):
                kept = own.clone()
                own.copy_(new)
                new.copy_(kept)
