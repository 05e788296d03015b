"""SmoothQuant: outliers of activations move into the weights, so that 8-bit activations lose little.

Channel j of an input is divided by s_j = max|x_j|^α / max|w_j|^(1 − α), over all linears that multiply it (arXiv
2211.10438, equation 4), and column j of these linears is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lowbit.convert import Target
from lowbit.inference.calibration.batches import Batches
from lowbit.inference.calibration.folding import Folding, channels_of, foldings, watched
from lowbit.inference.calibration.step import Step, check_share


@dataclass(frozen=True)
class SmoothQuant(Step):
    """Input channels scaled so that inputs and weights share the range of outliers. Folded into the layer before.

    Args:
        alpha: 0 to 1: how much of an input's range moves into the weights.
    """

    alpha: float = 0.5
    in_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("alpha", self.alpha, 1.0)

    @torch.no_grad()
    def fold(self, model: nn.Module, targets: Sequence[Target], batches: Batches) -> dict[int, str]:
        found = foldings(model, targets, batches)
        largest = [channels_of(folding) for folding in found]

        def see(i: int, x: Tensor) -> None:
            largest[i] = torch.maximum(largest[i], x.abs().amax(0).float())

        watched(model, [f.linears[0] for f in found], batches, see)
        batches.ranks.largest(*largest)
        notes: dict[int, str] = {}
        for i, folding in enumerate(found):
            scale = self._scale(folding, largest[i])
            batches.ranks.alike(scale)
            folding.divide(scale)
            notes |= {id(linear): f"into {folding.name}" for linear in folding.linears}
        return notes

    def _scale(self, folding: Folding, inputs: Tensor) -> Tensor:
        weights = torch.stack([w.weight.abs().amax(0).float() for w in folding.linears]).amax(0)
        scale = inputs**self.alpha / weights ** (1 - self.alpha)
        usable = (inputs > 0) & (weights > 0) & scale.isfinite()
        return torch.where(usable, scale, 1.0)
