"""Products with a dequantized weight of 1 to 8 bits, a chunk of its rows at a time in the same memory.

A large weight is never dequantized as a whole. On GPUs a chunk has up to 128 MiB, and torch.mm writes its columns of
the result in place. Smaller chunks, which stay in the L2 cache, are slower there: their products fill the
multiprocessors less evenly (H200, 14336 x 4096 in NF4: five chunks take 0.97 to 1.32 times as long as one, from 128 to
8,192 tokens). On CPUs `weight_mm_tiles_cpu` multiplies tiles that are still in the cache.

The weight is rounded once to the dtype of the product. On CPUs that is float32, without that rounding, for float16, and
for up to 8 tokens, where it costs nothing.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.runtime.triton_runtime import runs_on
from lowbit_kernels.weight_only import weight_mm_tiles_cpu
from lowbit_kernels.weight_only.codes_format import CodesFormat
from lowbit_kernels.weight_only.dequantize import fill, values_on_cpu
from lowbit_kernels.weight_only.dequantize_cpu import TILE, rows_in_tiles
from lowbit_kernels.weight_only.weight_operands import Product, Tensors, WeightOperands

MOST_BYTES = 2**27
"""Bytes of a chunk on a GPU."""
ROWS_OF_A_TILE = 256
MOST_TOKENS_IN_FLOAT32 = 8  # of bfloat16, on CPUs


def rows_of_chunk(n: int, k: int, itemsize: int) -> int:
    """Rows of a chunk on a GPU: all, or a number of whole tiles that divides them evenly and fits `MOST_BYTES`."""
    chunks = -(-n * k * itemsize // MOST_BYTES)
    if chunks <= 1:
        return n
    most = max(1, MOST_BYTES // (k * itemsize * ROWS_OF_A_TILE)) * ROWS_OF_A_TILE
    return min(most, -(-n // chunks // ROWS_OF_A_TILE) * ROWS_OF_A_TILE)


def product(operands: WeightOperands) -> Product | None:
    """The product of any operands on any device; None with a token_scale."""
    if operands.token_scale is not None:
        return None
    multiply = _on_cpu if operands.x.device.type == "cpu" else _in_place
    return functools.partial(multiply, operands.group_size, operands.format)


def _in_place(group_size: int, format: CodesFormat, tensors: Tensors) -> Tensor:
    """Each chunk's product is written into its columns of the result."""
    x, codes, scale, zero_point, bias, residual, _, global_scale = tensors
    (m, k), n = x.shape, codes.shape[0]
    rows = rows_of_chunk(n, k, x.element_size())
    out, chunk = x.new_empty((m, n)), x.new_empty((rows, k))
    # The product's launch adds the residual, or the bias where there is one chunk: cuBLAS can't add it to a slice.
    in_product = bias if residual is None and rows == n else None
    for first in range(0, n, rows):
        part = slice(first, min(first + rows, n))
        weight, to = chunk[: part.stop - first], out[:, part]
        zeros = None if zero_point is None else zero_point[part]
        write_values(weight, codes[part], scale[part], zeros, group_size, format, global_scale)
        # autocast leaves products with `out` alone
        if residual is not None:
            torch.addmm(residual[:, part], x, weight.t(), out=to)
        elif in_product is not None:
            torch.addmm(in_product, x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=to)
    return out if bias is None or in_product is not None else out.add_(bias)


def write_values(
    out: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    format: CodesFormat,
    global_scale: Tensor | None,
) -> None:
    """Write the dequantized weight, on any device.

    Args:
        out: [N, K].
        codes, scale, zero_point, group_size, global_scale: as `dequantize` takes them.
        format: of the codes and scales.
    """
    if runs_on(out.device) and out.is_cuda:
        fill(out, codes, scale, zero_point, group_size, format, global_scale)
    else:
        own = (codes, scale, zero_point, group_size, out.shape[1], out.dtype)
        out.copy_(values_on_cpu(*own, format, global_scale))


def _on_cpu(group_size: int, format: CodesFormat, tensors: Tensors) -> Tensor:
    x, codes, scale, zero_point, bias, residual, _, global_scale = tensors
    n, k = codes.shape[0], x.shape[1]

    def values(rows: slice) -> Tensor:
        zeros = None if zero_point is None else zero_point[rows]
        own = (codes[rows], scale[rows], zeros, group_size, k)
        return values_on_cpu(*own, torch.float32, format, global_scale)

    tiles = ((rows, values(rows)) for rows in rows_in_tiles(n, TILE // k))
    dtype = x.dtype
    if x.shape[0] <= MOST_TOKENS_IN_FLOAT32:
        x, bias = x.float(), None if bias is None else bias.float()
    out = weight_mm_tiles_cpu.linear(x, tiles, n, bias)
    return (out if residual is None else out.add_(residual)).to(dtype)
