"""The first half of a feed-forward layer: gate and up, weights of 1 to 8 bits, in one product with the activation.

    g[m, j] = f[m] * sum_k x[m, k] * weight[j, k]
    u[m, j] = f[m] * sum_k x[m, k] * weight[F + j, k]
    out[m, j] = activation(g[m, j]) * u[m, j]
    f[m] = 1, or 1 / sqrt(mean(x[m]²) + eps) where `normed`, the RMS norm of x; its weight is in the columns of `weight`

    x            bfloat16, float16 or float32 [..., K]
    weight       [2 F, K], the rows of the gate and then those of up: `codes`, `scale`, `zero_point`, `global_scale`,
                 `group_size`, `bits` and `table`, as in `weight_linear`
    activation   "silu", or "gelu_tanh", gelu's approximation by tanh
    out          x's dtype [..., F], contiguous

Implementations, as `launches` reports them:

    decode       weight_mm_decode_sm90, where F is a multiple of 8, up to `MOST_TOKENS` tokens, one with `normed`; g and
                 u are not rounded
    composed     `weight_linear` and `gated_activation`, which round g / f and u / f to x's dtype
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from lowbit_kernels.decoding.gated_activation import ACTIVATIONS as ACTIVATIONS  # a rule names it
from lowbit_kernels.decoding.gated_activation import gated_activation
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only import weight_mm_decode_sm90
from lowbit_kernels.weight_only.codes_format import dequantized, format_of
from lowbit_kernels.weight_only.weight_linear import weight_linear
from lowbit_kernels.weight_only.weight_operands import (
    FORMAT_OPERANDS,
    FORMAT_RULES,
    K_RULE,
    Description,
    Gate,
    Product,
    WeightOperands,
    all_described,
    all_layouts,
)

MOST_TOKENS = 8
"""For 16 tokens, the product and then the activation took less time than both in one launch."""


@op(
    "empty(x.dtype, *x.shape[:-1], N // 2)",
    flops="2 * x.numel() * N",
    x="float [..., K]",
    **FORMAT_OPERANDS,
    rules={
        **FORMAT_RULES,
        **K_RULE,
        "N % 2 == 0": "codes have as many rows for the gate as for up, got {N} rows",
        "activation in ACTIVATIONS": "activation must be one of {ACTIVATIONS}, got {activation}",
    },
)
def gated_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    group_size: int,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
    activation: str = "silu",
    normed: bool = False,
    eps: float = 0.0,
) -> Tensor:
    """activation(gate) · up of x, in x's dtype; see the module's docstring."""
    parts = (codes, scale, zero_point, group_size, x.shape[-1], torch.float64)
    own = x.double()
    both = own @ dequantized(*parts, global_scale, bits, table).T
    if normed:
        both = both * (own.square().mean(-1, keepdim=True) + eps).rsqrt()
    gate, up = both.chunk(2, -1)
    return gated_activation.reference(gate, up, None, activation, 0.0).to(x.dtype)


reference = gated_linear.reference


@functools.lru_cache(maxsize=4096)
def planned(
    tensors: tuple[Description | None, ...],
    group_size: int,
    bits: int,
    table: tuple[float, ...],
    activation: str,
    eps: float | None,
) -> Product | None:
    """The product by the decode kernel; None if it does not take the operands.

    Args:
        tensors: x, codes, scale, zero_point and global_scale, as `all_described` describes them.
        group_size, bits, table, activation: as the op takes them.
        eps: of the norm; None without `normed`.
    """
    x, codes, scale, zero_point, global_scale = all_layouts(tensors)
    rows = x.rows()
    m = prod(x.shape[:-1])
    if rows is None or not 1 <= m <= MOST_TOKENS:
        return None
    zeros = None if zero_point is None else zero_point.dtype
    format = format_of(codes.dtype, scale.dtype, zeros, bits, table)
    parts = (rows, codes, scale, zero_point, None, None, None, group_size, x.dtype, format)
    gate = Gate(activation, eps)
    return weight_mm_decode_sm90.product(WeightOperands(*parts, global_scale, gate=gate))


@gated_linear.kernel
def run(
    x, codes, scale, zero_point, group_size, global_scale, bits, table, activation, normed, eps
) -> Tensor | None:
    """One launch where the decode kernel takes the operands; else the product and then the activation."""
    tensors = x, codes, scale, zero_point, global_scale
    how = activation, eps if normed else None
    product = None
    if x.device.type == "cuda" and x.numel() and len(codes):
        product = planned(all_described(*tensors), group_size, bits, tuple(table), *how)
    if product is not None:
        ran("gated_linear", "decode")
        operands = (x.reshape(-1, x.shape[-1]), codes, scale, zero_point, None, None, None)
        return product((*operands, global_scale)).view(*x.shape[:-1], len(codes) // 2)
    ran("gated_linear", "composed")
    x = x.contiguous()  # a copy has to be older than the product
    parts = {"group_size": group_size, "global_scale": global_scale, "bits": bits, "table": table}
    gate, up = weight_linear(x, codes, scale, zero_point, **parts).chunk(2, -1)
    return gated_activation(gate, up, x if normed else None, activation=activation, eps=eps)
