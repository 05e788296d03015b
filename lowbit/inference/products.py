"""Linears as functions: with the residual in the kernel, and over experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit import tracer
from lowbit.inference.weight_only import group_size_of, is_served
from lowbit.products import check_residual, quantized_linear
from lowbit.tensor import kernels
from lowbit.tensor.affine_tensor import AffineTensor


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x [..., K] by weight [N, K] transposed, plus bias [N] and residual [..., N]: [..., N] in x's dtype, or in what a
    residual of another dtype promotes it to.

    Of a plain weight the residual is a sum of its own; kernels of quantized weights add it before they round, so that
    it costs neither a launch nor a second rounding.

        h = lowbit.inference.linear(attended, block.out.weight, residual=h)

    Raises:
        ValueError: shapes or dtypes that do not fit; RuntimeError: those of a plain weight, as F.linear does.
    """
    if isinstance(weight, AffineTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return quantized_linear(x, weight, bias, residual)
    check_residual(x, weight, residual)
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each row of x by the weight of its expert, the rows sorted by expert: [M, N] in x's dtype.

    Args:
        x: [M, K].
        weight: [E, N, K], quantized or plain.
        offsets: int32 [E], on x's device: expert e takes the rows offsets[e − 1] to offsets[e], the first from 0, as
            `torch._grouped_mm` has them. Rows after the last are zero in the result.

    int4 and int8 weights on a GPU have a kernel, which reads the offsets there: it works in a CUDA graph. Elsewhere,
    and where a gradient of x is asked for, experts run one by one and the offsets are read by the host.
    Differentiable in x.

    Raises:
        ValueError: shapes or dtypes that do not fit; offsets that fall, or pass M (where the host reads them).
    """
    _check_grouped(x, weight, offsets)
    if isinstance(weight, AffineTensor) and _has_grouped_kernel(x, weight):
        with tracer.running(x, weight, "grouped_linear"):
            return kernels.grouped_linear(
                *(x, weight.codes, weight.scale, weight.zero_point, offsets),
                group_size=group_size_of(weight),
            )
    ends = offsets.tolist()
    bounds = list(zip([0, *ends], [*ends, x.shape[0]], strict=True))
    if any(not 0 <= start <= end <= x.shape[0] for start, end in bounds):
        raise ValueError(f"offsets {ends} must rise and end within the {x.shape[0]} rows of x")
    parts = [
        F.linear(x[start:end], weight[expert]) for expert, (start, end) in enumerate(bounds[:-1])
    ]
    rest = x.new_zeros(x.shape[0] - ends[-1] if ends else x.shape[0], weight.shape[1])
    return torch.cat([*parts, rest])


def _has_grouped_kernel(x: Tensor, weight: AffineTensor) -> bool:
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if weight.activation is not None or not x.is_cuda or needs_grad:
        return False
    return any(is_served(weight, x.dtype, bits) for bits in (4, 8))


def _check_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"grouped_linear takes x [M, K] and weight [E, N, K], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"grouped_linear of a {x.dtype} input with a weight of dtype {weight.dtype}: convert one"
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (weight.shape[0],):
        raise ValueError(
            f"offsets must be int32 [{weight.shape[0]}], got {offsets.dtype} {tuple(offsets.shape)}"
        )
