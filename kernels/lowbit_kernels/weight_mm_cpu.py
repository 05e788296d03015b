"""Few tokens in 16 bits by a weight of 4 or 8 bits on a CPU: the kernel of ``weight_mm_cpu.cpp``.

It reads codes and scales where they lie, at every product. PyTorch's own kernel for 4 bits wants nibbles in another
order, in a copy as large as the weight; nothing tells when codes are written through ``.data``, NumPy, DLPack or a file
that is mapped, and then such a copy is stale. That for 8 bits crashes on memory that isn't aligned.

Sums are float32's and are rounded once, after bias and residual. Measured on one core of an EPYC with AVX-512 that
others were using too (bfloat16, 4096 x 4096, int4 in groups of 128 and int8 by rows, milliseconds, for 1, 4, 8, 16 and
32 tokens):

    int4, this kernel             0.9    2.3    4.7    8.6     14
    int4, PyTorch's, with a copy  1.1    2.0    4.1    6.6     13
    int4, dequantized in chunks    19     24     31     19     19
    int8, this kernel             1.5    2.8    4.9    8.9     16
    int8, PyTorch's               1.7    2.6    4.6    9.9     19
    int8, dequantized in chunks   5.6     12     13     11     14

Compiled at first use, once on a machine; where that can't be done, weights are dequantized in chunks.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.codes_cpu import Format, Layout, functions, warn_not_compiled

MOST_TOKENS = {4: 32, 8: 16}
READ_AFTER = 15  # floats after the scales that the kernel may read


class _Product(Layout):
    """The kernel for a weight of one shape."""

    def __init__(self, format: Format, rows: int, columns: int, group_size: int) -> None:
        super().__init__(format, rows, columns, group_size)
        self.multiply = _function(format)
        word, chunk = 32 // format.bits, 512 // format.bits
        of_chunks, in_chunk = group_size % chunk == 0, chunk % group_size == 0
        self.in_words = columns % chunk == 0 and (
            of_chunks or (in_chunk and group_size % word == 0)
        )
        self.reads_after = self.in_words and not of_chunks
        self.chunks = (columns // chunk, 16, word)


@functools.cache
def _function(format: Format) -> Any:
    (multiply,) = functions(format.source("weight_mm_cpu.cpp"), "multiply")
    number = ctypes.c_int64
    multiply.argtypes = [*([ctypes.c_void_p] * 6), number, number, ctypes.c_void_p, number]
    return multiply


@functools.lru_cache(maxsize=4096)
def _product(bits: int, has_zero: bool, rows: int, columns: int, group: int) -> _Product | None:
    format = Format(bits, -(2 ** (bits - 1)), zero_point="code" if has_zero else "none")
    try:
        return _Product(format, rows, columns, group)
    except RuntimeError as error:
        warn_not_compiled(error)
        return None


def takes(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> bool:
    """Whether `weight_mm` multiplies these; M, N, K > 0."""
    (n, groups), m = scale.shape, x.shape[0]
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float16)
        and m <= MOST_TOKENS[bits]
        and codes.is_contiguous()
        and _product(bits, zero_point is not None, n, groups * group_size, group_size) is not None
    )


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
    """The product of `weight_linear`, of operands that it `takes`."""
    (m, k), (n, groups), dtype = x.shape, scale.shape, x.dtype
    columns = groups * group_size
    product = _product(bits, zero_point is not None, n, columns, group_size)
    assert product is not None
    x = x.float()
    if k < columns:
        x = F.pad(x, (0, columns - k))
    if product.in_words:
        x = x.reshape(m, *product.chunks).transpose(2, 3)
    x, scale = x.contiguous(), _float32(scale, READ_AFTER if product.reads_after else 0)
    zero_point = None if zero_point is None else zero_point.contiguous()
    out = x.new_empty((m, n))
    zero = None if zero_point is None else zero_point.data_ptr()
    addresses = (out.data_ptr(), codes.data_ptr(), scale.data_ptr(), zero, x.data_ptr())
    product.multiply(product.address, *addresses, m, product.in_words, *product.threads())
    for part in (bias, residual):
        if part is not None:
            out.add_(part)
    return out.to(dtype)


def _float32(scale: Tensor, after: int) -> Tensor:
    """float32 scales without gaps, with so many more floats in the memory after them."""
    if not after:
        return scale.float().contiguous()
    whole = torch.empty(scale.numel() + after, dtype=torch.float32)
    return whole[: scale.numel()].view(scale.shape).copy_(scale)
