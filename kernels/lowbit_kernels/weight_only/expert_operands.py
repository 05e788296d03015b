"""Descriptions of the operands of a product of chosen experts, as `weight_operands` describes those of one weight."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lowbit_kernels.weight_only.codes_format import CodesFormat
from lowbit_kernels.weight_only.weight_operands import FORMAT_OPERANDS, TensorLayout

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]
"""x, codes, scale, zero_point, bias, ids and global_scale of a product."""


OF_EXPERTS = {
    **FORMAT_OPERANDS,
    "codes": "uint8|codes [E, N, W]; uint8 holds a bit stream of codes",
    **{n: FORMAT_OPERANDS[n].replace("[N", "[E, N") for n in ("scale", "zero_point")},
}
"""The tensors of every format, with a dimension of experts, for declarations."""


class SortedPairs(NamedTuple):
    """Tensors of a product of pairs sorted by expert, where each expert's end at `ends`. `order` has the pairs; None:
    they are sorted as they are. Which rows x has, `of_sorted` of a product says."""

    x: Tensor
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None
    order: Tensor | None
    ends: Tensor
    global_scale: Tensor | None = None


class ExpertOperands(NamedTuple):
    """Operands of one product, as in `expert_linear`. format: of the codes and scales; an implementation declines those
    that it doesn't take."""

    x: TensorLayout
    codes: TensorLayout
    scale: TensorLayout
    zero_point: TensorLayout | None
    bias: TensorLayout | None
    pairs: int
    group_size: int
    gated: bool
    format: CodesFormat
    global_scale: TensorLayout | None = None

    @property
    def group(self) -> int:
        """The group size; 0 where a row has one scale."""
        return 0 if self.scale.shape[2] == 1 else self.group_size

    @property
    def has_aligned_scales(self) -> bool:
        """True if kernels can read scale and zero point without a copy."""
        return self.scale.is_aligned and (self.zero_point is None or self.zero_point.is_aligned)

    @property
    def results(self) -> int:
        """Columns of the result."""
        n = self.codes.shape[1]
        return n // 2 if self.gated else n
