"""AWQ: columns that meet large inputs are scaled up before they are rounded, so that their errors are smaller.

Column j of the linears that multiply one input is multiplied by s_j = m_j^α, and the input divided by it. m_j is the
mean magnitude of channel j (arXiv 2306.00978). α is the one of a grid with the least error of the outputs,

    Σ over linears and inputs x of ‖(Q(W · s) / s − W) x‖²

where Q rounds by the linear's scheme, from the smallest and largest values. α = 0 changes nothing, and is in the grid.
That is the error before `GPTQ` makes up for any of it. So before `GPTQ`, AWQ helps where activations have outliers.
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
from lowbit.inference.calibration.ranks import Ranks
from lowbit.inference.calibration.step import Step
from lowbit.numerics.settings import check_whole
from lowbit.numerics.spec import Spec

_ROWS = 1024
"""Inputs of each folding on which errors are measured."""


@dataclass(frozen=True)
class AWQ(Step):
    """Input channels scaled for the least error of the outputs. Folded into the layer before.

    Args:
        grid: how many values of α, from 0 to below 1, are tried.
    """

    grid: int = 20
    in_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", check_whole("grid", self.grid))

    @torch.no_grad()
    def fold(self, model: nn.Module, targets: Sequence[Target], batches: Batches) -> dict[int, str]:
        specs = {id(o.module): t.scheme.weight for t in targets for o in t.owners}
        found = foldings(model, targets, batches)
        sums = [channels_of(folding) for folding in found]
        rows = [[s.new_empty(0, len(s))] for s in sums]
        share = -(-_ROWS // batches.total)

        def see(i: int, x: Tensor) -> None:
            sums[i] += x.abs().sum(0, dtype=torch.float32)
            some = x[:: max(1, len(x) // share)][:share]
            rows[i].append(some.to(torch.float32, copy=True))  # a view would keep all of x

        watched(model, [f.linears[0] for f in found], batches, see)
        batches.ranks.add_up(*sums)
        notes: dict[int, str] = {}
        for i, folding in enumerate(found):
            x = torch.cat(rows[i])
            rows[i].clear()
            alpha, scale = self._best(folding, specs, sums[i], x, batches.ranks)
            if alpha:
                folding.divide(scale)
            note = f"into {folding.name}, α {alpha:.2f}"
            notes |= {id(linear): note for linear in folding.linears}
        return notes

    def _best(
        self, folding: Folding, specs: dict[int, Spec], sums: Tensor, x: Tensor, ranks: Ranks
    ) -> tuple[float, Tensor]:
        """α with the least error, and its scales."""
        mean = torch.where(sums > 0, sums, sums[sums > 0].min() if bool((sums > 0).any()) else 1.0)
        mean = mean / mean.log().mean().exp()
        rounded = [linear for linear in folding.linears if id(linear) in specs]
        errors = []
        for i in range(self.grid):
            scale = mean ** (i / self.grid)
            errors.append(sum(_error(linear, specs[id(linear)], scale, x) for linear in rounded))
        totals = [sum(each) for each in zip(*ranks.gathered(errors), strict=True)]
        best = totals.index(min(totals))
        scale = mean ** (best / self.grid)
        ranks.alike(scale)
        return best / self.grid, scale


def _error(linear: nn.Linear, spec: Spec, scale: Tensor, x: Tensor) -> float:
    """Σ ‖(Q(W · s) / s − W) x‖²."""
    weight = linear.weight.float()
    scaled = weight * scale
    dtype = spec.scale_dtype_for(linear.weight.dtype)
    codes, steps, zero = spec.quantize(scaled, dtype, spec.choose_qparams(spec.pad(scaled), dtype))
    moved = spec.dequantize(codes, steps, zero, scaled.shape, torch.float32) / scale - weight
    return float((x @ moved.T).square().sum(dtype=torch.float64))
