"""Prune24: two weights of each four neighbouring inputs of an output become 0, before the others are rounded.

    magnitude    keeps the two largest |w_j|
    wanda        keeps the two largest |w_j| ‖x_j‖, over all inputs x (arXiv 2306.11695)
    sparsegpt    keeps the two largest |w_j| / U_jj while it goes through the columns as `GPTQ` does, and later columns
                 make up for what is pruned (arXiv 2301.00774)

The scheme has a code for 0, so the result is an ordinary low-bit weight with codes of 0, or a `Sparse24Tensor`, which
stores the other half. Steps that follow keep the zeros: searches choose scales for what is left, `GPTQ` lets later
columns make up for what any method prunes, and learned rounding moves what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lowbit.convert import Target, is_conv, shape_of_blocks
from lowbit.inference.calibration.columns import OF_FOUR, Factor, pruned_by_columns, two_of_four
from lowbit.inference.calibration.step import Layer, Part, Step, check_share
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.settings import check_flag

By = Literal["magnitude", "wanda", "sparsegpt"]


@dataclass(frozen=True)
class Prune24(Step):
    """Keep two weights of each four neighbouring inputs. Comes before steps that round. Embeddings stay dense, also
    those tied to a head.

    Args:
        by: "magnitude", "wanda" or "sparsegpt".
        compressed: store what is kept alone, as `Sparse24Tensor`: b bits a weight become b/2 + 1. For symmetric
            integers and float8; format "lowbit" holds it. False: an ordinary weight with codes of 0.
        damping: what "sparsegpt" adds to the diagonal of the Hessian, as a share of its mean.

    Raises ValueError, TypeError for other values.
    """

    by: By = "sparsegpt"
    compressed: bool = False
    damping: float = 0.01

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            accepted = ", ".join(get_args(By))
            raise ValueError(f"by must be one of {accepted}, got {self.by!r}")
        check_share("damping", self.damping)
        check_flag("compressed", self.compressed)

    @property
    def needs(self) -> Literal["diagonal", "full"]:  # type: ignore[override]
        return "full" if self.by == "sparsegpt" else "diagonal"

    @property
    def comes_first(self) -> bool:
        return True

    def begin(self, targets: Sequence[Target]) -> dict[int, str]:
        notes: dict[int, str] = {}
        for target in targets:
            if any(isinstance(owner.module, nn.Embedding) for owner in target.owners):
                notes |= {id(owner.module): "left dense (an embedding)" for owner in target.owners}
            else:
                _check(target, self.compressed)
                notes |= {id(owner.module): self.by for owner in target.owners}
        return notes

    def apply(self, layer: Layer) -> None:
        if layer.is_embedding:
            return
        if self.compressed and layer.rotation > 1:
            raise ValueError(
                f"{layer.name}: no tensor holds a rotated weight compressed; take Rotate(online=False), or "
                "Prune24(compressed=False)"
            )
        weight = torch.empty_like(layer.weight)
        mask = torch.empty_like(weight, dtype=torch.bool)
        for part in layer.parts():
            weight[part.at], mask[part.at] = self._pruned(layer.weight[part.at], part)
        layer.prune(mask, weight)
        layer.is_compressed = self.compressed

    def _pruned(self, w: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """The pruned matrix [N, K] and its mask."""
        h = part.hessian
        if self.by == "sparsegpt" and h is not None:
            return pruned_by_columns(w, Factor(h, self.damping, True, OF_FOUR))
        scores = w.square()
        if self.by == "wanda" and h is not None:
            scores *= h if h.ndim == 1 else h.diagonal()
        mask = two_of_four(scores.T).T
        return w.where(mask, 0.0), mask


def _check(target: Target, compressed: bool) -> None:
    """Raise ValueError for a weight that cannot be pruned."""
    name, spec, inputs = target.fqn, target.scheme.weight, shape_of_blocks(target)[-1]
    if inputs % OF_FOUR:
        raise ValueError(
            f"{name}: Prune24 keeps two of each four inputs, and its {inputs} inputs are not a multiple of four; leave "
            f"it plain by a pattern, {{{name!r}: None, '*': scheme}}"
        )
    is_table = isinstance(spec.format, LookupTable)
    if spec.zero_point_is_value or (is_table and 0.0 not in spec.format.values):
        raise ValueError(
            f"{name}: pruned weights are 0, which {spec} does not have in each block; take the mapping 'symmetric' or "
            "'asymmetric'"
        )
    if not compressed:
        return
    if spec.has_zero_point or is_table:
        raise ValueError(
            f"{name}: symmetric integers and float8 are stored compressed, got {spec}; take Prune24(compressed=False)"
        )
    if is_conv(target):
        raise ValueError(
            f"{name}: weights of convolutions are not stored compressed; take Prune24(compressed=False)"
        )
