"""Weights in few bits times activations in 16 bits, by kernels that unpack the codes in registers.

Not for float32, where a converted model has the outputs of the model prepared for QAT, to the bit. In 16 bits the
weights are equal to the bit, but the decode kernel does not round them to 16 bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import lowbit_kernels as kernels
from lowbit.linear.frozen.row import Weight
from lowbit.numerics.granularity import PerGroup, PerRow
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Int
from lowbit_kernels.weight_only.weight_operands import GROUP_STEP, HALVES

GROUP_STEP_OF_TABLES = 16
MOST_TABLE_BITS = 4


def has_weight_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """For a weight [..., N, K]: signed integers of 4 or 8 bits, with integer zero points or none; on GPUs also other
    integers, float8, and tables of up to 16 numbers."""
    return has_int_kernel(x, weight) or (x.is_cuda and _has_gpu_kernel(x, weight))


def has_int_kernel(x: Tensor, weight: Weight) -> bool:
    """For a weight [..., N, K] in signed integers of 4 or 8 bits, with integer zero points or none."""
    if x.dtype not in HALVES or x.device.type not in ("cpu", "cuda"):
        return False
    if weight.stored_as != "integers" or weight.transposed:
        return False
    spec = weight.spec
    if spec.format not in (Int(4), Int(8)) or spec.zero_point_is_value:
        return False
    if isinstance(spec.granularity, PerGroup):
        return spec.granularity.group_size % GROUP_STEP == 0
    return isinstance(spec.granularity, PerRow)


def _has_gpu_kernel(x: Tensor, weight: Weight) -> bool:
    """For the formats of `lowbit_kernels.weight_only.codes_format`, on a GPU."""
    if x.dtype not in HALVES or weight.transposed:
        return False
    format, granularity = weight.spec.format, weight.spec.granularity
    if isinstance(format, LookupTable):
        if weight.stored_as != "table" or format.bits > MOST_TABLE_BITS:
            return False
    elif weight.stored_as not in ("integers", "float8") or (
        format.bits == 8 and weight.activation is not None
    ):
        return False  # 8 bits by 8 bits are faster
    elif isinstance(format, Int) and not (format.signed or weight.spec.has_zero_point):
        return False  # the kernels' unsigned codes have zero points
    if isinstance(granularity, PerGroup):
        return granularity.group_size % GROUP_STEP_OF_TABLES == 0
    return isinstance(granularity, PerRow)


def weight_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """A kernel unpacks the codes in registers. The activation is rounded before, if the scheme quantizes it."""
    if weight.activation is not None:
        x = weight.rounded_input(x)
    scale, format = _scale_and_format(weight)
    tensors = (x, weight.codes, scale, weight.zero_point, bias, residual)
    return kernels.weight_linear.weight_linear(
        *tensors, group_size=group_size_of(x, weight), **format
    )


def _scale_and_format(weight: Weight) -> tuple[Tensor, dict[str, Any]]:
    """The scales as the kernels read them, and the arguments for formats other than int4 and int8."""
    format = weight.spec.format
    if isinstance(format, LookupTable):
        scales = weight.spec.scales
        scale = weight.scale if scales is None or scales.is_byte else weight.scale_values()
        found = {"bits": format.bits, "table": format.values}
        if weight.global_scale is not None:
            found["global_scale"] = weight.global_scale
        return scale, found
    if isinstance(format, Int) and format not in (Int(4), Int(8)):
        return weight.scale, {"bits": format.bits}
    return weight.scale, {}


def group_size_of(x: Tensor, weight: Weight) -> int:
    """Elements of a row that share a scale."""
    granularity = weight.spec.granularity
    return granularity.group_size if type(granularity) is PerGroup else max(x.shape[-1], 1)
