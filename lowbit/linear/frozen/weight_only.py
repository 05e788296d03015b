"""Weights in few bits times activations in 16 bits, by kernels that unpack the codes.

Not for float32, where a converted model has the outputs of the model prepared for QAT, to the bit, while gradients are
enabled. In 16 bits the weights are equal to the bit, but the decode kernel does not round them to 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.frozen.row import Weight, decoded, op_matrix
from lowbit.numerics.granularity import PerGroup, PerRow
from lowbit.numerics.number_format import Int
from lowbit_kernels.weight_only.weight_operands import GROUP_STEP, HALVES

_FORMATS = (Int(4), Int(8))
MANY_TOKENS = 4096
"""Up to that number `lowbit_kernels` has kernels that are faster than decoding the weight first."""
_dispatch_modes = torch._C._len_torch_dispatch_stack
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


def has_int_kernel(x: Tensor, weight: Weight, bias: Tensor | None = None) -> bool:
    """For a weight [..., N, K] in signed integers of 4 or 8 bits, with integer zero points or none."""
    if x.dtype not in HALVES or x.device.type not in ("cpu", "cuda"):
        return False
    if weight.stored_as != "integers" or weight.transposed:
        return False
    spec = weight.spec
    if spec.format not in _FORMATS or spec.zero_point_is_value:
        return False
    if spec.format.bits == 8 and weight.activation is not None:
        return False  # int8 by int8 is faster
    if isinstance(spec.granularity, PerGroup):
        return spec.granularity.group_size % GROUP_STEP == 0
    return isinstance(spec.granularity, PerRow)


def has_matrix_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """For a matrix in any format on a GPU."""
    if not x.is_cuda or x.dtype not in HALVES or weight.transposed:
        return False
    is_eight_bits = weight.spec.format.bits == 8 and weight.spec.scales is None
    if is_eight_bits and weight.activation is not None:
        return False  # 8 bits by 8 bits is faster
    return op_matrix(weight, x.dtype) is not None


def weight_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """A kernel unpacks the codes. The activation is rounded before, if the scheme quantizes it."""
    if x.is_cpu and residual is None and not torch.is_grad_enabled():
        # the same kernel without the op, which costs the host more than a small product
        rounded = x if weight.activation is None else weight.rounded_input(x)
        y: Tensor | None = weight.product_on_cpu(rounded, bias, True)
        if y is not None:
            return y
    return linear_by_op(x, weight, bias, residual)


def linear_by_op(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """The same by the op."""
    if weight.activation is not None:
        x = weight.rounded_input(x)
    if residual is None and (values := decoded_for(x, weight)) is not None:
        return F.linear(x, values, bias)
    tensors = (x, weight.codes, weight.scale, weight.zero_point, bias, residual)
    return kernels.weight_linear.weight_linear(*tensors, group_size=group_size_of(x, weight))


def matrix_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """`weight_linear` for codes in any format."""
    if weight.activation is not None:
        x = weight.rounded_input(x)
    if residual is None and (values := decoded_for(x, weight)) is not None:
        return F.linear(x, values, bias)
    found = op_matrix(weight, x.dtype)
    assert found is not None
    return kernels.weight_linear.weight_linear(x, bias=bias, residual=residual, **found)


def decoded_for(x: Tensor, weight: Weight) -> Tensor | None:
    """The values of a matrix for an eager product with very many tokens; None for other products.

    The op decodes the weight too, and then multiplies. But it takes the scales of double quantization decoded, by
    several operations of PyTorch, which cost the host more than the product of such a layer leaves it.
    """
    if not x.is_cuda or x.numel() <= MANY_TOKENS * x.shape[-1]:
        return None
    with _PlainAttributes():
        return None if _dispatch_modes() else decoded(weight, x.dtype)


def group_size_of(x: Tensor, weight: Weight) -> int:
    """Elements of a row that share a scale."""
    granularity = weight.spec.granularity
    return granularity.group_size if type(granularity) is PerGroup else max(x.shape[-1], 1)
