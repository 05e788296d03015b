"""Descriptions of the operands of a product of chosen experts, as `weight_operands` describes those of one weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.weight_only.codes_format import E2M1, CodesFormat
from lowbit_kernels.weight_only.weight_operands import TensorLayout

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]
"""x, codes, scale, zero_point, bias, ids and global_scale of a product."""


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
    def name(self) -> str:
        """The name of the format in the sources of kernels; "" for a format that no kernel takes."""
        own = self.format
        if own.table:
            return "E2M1" if own.bits == 4 and own.table == E2M1 else ""
        if own.exponent:
            return "E4M3" if own.exponent == 4 else ""
        return {(4, -8): "INT4", (8, -128): "INT8"}.get((own.bits, own.low), "")

    @property
    def group(self) -> int:
        """The group size; 0 where a row has one scale."""
        return 0 if self.scale.shape[2] == 1 else self.group_size

    @property
    def has_integer_zeros(self) -> bool:
        """True for no zero points, and for those in int8 on the grid of the codes."""
        return self.zero_point is None or self.zero_point.dtype == torch.int8

    @property
    def results(self) -> int:
        """Columns of the result."""
        n = self.codes.shape[1]
        return n // 2 if self.gated else n

    @property
    def word(self) -> int:
        """Codes in a word that a Triton kernel reads: eight of four bits, or two where rows don't hold whole words."""
        if self.format.bits != 4:
            return 1
        codes = self.codes if self.codes.strides[2] == 1 else self.codes.copied()
        numbers = (codes.misaligned, codes.shape[2], *codes.strides[:2])
        return 8 if all(n % 4 == 0 for n in numbers) else 2
