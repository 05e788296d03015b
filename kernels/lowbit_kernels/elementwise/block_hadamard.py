"""Blocks of a row times a Hadamard matrix, and the result rounded to few bits by token, in one pass over memory.

    y[..., g, :] = x[..., g, :] @ H        g = 0, 1, ... over the blocks of `size` elements of the last dimension

    bits > 0:  s = max(-least y / 2**(bits - 1), greatest y / (2**(bits - 1) - 1)) of the token
               y ← s · clamp(round(y / s))

H = H2 ⊗ H4 ⊗ H4 ⊗ ..., where H4 = J/2 − I, J is the 4 x 4 matrix of ones, and H2 = [[1, 1], [1, -1]] / √2 is a factor
where `size` is an odd power of two. H is symmetric and orthogonal, so it is its own inverse, and all its elements have
one magnitude. An outlier of one channel is spread over its block. Unlike Sylvester's matrix H4 keeps the mean of a
block where it is: (1, 1, 1, 1) H4 = (1, 1, 1, 1). Sylvester's would gather it in one element, a new outlier.

    x       float or float64 [..., K]; `size` divides K
    y       x's dtype [..., K], contiguous; computed in float32, or float64 of float64, and rounded once

The CPU multiplies by H in one call of BLAS, which is faster than the butterflies of the fast transform up to 128. The
Triton kernel multiplies by the signs of H in tensor cores: bfloat16 and float16 times ±1 are exact. A program has a
row. With `bits` it reads the row twice, the second time from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, stored_dtype, tl, triton

SIZES = (16, 32, 64, 128)
"""The sizes of blocks that the Triton kernel takes. The formula takes every power of two."""
_TILE = 4096
"""The most elements that a program multiplies at a time."""


def hadamard(size: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """H [size, size] of the module's docstring, for a power of two."""
    signs = torch.ones(1, 1, dtype=torch.float64)
    four = 1 - 2 * torch.eye(4, dtype=torch.float64)
    while len(signs) * 4 <= size:
        signs = torch.kron(signs, four)
    if len(signs) < size:
        signs = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), signs)
    return (signs * size**-0.5).to(device=device, dtype=dtype)


@op(
    "empty(x.dtype, *x.shape)",
    x="float|float64 [..., K]",
    rules={
        "size > 0 and size & (size - 1) == 0": "size must be a power of two, got {size}",
        "K % size == 0": "the last dimension must be a multiple of size {size}, got {K}",
        "0 <= bits <= 8 and bits != 1": "bits must be 0, for no rounding, or 2 to 8, got {bits}",
    },
)
def block_hadamard(x: Tensor, *, size: int, bits: int = 0) -> Tensor:
    """x [..., K] in blocks of `size` times a Hadamard matrix, then rounded to `bits`; see the module's docstring.

    Args:
        x: float or float64.
        size: a power of two that divides K.
        bits: 0: the result is not rounded. 2 to 8: to signed integers times one scale a token.

    Raises TypeError for other dtypes, ValueError for another size or number of bits.
    """
    wide = x.double() if x.dtype is torch.float64 else x.float()
    matrix = hadamard(size, wide.dtype, x.device)
    y = (wide.reshape(x.numel() // size, size) @ matrix).reshape(x.shape)
    if bits and y.numel():
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        least, most = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        # Divisors are tensors, since CUDA multiplies by the reciprocal of a Python number.
        below = least.clamp(max=0) / torch.full_like(least, low)
        scale = torch.maximum(below, most.clamp(min=0) / torch.full_like(most, high))
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        y = (y * scale.reciprocal()).round().clamp(low, high) * scale
    return y.to(x.dtype).contiguous()


reference = block_hadamard.reference


@jit
def _signs(SIZE: tl.constexpr):
    """√size · H. An element's sign is that of its number of equal digits in base 4, and of the bit that is left."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    differ = row ^ column
    DIGITS: tl.constexpr = 3 if SIZE >= 64 else 2
    digits = (differ | (differ >> 1)) & (0x15 if DIGITS == 3 else 0x5)
    odd = DIGITS + digits + (digits >> 2) + (digits >> 4)
    if SIZE == 32 or SIZE == 128:
        odd += (row & column) >> (2 * DIGITS)
    return 1 - 2 * (odd & 1)


@jit
def _turned(x, signs, block, blocks, factor, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """The blocks from `block` on, times H: float32 [BLOCKS, SIZE]."""
    index = block + tl.arange(0, BLOCKS)
    at = index[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    own = tl.load(x + at, mask=index[:, None] < blocks, other=0.0)
    return tl.dot(own, signs.to(own.dtype), input_precision="ieee") * factor


@jit
def _kernel(
    x,
    result,
    blocks,  # of a row
    factor,  # 1 / √SIZE
    x_stride,
    low,
    high,
    ROUND: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    result += row * blocks * SIZE
    signs = _signs(SIZE)
    if ROUND:
        least = tl.zeros((BLOCKS, SIZE), tl.float32)
        most = tl.zeros((BLOCKS, SIZE), tl.float32)
        strange = tl.zeros((BLOCKS, SIZE), tl.int32)
        for block in tl.range(0, blocks, BLOCKS):
            y = _turned(x, signs, block, blocks, factor, SIZE, BLOCKS)
            least = tl.minimum(least, y)
            most = tl.maximum(most, y)
            strange += tl.where(y == y, 0, 1)
        scale = tl.maximum(tl.div_rn(tl.min(least), low), tl.div_rn(tl.max(most), high))
        scale = tl.maximum(scale, 1.1754943508222875e-38)
        scale = tl.where(tl.sum(strange) > 0, float("nan"), scale)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    for block in tl.range(0, blocks, BLOCKS):
        y = _turned(x, signs, block, blocks, factor, SIZE, BLOCKS)
        if ROUND:
            y = tl.minimum(tl.maximum(y * inverse, low), high)
            y = ((y + 12582912.0) - 12582912.0) * scale  # 1.5 * 2**23: rounds half to even
        index = block + tl.arange(0, BLOCKS)
        at = index[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(result + at, y.to(result.dtype.element_ty), mask=index[:, None] < blocks)


@block_hadamard.kernel
def _launch(x: Tensor, size: int, bits: int) -> Tensor | None:
    """The Triton kernel where it runs, else the formula."""
    if not runs_on(x.device) or x.numel() == 0 or size not in SIZES or x.dtype is torch.float64:
        return None
    ran("block_hadamard", "triton")
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    result = torch.empty(x.shape, dtype=stored_dtype(x.dtype, x.device), device=x.device)
    rows = rows.to(result.dtype)  # the interpreter multiplies no bfloat16
    blocks = width // size
    with torch.cuda.device_of(x):
        _kernel[(rows.shape[0],)](
            *(rows, result, blocks, size**-0.5, rows.stride(0)),
            *(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1),
            ROUND=bits > 0,
            SIZE=size,
            BLOCKS=min(max(triton.next_power_of_2(blocks), 16), _TILE // size),
            num_warps=4,
        )
    return result.to(x.dtype)
