"""lowbit's ops as ops of PyTorch, so that a program runs without lowbit.

    program = torch.export.export(model, inputs)
    program = program.run_decompositions(lowbit.formats.decompositions())

`torch.export` keeps an op of lowbit as one node, `torch.ops.lowbit.weight_linear`, which any process that loads the
program must define: `import lowbit` does. These decompositions write the same formulas in aten: the weight stays packed
in the program, and each call unpacks and multiplies it. A compiler fuses the unpacking into one loop.

Weights are rounded to the dtype of x before the product, as in lowbit's path of PyTorch operations. lowbit's CPU kernel
for few tokens does not round them, so in 16 bits the results differ by that rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.blocks import crop
from lowbit.numerics.packing import unpack
from lowbit_kernels.weight_only.codes_format import bits_of, float_scale

_MOST_INT8_ROWS = 20
"""Tokens up to which PyTorch's int8 product is faster than unpacking and a product in the dtype of x. For 1, 24 and 64
tokens and 2048 x 2048 on one core the int8 product took 0.1, 1.1 and 3.0 ms, unpacking and a product 0.6, 1.0 and
1.5 ms."""

_INT8_STEP = 16
"""Elements of a row that the int8 product reads at a time, even beyond the end of the row (torch 2.13.0)."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """A table for `torch.export.ExportedProgram.run_decompositions`: op of lowbit → function of aten ops.

    The table has the ops of weights on a CPU. A program that was traced on a GPU has ops that only lowbit computes.
    """
    ops = torch.ops.lowbit
    return {
        ops.weight_linear.default: _weight_linear,
        ops.dequantize.default: _dequantize,
        ops.table_values.default: _table_values,
        ops.cast.default: _cast,
    }


def _dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    # `lowbit_kernels.weight_only.dequantize.reference` with views and broadcasts, which compilers vectorise, for its
    # gather.
    groups = scale.shape[1]
    bits, count = bits_of(codes.dtype, bits), groups * group_size
    if table:
        codes = _table_values(codes, table, count)
    elif codes.dtype is torch.uint8:
        codes = unpack(codes, bits, count).float() - 2 ** (bits - 1)
    values = codes.unflatten(1, (groups, group_size)).float()
    scales = float_scale(scale, global_scale).unsqueeze(-1)
    if zero_point is None:
        values = values * scales
    elif zero_point.is_floating_point():
        values = (values.double() * scales.double() + zero_point.double().unsqueeze(-1)).float()
    else:
        zeros = zero_point.float().unsqueeze(-1)
        zeros = zeros - 2 ** (bits - 1) if zero_point.dtype is torch.uint8 else zeros
        values = (values - zeros) * scales
    return crop(values.flatten(1).to(dtype), (len(codes), size))


def _weight_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    k = x.shape[-1]
    if _is_plain_int8(x, codes, scale, zero_point):
        rows = torch.ops.aten._weight_int8pack_mm.default(x.reshape(-1, k), codes, scale.view(-1))
        y = rows.view(*x.shape[:-1], codes.shape[0])
        y = y if bias is None else y + bias
    else:
        parts = (codes, scale, zero_point, group_size, k, x.dtype)
        weight = _dequantize(*parts, global_scale, bits, table)
        y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def _is_plain_int8(x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> bool:
    """True if PyTorch has a fast product of such a weight: int8 with a scale for each row, on a CPU, for few tokens.

    A size that may change when the program runs counts as few tokens: such a program decodes.
    """
    tokens = x.numel() // max(1, x.shape[-1])
    if isinstance(tokens, int) and tokens > _MOST_INT8_ROWS:
        return False
    by_row = codes.dtype is torch.int8 and zero_point is None and scale.shape[1] == 1
    alike = scale.dtype is x.dtype and x.dtype in (torch.bfloat16, torch.float16)
    whole = codes.shape[1] == x.shape[-1] and x.shape[-1] % _INT8_STEP == 0
    return by_row and alike and x.is_cpu and whole


def _table_values(packed: Tensor, values: Sequence[float], size: int) -> Tensor:
    bits = len(values).bit_length() - 1
    # not a constant, which a decomposition cannot add to a program
    table = torch.cat([packed.new_full((1,), value, dtype=torch.float32) for value in values])
    codes = unpack(packed, bits, size)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.aten._to_copy.default(x, dtype=dtype)
