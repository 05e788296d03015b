"""Small-batch products in 16 bits with a weight of 4 or 8 bits on a CPU: the kernel of ``weight_mm_cpu.cpp``.

The kernel reads codes and scales in place at every product. PyTorch's own int4 kernel needs a reordered copy as large
as the weight. That copy goes stale when codes are written through ``.data``, NumPy, DLPack or a mapped file, which
nothing reports. PyTorch's int8 kernel crashes on memory that isn't aligned.

Sums are float32 and are rounded once, after bias and residual. The kernel is about as fast as PyTorch's: one token
times int4 of 4096 x 4096 takes 0.9 ms on one core of an EPYC with AVX-512, where dequantization in chunks takes 19 ms.
That is the fallback without a compiler. The source is compiled at first use, once on a machine.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.codes_cpu import Format, Layout, functions, warn_not_compiled
from lowbit_kernels.weight_operands import HALVES, Product, Tensors, WeightOperands

MOST_TOKENS = {4: 32, 8: 16}
READ_AFTER = 15  # floats after the scales that the kernel may read


class _Kernel(Layout):
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
def _kernel(bits: int, has_zero: bool, rows: int, columns: int, group: int) -> _Kernel | None:
    format = Format(bits, -(2 ** (bits - 1)), zero_point="code" if has_zero else "none")
    try:
        return _Kernel(format, rows, columns, group)
    except RuntimeError as error:
        warn_not_compiled(error)
        return None


def product(operands: WeightOperands) -> Product | None:
    """The planned product; None on other devices, for float32, for more than MOST_TOKENS tokens, for codes with gaps,
    with a token_scale, and without a compiler."""
    if operands.token_scale is not None:
        return None
    if operands.x.device.type != "cpu" or operands.x.dtype not in HALVES:
        return None
    if operands.m > MOST_TOKENS[operands.bits] or not operands.codes.is_contiguous:
        return None
    columns, has_zero = operands.groups * operands.group_size, operands.zero_point is not None
    kernel = _kernel(operands.bits, has_zero, operands.n, columns, operands.group_size)
    return None if kernel is None else CpuProduct(operands, kernel, columns)


class CpuProduct:
    """The product of operands that `product` takes."""

    def __init__(self, operands: WeightOperands, kernel: _Kernel, columns: int) -> None:
        scale = operands.scale
        self.kernel, self.shape, self.dtype = kernel, (operands.m, operands.n), operands.out
        self.padding = columns - operands.k
        self.x_shape = (operands.m, *kernel.chunks)
        self.reads_scale = scale.is_contiguous and scale.dtype == torch.float32
        self.reads_scale &= not kernel.reads_after

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, residual, _ = tensors
        kernel = self.kernel
        if self.padding:
            x = F.pad(x, (0, self.padding))
        if kernel.in_words:
            x = x.reshape(self.x_shape).transpose(2, 3)
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        if not self.reads_scale:
            scale = _float32(scale, READ_AFTER if kernel.reads_after else 0)
        zero = None if zero_point is None else zero_point.contiguous()
        out = x.new_empty(self.shape)
        kernel.multiply(
            kernel.address,
            out.data_ptr(),
            codes.data_ptr(),
            scale.data_ptr(),
            None if zero is None else zero.data_ptr(),
            x.data_ptr(),
            self.shape[0],
            kernel.in_words,
            *kernel.threads(),
        )
        for part in (bias, residual):
            if part is not None:
                out.add_(part)
        return out.to(self.dtype)


def _float32(scale: Tensor, after: int) -> Tensor:
    """float32 scales without gaps, followed by `after` more floats of memory."""
    if not after:
        return scale.float().contiguous()
    whole = torch.empty(scale.numel() + after, dtype=torch.float32)
    return whole[: scale.numel()].view(scale.shape).copy_(scale)
