"""int8 tokens by ternary weights."""

from __future__ import annotations

import torch
from torch import Tensor

import lowbit_kernels as kernels
from lowbit.linear.frozen.checks import unflattened
from lowbit.linear.frozen.row import Weight
from lowbit.numerics.straight_through import StraightThrough
from lowbit.tracing import tracer


def is_ternary(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    fits = weight.stored_as == "ternary" and not weight.transposed
    return fits and x.numel() > 0 and weight.numel() > 0


def ternary_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """int8 tokens by ternary codes, as in training (`lowbit.tensor.trained.bitnet`)."""
    codes, scale = quantize_tokens(x.reshape(-1, x.shape[-1]))
    out = torch.float32 if x.dtype is torch.float64 else x.dtype
    bias = None if bias is None else bias.to(out)
    tracer.multiplies_in("int8")
    y = kernels.ternary_mm.ternary_mm(codes, weight.codes, scale, weight.scale.view(1), bias, out)
    return unflattened(y.to(x.dtype), x)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [M, K16] and scale [M] of x [M, K], K16 being K rounded up to a multiple of 16."""
    x = x.float() if x.dtype is torch.float64 else x
    codes, scale, _, _ = kernels.quantize_rowcol.quantize_rowcol(x, "int8", columns=False)
    return codes, scale


def rounded_tokens(x: Tensor) -> Tensor:
    """x [..., K] as `quantize_tokens` rounds it, with the gradient of the identity."""
    rows = x.reshape(-1, x.shape[-1])
    with torch.no_grad():
        codes, scale = quantize_tokens(rows)
        values = (codes[:, : rows.shape[1]] * scale[:, None]).to(x.dtype)
    return StraightThrough.apply(rows, values).view(x.shape)
