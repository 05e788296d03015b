"""Activations in 8 bits: int8 by int8 or int4 and float8 by float8 or FP4 weights, with dynamic and static scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import lowbit_kernels as kernels
from lowbit.linear.frozen.checks import unflattened
from lowbit.linear.frozen.row import Weight, op_matrix
from lowbit.linear.frozen.weight_only import group_size_of, has_int_kernel
from lowbit.numerics.granularity import (
    PerBlock,
    PerGroup,
    PerRow,
    PerToken,
)
from lowbit.numerics.lookup_table import E2M1
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.scale_format import E4M3, E8M0
from lowbit.tracing import tracer
from lowbit_kernels.weight_only.weight_operands import HALVES


def is_rowwise(weight: Weight, format: Int | Float8) -> bool:
    """One symmetric scale a row of the weight and a token of the activation, both in `format`."""
    spec, activation = weight.spec, weight.activation
    return (
        weight.stored_as in ("integers", "float8")
        and activation is not None
        and not weight.transposed
        and weight.zero_point is None
        and spec.scales is activation.scales is None
        and isinstance(spec.granularity, PerRow)
        and isinstance(activation.granularity, PerToken)
        and activation.mapping.startswith("symmetric")
        and spec.format == activation.format == format
    )


def has_dynamic_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return x.is_cuda and (_fits_int8_kernel(x, weight) or _fits_float8_kernel(x, weight))


def _fits_int8_kernel(x: Tensor, weight: Weight) -> bool:
    return (
        x.dtype in HALVES
        and is_rowwise(weight, Int(8))
        and weight.activation.mapping == "symmetric_no_clipping_err"  # the kernel's own
        and 0 < weight.shape[1] <= kernels.dynamic_linear.MOST_K
    )


def _fits_float8_kernel(x: Tensor, weight: Weight) -> bool:
    return (
        x.dtype is torch.bfloat16  # the output dtype of row-wise _scaled_mm
        and is_rowwise(weight, Float8())
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
        and x.numel() > 0
        and 0 not in weight.shape  # of a weight that is only described, too
    )


def has_int4_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """For symmetric int8 tokens and int4 weights in groups, with integer zero points or none, on a GPU."""
    activation = weight.activation
    return (
        x.is_cuda
        and activation is not None
        and has_int_kernel(x, weight)
        and weight.spec.format == Int(4)
        and activation.format == Int(8)
        and isinstance(activation.granularity, PerToken)
        and activation.mapping == "symmetric_no_clipping_err"  # the kernel's own
        and 0 < weight.shape[1] <= kernels.dynamic_linear.MOST_K
    )


def dynamic_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """int8 by int8 or float8 by float8 on a GPU. The op quantizes the tokens; scales, bias and residual are fused."""
    tracer.multiplies_in(kernels.dynamic_linear.FORMATS[weight.codes.dtype])
    codes, scale = weight.codes, weight.scale
    return kernels.dynamic_linear.dynamic_linear(x, codes, scale, bias, residual)


def int4_dynamic_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """int8 by int4 on a GPU, as `dynamic_linear`."""
    tracer.multiplies_in("int8")
    return kernels.dynamic_linear.dynamic_linear(
        x,
        weight.codes,
        weight.scale,
        bias,
        residual,
        zero_point=weight.zero_point,
        group_size=group_size_of(x, weight),
    )


def has_e2m1_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """For float8 tokens and MXFP4 or NVFP4 weights, on a GPU that has the units for float8."""
    spec, activation = weight.spec, weight.activation
    return (
        x.is_cuda
        and x.dtype in HALVES
        and activation is not None
        and spec.format == E2M1
        and isinstance(spec.scales, E8M0 | E4M3)
        and activation.format == Float8()
        and isinstance(activation.granularity, PerToken)
        and not activation.static
        and activation.mapping.startswith("symmetric")
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
        and op_matrix(weight, x.dtype) is not None
    )


def e2m1_dynamic_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """float8 by MXFP4 or NVFP4 on a GPU, as `dynamic_linear`."""
    tracer.multiplies_in("e4m3")
    found = op_matrix(weight, x.dtype)
    assert found is not None
    return kernels.dynamic_linear.dynamic_linear(
        x,
        found["codes"],
        found["scale"],
        bias,
        residual,
        group_size=found["group_size"],
        global_scale=found["global_scale"],
    )


_BLOCK = 128
_MAPPINGS = {"float": "symmetric", "e8m0": "symmetric_no_clipping_err"}
"""The mapping of inputs that `quantize_blocks` has, by the format of their scales."""


def has_block_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """e4m3 weights with a scale for each 128 x 128, and inputs with one for each 128, or a power of two."""
    activation = weight.activation
    return (
        weight.stored_as == "float8"
        and activation is not None
        and not weight.transposed
        and weight.spec.format == activation.format == Float8()
        and activation.mapping == _MAPPINGS.get(activation.scale_format)
        and weight.spec.granularity == PerBlock(_BLOCK, _BLOCK)
        and activation.granularity == PerGroup(_BLOCK)
        and x.dtype is not torch.float64
        and kernels.block_scaled_mm.runs_on(x.device)
    )


def block_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """float8 by float8 in blocks: x is quantized in groups of 128, and the sum of each is scaled in float32."""
    tracer.multiplies_in("e4m3")
    k = x.shape[-1]
    codes, scale, _, _ = kernels.quantize_blocks.quantize_blocks(
        x.reshape(math.prod(x.shape[:-1]), k),
        tiles=False,
        columns=False,
        power_of_two=weight.activation.scales is not None,
    )
    own = weight.codes[: weight.shape[0]]  # without the rows of padding
    y = kernels.block_scaled_mm.block_scaled_mm(
        codes, own, scale, weight.scale_values().float(), bias=bias, out_dtype=x.dtype
    )
    return unflattened(y, x)


_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Formats of operands, as traces name them."""


