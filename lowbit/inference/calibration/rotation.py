"""Rotate: outliers of activations are spread over many channels, so that 4 bits hold them.

An orthogonal H changes nothing in high precision, W x = (W H)(H x), and both factors are easier to round (QuaRot, arXiv
2404.00456; SpinQuant, 2505.16406 uses learned ones). Where it can, it is folded into the weights and costs nothing
(`residual`): the residual stream, and the values of attention. Other inputs, such as those of down projections, which
follow a nonlinear function, are rotated as the product runs (`RotatedTensor`), in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn

import lowbit_kernels as kernels
from lowbit.convert import Target, is_turned
from lowbit.inference.calibration.batches import Batches
from lowbit.inference.calibration.residual import fold_rotations
from lowbit.inference.calibration.step import Layer, Step
from lowbit.linear.frozen.kinds import representation_of
from lowbit.numerics.settings import check_flag
from lowbit.tensor.frozen.rotated_tensor import blocks_to_rotate

LEFT = "left alone"
"""The note on a weight whose inputs are not rotated."""


@dataclass(frozen=True)
class Rotate(Step):
    """Inputs rotated by Hadamard matrices, folded into the model where they fold. Comes before steps that round.

    Args:
        size: inputs of a block that products rotate: 16, 32, 64 or 128. A layer whose inputs it does not divide takes
            the largest power of two that does. Folded rotations have the largest blocks that fit.
        folded: fold a rotation of the residual stream, and of the values of attention. False: products rotate all
            inputs.
        online: let products rotate the inputs to which nothing folds.

    Raises ValueError for another size, and for a step that does neither; TypeError for what is not a bool.
    """

    size: int = 64
    folded: bool = True
    online: bool = True
    _sizes: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The blocks of each weight whose product rotates, by name."""

    needs: ClassVar[Literal["diagonal", "full"]] = "full"

    def __post_init__(self) -> None:
        sizes = kernels.block_hadamard.SIZES
        if self.size not in sizes:
            raise ValueError(f"size must be one of {', '.join(map(str, sizes))}, got {self.size!r}")
        check_flag("folded", self.folded)
        check_flag("online", self.online)
        if not self.folded and not self.online:
            raise ValueError("folded=False and online=False rotate nothing; leave Rotate out")

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self.folded

    @property
    def folds(self) -> bool:
        return self.folded

    @property
    def comes_first(self) -> bool:
        return True

    def begin(self, targets: Sequence[Target]) -> dict[int, str]:
        """Choose online rotations for all linears; `fold` drops those of the linears into which it folds one."""
        self._sizes.clear()
        notes: dict[int, str] = {}
        for target in targets:
            if self.online:
                self._check(target)
            size = blocks_to_rotate(target.weight.shape[-1], self.size)
            if not self._fits(target):
                kinds = sorted({type(owner.module).__name__ for owner in target.owners})
                note = f"{LEFT} (of {' and '.join(kinds)})"
            elif not self.online:
                note = LEFT
            elif size == 1:
                note = f"{LEFT} (no power of two divides its inputs)"
            else:
                self._sizes[target.fqn] = size
                note = f"online by {size}"
            notes |= {id(owner.module): note for owner in target.owners}
        return notes

    def fold(self, model: nn.Module, targets: Sequence[Target], batches: Batches) -> dict[int, str]:
        owners = [owner for target in targets for owner in target.owners]
        linears = {id(owner.module) for owner in owners if isinstance(owner.module, nn.Linear)}
        notes = fold_rotations(model, linears, batches)
        for target in targets:
            if any(id(owner.module) in notes for owner in target.owners):
                self._sizes.pop(target.fqn, None)
        return notes

    def apply(self, layer: Layer) -> None:
        size = self._sizes.get(layer.name)
        if size is not None:
            layer.rotate(size)

    @staticmethod
    def _fits(target: Target) -> bool:
        """True if a product may rotate the inputs of this weight."""
        is_linear = all(isinstance(owner.module, nn.Linear) for owner in target.owners)
        return is_linear and target.weight.ndim == 2 and not is_turned(target)

    def _check(self, target: Target) -> None:
        """Raise ValueError for a scheme whose products do not rotate."""
        if not self._fits(target):
            return
        name, spec = target.fqn, target.scheme.weight
        if representation_of(spec).stored_as not in ("integers", "table"):
            raise ValueError(
                f"{name}: products rotate inputs of weights in integers or a table, got {spec}; take "
                "Rotate(online=False)"
            )
        if target.scheme.is_static:
            raise ValueError(
                f"{name}: static scales are those of inputs that are not rotated; take Rotate(online=False), or a "
                "scheme whose activation has static=False"
            )
