"""Replace the weight kernels by their formula in float64, and record the calls: tests see what the library calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit_kernels.weight_only import weight_linear


def unpacked(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.double()
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).double() - 8


def values(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, group: int, k: int
) -> Tensor:
    """float64 [N, K]."""
    at = torch.arange(k) // group
    x = unpacked(codes, bits)[:, :k]
    if zero_point is not None:
        x = x - zero_point.double()[:, at]
    return x * scale.double()[:, at]


class CountedOps:
    """`op` replaces `lowbit_kernels.weight_only.weight_linear`.

    `calls`: "int4" or "int8", M, N, K, group size, and which of bias and residual are given.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def op(
        self,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        group_size: int,
    ) -> Tensor:
        bits = 4 if codes.dtype == torch.uint8 else 8
        weight = values(codes, scale, zero_point, bits, group_size, x.shape[-1])
        extra = [name for name, t in (("bias", bias), ("residual", residual)) if t is not None]
        size = (x.shape[:-1].numel(), *weight.shape)
        self.calls.append((f"int{bits}", *size, group_size, "+".join(extra)))
        y = x.double() @ weight.t()
        for t in (bias, residual):
            y = y if t is None else y + t.double()
        return y.to(x.dtype)


def counted(monkeypatch: pytest.MonkeyPatch) -> CountedOps:
    ops = CountedOps()
    monkeypatch.setattr(weight_linear, "weight_linear", ops.op)
    return ops
