"""The gradient of the input of ``weight_linear``, for adapters over a frozen weight.

    out[..., k] = sum_n grad[..., n] * weight[n, k]

    grad    bfloat16, float16 or float32 [..., N]
    out     grad's dtype [..., K], contiguous; K (``size``) leaves out the padding of rows
    codes, scale, zero_point, group_size, global_scale, bits, table   the weight, as in `codes_format`

The weight is rounded once to grad's dtype; sums are float32.

On a GPU, cuBLAS multiplies by what `dequantize_triton` decodes into the same memory, as `weight_mm_dequantized` does: a
weight of up to 128 MiB as a whole, and of a larger one a chunk of whole groups of columns at a time. So each element of
the result is one sum, which is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import runs_on
from lowbit_kernels.weight_only import weight_mm_dequantized
from lowbit_kernels.weight_only.codes_format import dequantized, format_of
from lowbit_kernels.weight_only.dequantize_triton import CYCLE
from lowbit_kernels.weight_only.weight_operands import FORMAT_OPERANDS, FORMAT_RULES, SIZE_RULE

COLUMNS_OF_A_TILE = 256


@op(
    "empty(grad.dtype, *grad.shape[:-1], size)",
    flops="2 * grad.numel() * size",
    grad="float [..., N]",
    **FORMAT_OPERANDS,
    rules={**FORMAT_RULES, **SIZE_RULE},
)
def input_gradient(
    grad: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    group_size: int,
    size: int,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    """grad times a weight in few bits; see the module's docstring."""
    parts = (codes, scale, zero_point, group_size, size, torch.float64)
    return (grad.double() @ dequantized(*parts, global_scale, bits, table)).to(grad.dtype)


reference = input_gradient.reference


def columns_of_chunk(n: int, k: int, itemsize: int, step: int) -> int:
    """Columns of a chunk of a weight [N, K]: all, or a multiple of `step` and of whole tiles that divides them evenly
    and fits `MOST_BYTES`, if there is one."""
    most, step = weight_mm_dequantized.MOST_BYTES, math.lcm(step, COLUMNS_OF_A_TILE)
    chunks = -(-n * k * itemsize // most)
    if chunks <= 1:
        return k
    even, fitting = -(-k // chunks // step) * step, most // (n * itemsize * step) * step
    return min(k, max(step, min(even, fitting)))


@input_gradient.kernel
def _launch(
    grad, codes, scale, zero_point, group_size, size, global_scale=None, bits=0, table=()
) -> Tensor | None:
    if not grad.is_cuda or not runs_on(grad.device):
        return None
    ran("input_gradient", "dequantize")
    parts = (codes, scale, zero_point, group_size, size, global_scale, bits, table)
    return in_chunks(grad, *parts)


def in_chunks(
    grad: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    global_scale: Tensor | None,
    bits: int,
    table: Sequence[float],
) -> Tensor:
    """The op on any device, by products with chunks of columns of the weight.

    Args: those of `input_gradient`.
    """
    zeros = None if zero_point is None else zero_point.dtype
    format = format_of(codes.dtype, scale.dtype, zeros, bits, tuple(table))
    (n, groups), rows = scale.shape, grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
    out = grad.new_empty((len(rows), size))
    step = math.lcm(CYCLE, group_size) if groups > 1 else CYCLE
    columns = columns_of_chunk(n, size, grad.element_size(), step)
    memory = grad.new_empty(n * columns)
    for first in range(0, size, max(columns, 1)):
        last = min(first + columns, size)
        weight = memory[: n * (last - first)].view(n, last - first)
        end = -(-last * format.bits // 8) if last < size else codes.shape[1]
        of_groups = slice(first // group_size, -(-last // group_size))
        of_zeros = None if zero_point is None else zero_point[:, of_groups]
        own = codes[:, first * format.bits // 8 : end], scale[:, of_groups], of_zeros
        weight_mm_dequantized.write_values(weight, *own, group_size, format, global_scale)
        torch.mm(rows, weight, out=out[:, first:last])  # autocast leaves products with `out` alone
    return out.view(*grad.shape[:-1], size)
