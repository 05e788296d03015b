"""The product of frozen experts, each with its own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.frozen.weight_only import group_size_of, has_int_kernel
from lowbit.tracing import tracer


def grouped_product(x: Tensor, weight: Any, offsets: Tensor) -> Tensor:
    """`lowbit.inference.grouped_linear` in eager code."""
    _check_grouped(x, weight, offsets)
    if _has_grouped_kernel(x, weight):
        codes, group_size = weight.codes, group_size_of(x, weight)
        tensors = (x, codes, weight.scale, weight.zero_point, offsets)
        with tracer.running(x, weight, "grouped_linear"):
            return kernels.grouped_linear.grouped_linear(*tensors, group_size=group_size)
    return _one_by_one(x, weight, offsets)


def _has_grouped_kernel(x: Tensor, weight: Any) -> bool:
    if not x.is_cuda or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if getattr(weight, "stored_as", None) is None or weight.activation is not None:
        return False
    return has_int_kernel(x, weight)


def _one_by_one(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    bounds = list(zip([0, *ends], [*ends, x.shape[0]], strict=True))
    if any(not 0 <= start <= end <= x.shape[0] for start, end in bounds):
        raise ValueError(f"offsets {ends} must rise and end within the {x.shape[0]} rows of x")
    parts = [
        F.linear(x[start:end], weight[expert]) for expert, (start, end) in enumerate(bounds[:-1])
    ]
    rest = x.new_zeros(x.shape[0] - ends[-1] if ends else x.shape[0], weight.shape[1])
    return torch.cat([*parts, rest])


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