def has_static_scale(weight: Weight) -> bool:
    """One symmetric scale a row of the weight, and one for all inputs, whose integer zero point may be any."""
    spec, activation = weight.spec, weight.activation
    return (
        activation is not None
        and activation.static
        and weight.stored_as in ("integers", "float8")
        and not weight.transposed
        and weight.zero_point is None
        and spec.scales is None
        and isinstance(spec.granularity, PerRow)
        and not activation.zero_point_is_value
    )


def has_static_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """On a GPU, for symmetric inputs. float8 as `scaled_mm` multiplies it, on a GPU that has the units."""
    if not x.is_cuda or not has_static_scale(weight) or weight.activation.has_zero_point:
        return False
    n, k = weight.shape
    formats = weight.activation.format.dtype, weight.spec.format.dtype
    fits = formats in kernels.scaled_mm.OPERANDS and x.dtype is not torch.float64
    if k % 16 or 0 in (x.numel(), n) or not fits:
        return False
    if weight.spec.format.dtype is torch.int8:
        return weight.spec.format == Int(8) and k <= kernels.dynamic_linear.MOST_K
    return n % 16 == 0 and torch.cuda.get_device_capability(x.device) >= (8, 9)


def scale_of_rows(x: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
    """The static scale [1, 1] of x [M, K] for a product of integer codes: [M, 1], and NaN for a row that holds a NaN,
    which these codes cannot express. float8 codes keep NaN, and their scale stays [1, 1]."""
    if codes.dtype.is_floating_point:
        return scale
    largest = x.detach().amax(1, keepdim=True)  # NaN where one value is
    return torch.where(largest.isnan(), torch.nan, scale)


def static_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """int8 by int8 or float8 by float8 on a GPU, by the kernel of the dynamic schemes."""
    rows = x.reshape(-1, x.shape[-1])
    codes, scale, _ = weight.quantized_input(rows)
    tracer.multiplies_in(_NAMES[codes.dtype])
    y = kernels.scaled_mm.scaled_mm(
        codes,
        weight.codes,
        scale_of_rows(rows, scale, codes).view(-1),
        weight.scale.float().flatten(),
        bias=bias,
        out_dtype=x.dtype,
    )
    return unflattened(y, x)


def can_static_int_mm(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    if not has_static_scale(weight) or weight.spec.format != Int(8):
        return False
    fmt = weight.activation.format
    if not isinstance(fmt, Int) or not fmt.signed:
        return False
    terms = 2 if weight.activation.has_zero_point else 1  # sums of both must fit in int32
    return _fits_int_mm(x, weight, kernels.dynamic_linear.MOST_K // terms)


def int8_static_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """int8 by int8 in torch._int_mm. A zero point z takes z times the sum of a row of the weight from each product."""
    rows = x.reshape(-1, x.shape[-1])
    codes, scale, zero_point = weight.quantized_input(rows)
    tracer.multiplies_in("int8")
    sums = kernels.scaled_mm.int8_sums(codes, weight.codes)
    if zero_point is not None:
        sums = sums - zero_point.int() * weight.codes.sum(1, dtype=torch.int32)
    y = scaled_sums(sums, scale_of_rows(rows, scale, codes), weight.scale, bias, x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[1])


def can_int_mm(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return is_rowwise(weight, Int(8)) and _fits_int_mm(x, weight, kernels.dynamic_linear.MOST_K)


def _fits_int_mm(x: Tensor, weight: Weight, most_k: int) -> bool:
    n, k = weight.shape
    tokens = x.numel() // max(k, 1)
    if k > most_k or 0 in (tokens, n, k):
        return False
    if x.is_cuda:  # as torch._int_mm takes it
        return tokens > 16 and n % 8 == 0 and k % 8 == 0
    return x.is_cpu


def int8_dynamic_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """int8 by int8 in torch._int_mm: exact int32 sums, then token scale times row scale in float32."""
    codes, token_scale, _ = weight.activation.quantize(x.reshape(-1, x.shape[-1]))
    tracer.multiplies_in("int8")
    sums = kernels.scaled_mm.int8_sums(codes, weight.codes)
    y = scaled_sums(sums, token_scale, weight.scale, bias, x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[1])


def scaled_sums(
    sums: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of x from its int32 sums [M, N]; `scale`: of x, [M, 1] or [1, 1]; `weight_scale`: [N, 1]."""
    # Multiply by the weight's scale first: that of x may be huge, and the sum could overflow on the way.
    y = sums.float() * weight_scale.float().t() * scale
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype)
