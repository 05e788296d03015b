"""The products of frozen weights that users call by their names.

torch.compile takes them into a graph whole (`lowbit.linear.frozen.in_graph`), since a weight that is made inside the
graph (`lowbit.layers.frozen`) has no attributes while Python code is traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.linear.frozen.experts import grouped_product
from lowbit.linear.frozen.frozen_linear import any_linear

_is_compiling = torch.compiler.is_dynamo_compiling


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`x` [..., K] times `weight` [N, K] transposed, plus `bias` [N] and `residual` [..., N].

    Returns [..., N] in x's dtype, or in the dtype that a residual of another dtype promotes it to. On a GPU, in
    16 bits, the decode and large-batch kernels of `lowbit_kernels` add the residual before they round: it costs neither
    a launch nor a second rounding. All other products, and those that autograd differentiates, add it afterwards.

        h = lowbit.inference.linear(attended, block.out.weight, residual=h)

    Args:
        x: in the weight's dtype, unless autocast casts it, and on its device.
        weight: frozen in low bits, or plain.
        bias: in x's dtype.
        residual: in any floating dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        RuntimeError: the same with a plain weight, from F.linear. A graph of torch.compile raises an error of
            torch, which quotes these.
    """
    if _is_compiling():
        from lowbit.linear.frozen import in_graph

        return in_graph.linear(x, weight, bias, residual)
    return any_linear(x, weight, bias, residual)


def grouped_linear(x: Tensor, weight: Any, offsets: Tensor) -> Tensor:
    """Each row of x times the weight of its expert, transposed; the rows are sorted by expert. [M, N] in x's dtype.

    Args:
        x: [M, K].
        weight: [E, N, K], quantized or plain.
        offsets: int32 [E], on x's device: expert e takes the rows from offsets[e − 1] (0 for the first) to offsets[e],
            as in `torch._grouped_mm`. Rows after the last offset are zero in the result.

    int4 and int8 weights on a GPU have a kernel, which reads the offsets on the device: it works in a CUDA graph.
    Elsewhere, and where a gradient of x is asked for, experts run one by one, and the host reads the offsets.
    Differentiable in x.

    Raises:
        ValueError: shapes or dtypes that do not fit; offsets that fall, or exceed M (where the host reads them).
    """
    if _is_compiling() and x.is_cuda:  # elsewhere the host reads the offsets
        from lowbit.linear.frozen import in_graph

        return in_graph.grouped_linear(x, weight, offsets)
    return grouped_product(x, weight, offsets)
