"""Stands in for the CUDA kernel of this name, and takes nothing."""

from __future__ import annotations

from torch import Tensor


def is_available(x: Tensor, codes: Tensor, scale: Tensor, *, bits: int, group_size: int) -> bool:
    """Whether `few_tokens_mm` takes these operands."""
    return False


def few_tokens_mm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    token_scale: Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> Tensor:
    """The product of `lowbit_kernels.weight_linear`, of operands for which `is_available` holds."""
    raise RuntimeError("this GPU has no such kernel; is_available says so")
