"""Many tokens by a weight of 4 or 8 bits: some rows of it dequantized, multiplied, and the next into the same memory.

There is never a copy of a whole large weight, and what was dequantized is still in the cache when it is multiplied: on
GPUs at most 24 MB lie in the L2 (torch.mm writes its part of the result in place, a slice of columns), on CPUs 2 MB.

The weight is rounded once to the dtype of the product, as everywhere where a dequantized weight is multiplied: against
the unrounded one a bfloat16 result is off by 2.3e-3 instead of 1.7e-3. On CPUs the product is float32's, without that
rounding, for up to 8 tokens, which costs nothing there, and for float16, whose products take five times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.dequantize import fill, fill_on_cpu, reference, rows_in_cache
from lowbit_kernels.triton_runtime import runs_on

BYTES_IN_L2 = 24_000_000
ROWS_OF_A_TILE = 256
MOST_TOKENS_IN_FLOAT32 = 8  # of bfloat16, on CPUs


def rows_of_chunk(n: int, k: int, itemsize: int) -> int:
    """Rows that a GPU dequantizes at a time: all, or as many whole tiles as divide them evenly and fit the cache."""
    chunks = -(-n * k * itemsize // BYTES_IN_L2)
    if chunks <= 1:
        return n
    most = max(1, BYTES_IN_L2 // (k * itemsize * ROWS_OF_A_TILE)) * ROWS_OF_A_TILE
    return min(most, -(-n // chunks // ROWS_OF_A_TILE) * ROWS_OF_A_TILE)


def weight_mm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> Tensor:
    """The product of `weight_linear`, on any device; M, N, K > 0."""
    way = _on_cpu if x.device.type == "cpu" else _in_place
    return way(x, codes, scale, zero_point, bias, residual, bits, group_size)


def _in_place(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    bits: int,
    group_size: int,
) -> Tensor:
    """Each product into its columns of the result."""
    (m, k), n = x.shape, codes.shape[0]
    rows = rows_of_chunk(n, k, x.element_size())
    out, chunk = x.new_empty((m, n)), x.new_empty((rows, k))
    # one launch adds the residual, or the bias where the product is one; cuBLAS can't in a slice
    in_product = bias if residual is None and rows == n else None
    for first in range(0, n, rows):
        part = slice(first, min(first + rows, n))
        weight, to = chunk[: part.stop - first], out[:, part]
        zeros = None if zero_point is None else zero_point[part]
        _fill(weight, codes[part], scale[part], zeros, bits, group_size)
        # by `out`, which autocast leaves alone
        if residual is not None:
            torch.addmm(residual[:, part], x, weight.t(), out=to)
        elif in_product is not None:
            torch.addmm(in_product, x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=to)
    return out if bias is None or in_product is not None else out.add_(bias)


def _fill(
    out: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, group_size: int
) -> None:
    """out [N, K] = the dequantized weight, wherever it is."""
    if runs_on(out.device) and out.is_cuda:
        fill(out, codes, scale, zero_point, group_size)
    else:
        out.copy_(reference(codes, scale, zero_point, group_size, out.shape[1], out.dtype))


def _on_cpu(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    bits: int,
    group_size: int,
) -> Tensor:
    (m, k), (n, groups) = x.shape, scale.shape
    dtype, padded = x.dtype, groups * group_size
    if dtype == torch.float16 or m <= MOST_TOKENS_IN_FLOAT32:
        x = x.float()
    out = x.new_empty((m, n), dtype=dtype)
    rows = min(n, rows_in_cache(x.new_empty((0, padded))))
    chunk, product = x.new_empty((rows, padded)), x.new_empty((m, rows))
    for first in range(0, n, rows):
        part = slice(first, min(first + rows, n))
        height = part.stop - first
        weight, to = chunk[:height], product[:, :height]
        zeros = None if zero_point is None else zero_point[part]
        if bits == 4 and padded % 2:
            _fill(weight[:, :k], codes[part], scale[part], zeros, bits, group_size)
        else:
            fill_on_cpu(weight, codes[part], scale[part], zeros, group_size)
        torch.mm(x, weight[:, :k].t(), out=to)
        if bias is not None:
            to.add_(bias[part])
        if residual is not None:
            to.add_(residual[:, part])
        out[:, part] = to
    return out
