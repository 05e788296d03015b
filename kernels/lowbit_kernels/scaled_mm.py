"""Products of 8-bit operands, both K-contiguous, with their scales and a bias in one pass.

    y[m, n] = a_scale[m] · b_scale[n] · Σ_k a[m, k] b[n, k] + bias[n]

This is the reference in PyTorch operations.
"""

from __future__ import annotations

import collections

import torch
from torch import Tensor

from lowbit_kernels.library import LIBRARY

calls: collections.Counter[str] = collections.Counter()
"""How often each op has run."""


def int8_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a int8 [M, K], b int8 [N, K]: [M, N], from exact int32 sums."""
    return torch.ops.lowbit.int8_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)


def float8_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a, b float8 [M, K] and [N, K]: [M, N], summed in float32."""
    return torch.ops.lowbit.float8_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)


def _int8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    calls["int8_scaled_mm"] += 1
    product = (a.double() @ b.double().t()).float()
    return _scaled(product, a_scale, b_scale, bias, out_dtype)


def _float8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    calls["float8_scaled_mm"] += 1
    return _scaled(a.float() @ b.float().t(), a_scale, b_scale, bias, out_dtype)


def _scaled(
    product: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    y = product * a_scale[:, None] * b_scale[None]
    return (y if bias is None else y + bias.float()).to(out_dtype)


def _fake(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


for _name, _impl in (("int8_scaled_mm", _int8), ("float8_scaled_mm", _float8)):
    LIBRARY.define(
        f"{_name}(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype) -> Tensor"
    )
    LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{_name}", _fake, lib=LIBRARY)
