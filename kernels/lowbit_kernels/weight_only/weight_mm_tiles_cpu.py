"""Products of PyTorch on a CPU with a weight that is dequantized a tile of rows at a time, in the same memory.

    out[..., n] = sum_k x[..., k] * w[n, k] + bias[n]

A tile is still in the cache when it is multiplied, and no call writes to memory that the system has to clear first. In
float32 each result has the bits of the product with the whole weight: a tile goes to the routine that the whole weight
goes to, and `dequantize_cpu.ROWS_OF_A_TILE` divides its rows. Two cases were seen on a Xeon in which they differ in the
last bits: an x whose tokens lie next to each other in memory (`has_tokens_inside`), which callers multiply by the whole
weight, and one token on several threads, among which MKL divides all rows.

In bfloat16 a tile is rounded to bfloat16. In float16 the product is float32 and rounded once, because PyTorch's float16
products take five times as long.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F


def has_tokens_inside(x: Tensor) -> bool:
    """True if x [M, K] is the transpose of a matrix in memory."""
    return x.ndim == 2 and x.stride(0) == 1 and x.stride(1) > 1 and x.shape[0] > 1


def linear(x: Tensor, tiles: Iterable[tuple[slice, Tensor]], n: int, bias: Tensor | None) -> Tensor:
    """[..., N] in x's dtype, contiguous.

    Args:
        x: float32, bfloat16 or float16 [..., K].
        tiles: the rows of the weight in order, as `dequantize_cpu.Dequantizer.tiles` gives them, and their values,
            float32 [rows, Kp]. Columns beyond K are left out.
        n: rows of the weight.
        bias: [N] in x's dtype, or None.
    """
    if x.dtype is torch.float32 and bias is not None and x.ndim != 2:
        return _by_linear(x, tiles, n, bias)
    k = x.shape[-1]
    flat = x.reshape(x.numel() // k, k)
    kept = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    flat = flat.to(kept)
    out = flat.new_empty((flat.shape[0], n))
    memory = flat.new_empty((0, k))
    for part, tile in tiles:
        if tile.shape[1] != k or kept is not torch.float32:
            rows = tile.shape[0]
            memory = memory if rows <= memory.shape[0] else flat.new_empty((rows, k))
            tile = memory[:rows].copy_(tile[:, :k])
        # autocast leaves products with `out` alone
        if bias is None or x.dtype is torch.float16:
            torch.mm(flat, tile.t(), out=out[:, part])
        else:
            torch.addmm(bias[part], flat, tile.t(), out=out[:, part])
    if bias is not None and x.dtype is torch.float16:
        out.add_(bias)
    return out.to(x.dtype).view(*x.shape[:-1], n)


def _by_linear(x: Tensor, tiles: Iterable[tuple[slice, Tensor]], n: int, bias: Tensor) -> Tensor:
    """The same by F.linear, which chooses by the strides of x how it adds the bias."""
    out, k = x.new_empty((*x.shape[:-1], n)), x.shape[-1]
    for part, tile in tiles:
        values = tile if tile.shape[1] == k else tile[:, :k].contiguous()
        out[..., part] = F.linear(x, values, bias[part])
    return out
