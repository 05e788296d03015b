"""Small-batch products with a low-bit weight on a CPU, summed in float32: the kernel of ``weight_mm_cpu.cpp``.

    out[m, n] = sum_k x[m, k] * value(code[n, k])       values as in `dequantize_cpu`

The kernel reads codes and scales in place at every product. PyTorch's own int4 kernel needs a reordered copy as large
as the weight. That copy goes stale when codes are written through ``.data``, NumPy, DLPack or a mapped file, which
nothing reports. PyTorch's int8 kernel crashes on memory that isn't aligned.

Sums are float32 and are rounded once, after bias and residual. The kernel is about as fast as PyTorch's: one token
times int4 of 4096 x 4096 takes 0.9 ms on one core of an EPYC with AVX-512, where dequantization in chunks takes 19 ms.
That is the fallback without a compiler. The source is compiled at first use, once a machine and format.

`product` plans it for `weight_linear`: 16 bits, and codes of 4 or 8 bits. `multiplier` is the kernel for any format.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.weight_only.codes_cpu import (
    CodesLayout,
    Parts,
    functions,
    source,
    warn_not_compiled,
)
from lowbit_kernels.weight_only.codes_format import CodesFormat
from lowbit_kernels.weight_only.weight_operands import (
    HALVES,
    Product,
    Tensors,
    WeightOperands,
)

MOST_TOKENS = {4: 32, 8: 16}
READ_AFTER = 15  # floats after the scales that the kernel may read


class Multiplier(CodesLayout):
    """The kernel for weights of one format and layout. The arguments are those of `CodesLayout`.

    Raises:
        RuntimeError: the kernel cannot be compiled (see `codes_cpu.functions`).
    """

    def __init__(
        self, format: CodesFormat, rows: int, columns: int, group_size: int, scale_rows: int = 1
    ) -> None:
        super().__init__(format, rows, columns, group_size, scale_rows)
        self._multiply, lanes = _functions(format)
        word, chunk = 32 // format.bits, 512 // format.bits
        of_chunks, in_chunk = group_size % chunk == 0, chunk % group_size == 0
        of_words = lanes == 16 and in_chunk and group_size % word == 0
        in_words = lanes > 0 and columns % chunk == 0 and (of_chunks or of_words)
        self._reads_after = in_words and not of_chunks
        self._chunks = (columns // chunk, lanes, chunk // lanes) if in_words else ()

    def multiply(self, x: Tensor, parts: Parts) -> Tensor:
        """float32 [M, N] of x [M, K], in float32 or 16 bits, and a weight [N, Kp] with contiguous codes."""
        m, (n, columns) = x.shape[0], self.shape
        if padding := columns - x.shape[1]:
            x = F.pad(x, (0, padding))
        if self._chunks:
            x = x.reshape(m, *self._chunks).transpose(2, 3)
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        codes, scale, zero_point, of_byte = parts
        if of_byte is None and (
            self._reads_after or scale.dtype != torch.float32 or not scale.is_contiguous()
        ):
            scale = _float32(scale, READ_AFTER if self._reads_after else 0)
        if zero_point is not None:
            zero_point = zero_point.contiguous()
        out = x.new_empty((m, n))
        self._multiply(
            self.address,
            out.data_ptr(),
            *Parts(codes, scale, zero_point, of_byte).addresses(),
            x.data_ptr(),
            m,
            len(self._chunks) > 0,
            *self.threads(),
        )
        return out


@functools.cache
def _functions(format: CodesFormat) -> tuple[Any, int]:
    """The kernel, and the lanes of the order of x that it takes for vectors of words; 0 for none."""
    multiply, lanes = functions(
        source(format, "weight_only/weight_mm_cpu.cpp"), "multiply", "lanes"
    )
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    multiply.argtypes = [*([pointer] * 7), number, number, pointer, number]
    return multiply, lanes()


def multiplier(format: CodesFormat, *sizes: int) -> Multiplier | None:
    """A `Multiplier`; None, after a warning, if it cannot be compiled."""
    try:
        return Multiplier(format, *sizes)
    except RuntimeError as error:
        warn_not_compiled(error)
        return None


@functools.lru_cache(maxsize=4096)
def _planned(bits: int, has_zero: bool, rows: int, columns: int, group: int) -> Multiplier | None:
    format = CodesFormat(bits, -(2 ** (bits - 1)), zero_point="code" if has_zero else "none")
    return multiplier(format, rows, columns, group)


def product(operands: WeightOperands) -> Product | None:
    """The planned product; None on other devices, for float32, for more than MOST_TOKENS tokens, for codes with gaps,
    for formats other than int4 and int8, with a token_scale, and without a compiler."""
    if operands.token_scale is not None or not operands.format.is_int4_or_int8:
        return None
    if operands.x.device.type != "cpu" or operands.x.dtype not in HALVES:
        return None
    if operands.m > MOST_TOKENS[operands.bits] or not operands.codes.is_contiguous:
        return None
    columns, has_zero = operands.groups * operands.group_size, operands.zero_point is not None
    kernel = _planned(operands.bits, has_zero, operands.n, columns, operands.group_size)
    return None if kernel is None else functools.partial(_product, kernel, operands.out)


def _product(kernel: Multiplier, dtype: torch.dtype, tensors: Tensors) -> Tensor:
    x, codes, scale, zero_point, bias, residual, *_ = tensors
    out = kernel.multiply(x, Parts(codes, scale, zero_point))
    for part in (bias, residual):
        if part is not None:
            out.add_(part)
    return out.to(dtype)


def _float32(scale: Tensor, after: int) -> Tensor:
    """float32 scales without gaps, followed by `after` more floats of memory."""
    if not after:
        return scale.float().contiguous()
    whole = torch.empty(scale.numel() + after, dtype=torch.float32)
    return whole[: scale.numel()].view(scale.shape).copy_(scale)
