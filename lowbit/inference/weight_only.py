"""Linears of int4 and int8 weights whose activation stays as it is, in the kernels of `lowbit_kernels`.

They serve bfloat16 and float16 on a GPU and on a CPU. float32 stays with `plain_linear`: there a converted model
computes what the one prepared for QAT did, to the bit. In 16 bits the weights are equal to the bit all the same, and
products differ by rounding: the decode kernel does not round the weight to 16 bits, as plain products do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.granularity import PerGroup, PerRow
from lowbit.products import register_linear
from lowbit.scheme import Int
from lowbit.tensor import kernels
from lowbit.tensor.affine_tensor import AffineTensor
from lowbit.tensor.base import LowbitTensor

GROUP_STEP = 32
"""The kernels take groups of a multiple of it, or one scale a row."""


def is_served(weight: LowbitTensor, dtype: torch.dtype, bits: int) -> bool:
    """Whether the kernels take this weight [..., N, K] with activations of `dtype`; metadata alone decides."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if type(weight) is not AffineTensor or weight.transposed:
        return False
    spec, codes = weight.spec, weight.codes
    fmt, granularity = spec.format, spec.granularity
    if not isinstance(fmt, Int) or fmt.bits != bits or not fmt.signed:
        return False
    if spec.mapping == "float_zero_point":
        return False
    if not (codes.is_cuda or codes.is_cpu):
        return False
    if isinstance(granularity, PerGroup):
        return granularity.group_size % GROUP_STEP == 0
    return isinstance(granularity, PerRow)


def group_size_of(weight: AffineTensor) -> int:
    """Elements of a row that share a scale."""
    granularity = weight.spec.granularity
    if isinstance(granularity, PerGroup):
        return granularity.group_size
    return max(weight.shape[-1], 1)


@register_linear(lambda x, weight, bias: is_served(weight, x.dtype, 4), takes_residual=True)
def int4_linear(
    x: Tensor, weight: AffineTensor, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """int4 weights, unpacked in registers; an activation that the scheme quantizes is rounded to its grid before."""
    if weight.activation is not None:
        x = weight.activation.fake_quantize(x)
    return kernels.weight_linear(
        *(x, weight.codes, weight.scale, weight.zero_point, bias, residual),
        group_size=group_size_of(weight),
    )


def _is_int8_weight_only(x: Tensor, weight: LowbitTensor, bias: Tensor | None) -> bool:
    """Without a quantized activation, whose products lowbit.inference.dynamic has."""
    return is_served(weight, x.dtype, 8) and weight.activation is None  # type: ignore[attr-defined]


@register_linear(_is_int8_weight_only, takes_residual=True)
def int8_linear(
    x: Tensor, weight: AffineTensor, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """int8 weights."""
    return kernels.weight_linear(
        *(x, weight.codes, weight.scale, weight.zero_point, bias, residual),
        group_size=group_size_of(weight),
    )
