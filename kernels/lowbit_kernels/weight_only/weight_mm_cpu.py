"""Products with a low-bit weight on a CPU, summed in float32: the kernel of ``weight_mm_cpu.cpp``.

    out[m, n] = sum_k x[m, k] * value(code[n, k])  +  bias[n]       values as in `dequantize_cpu`

The kernel reads codes and scales in place at every product. A copy in another order would be as large as the weight,
and go stale when codes are written through ``.data``, NumPy, DLPack or a mapped file, which nothing reports.

Up to 3 tokens are bound by memory and decode in registers. More tokens multiply panels of decoded rows, in float32 or,
where the processor multiplies bfloat16 (AVX512_BF16), in bfloat16. The numbers of codes are exact in bfloat16, and
scales are multiplied into float32 sums, so the weight is not rounded. The source is compiled at first use, once a
machine and format.

`product` plans it for `weight_linear`, and `multiplier` is the kernel for any format.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.weight_only.codes_cpu import CodesLayout, functions, source, warn_not_compiled
from lowbit_kernels.weight_only.codes_format import CodesFormat
from lowbit_kernels.weight_only.weight_operands import Product, Tensors, WeightOperands

_FLOAT32, _BFLOAT16, _CPU = torch.float32, torch.bfloat16, torch.device("cpu")
_CALL = struct.Struct("14q").pack
"""The C structure ``Call``; ctypes takes three times as long for as many arguments."""


class Extent(NamedTuple):
    """How much a product multiplies."""

    tokens: int
    columns: int
    """K of the input."""
    sizes: tuple[int, ...]
    """Those of the result."""

    @classmethod
    def of(cls, shape: Sequence[int], rows: int) -> Extent:
        """The extent of a product with an input of this shape [..., K] and a result [..., rows]."""
        return cls(prod(shape[:-1]), shape[-1], (*shape[:-1], rows))


class Multiplier(CodesLayout):
    """The kernel for weights of one format and layout. The arguments are those of `CodesLayout`.

    Raises:
        RuntimeError: the kernel cannot be compiled (see `codes_cpu.functions`).
    """

    def __init__(
        self, format: CodesFormat, rows: int, columns: int, group_size: int, scale_rows: int = 1
    ) -> None:
        super().__init__(format, rows, columns, group_size, scale_rows)
        self._multiply, self._most_floats, self._most_halves = _functions(format)
        self._scales = self.scale_bytes // (1 if format.scale_bytes else 4)

    def most_tokens(self, halves: bool) -> int:
        """The most tokens that `multiply` takes, in float32 or bfloat16. PyTorch multiplies more of them faster."""
        return self._most_halves if halves else self._most_floats

    def multiply(
        self,
        x: Tensor,
        extent: Extent,
        bias: Tensor | None,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None = None,
        of_byte: Tensor | None = None,
    ) -> Tensor | None:
        """x times the first rows of a weight [N, Kp], transposed, plus bias, in x's dtype.

        None where the memory of the weight's parts does not fit, and where PyTorch's product with decoded tiles is
        faster. Decoding calls this method for every layer and token, so it inlines the functions that it would call.

        Args:
            x: float32 or bfloat16 [..., K]; K is at most Kp.
            extent: `Extent.of` x and the rows of the result.
            bias: [rows] in x's dtype, or None.
            codes, scale, zero_point, of_byte: as in `codes_cpu.Parts`; without `of_byte`, the scale is float32 or
                bfloat16.
        """
        dtype, kind, (tokens, columns, sizes) = x.dtype, scale.dtype, extent
        if (
            codes.nbytes != self.codes_bytes
            or scale.numel() != self._scales
            or (kind is not _FLOAT32 and kind is not _BFLOAT16 and not self.has_byte_scales)
            or not codes.is_contiguous()
            or not scale.is_contiguous()
        ):
            return None
        zero_address = of_byte_address = 0
        if zero_point is not None:
            if zero_point.nbytes != self.zero_bytes or not zero_point.is_contiguous():
                return None
            zero_address = zero_point.data_ptr()
        if of_byte is not None:
            of_byte_address = of_byte.data_ptr()
        if not x.is_contiguous():
            x = x.contiguous()
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        halves = 0 if dtype is _FLOAT32 else 1
        if tokens > (self._most_halves if halves else self._most_floats):
            return None
        parallel = self._parallel
        out = torch.empty(*sizes, dtype=dtype, device=_CPU)
        self._multiply(
            _CALL(
                self.address,
                out.data_ptr(),
                codes.data_ptr(),
                scale.data_ptr(),
                zero_address,
                of_byte_address,
                x.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                tokens,
                columns,
                sizes[-1],
                halves + 2 if kind is _BFLOAT16 else halves,
                parallel or 0,
                1 if parallel is None else torch.get_num_threads(),
            )
        )
        return out


@functools.cache
def _functions(format: CodesFormat) -> tuple[Any, int, int]:
    """The kernel, and the most tokens of its products in float32 and bfloat16."""
    names = ("weight_mm_panels_cpu.h", "weight_mm_blocks_cpu.h", "weight_mm_cpu.cpp")
    files = tuple(f"weight_only/{name}" for name in names)
    multiply, most_tokens = functions(source(format, *files), "multiply", "most_tokens")
    multiply.argtypes, most_tokens.argtypes = [ctypes.c_char_p], [ctypes.c_int64]
    return multiply, most_tokens(0), most_tokens(1)


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
    """The planned product; None on other devices, for codes or scales with gaps, for formats other than int4 and int8,
    for scales in float16, for many tokens where PyTorch is faster, with a token_scale, and without a compiler."""
    if operands.token_scale is not None or not operands.format.is_int4_or_int8:
        return None
    parts = [operands.codes, operands.scale, operands.zero_point or operands.scale]
    if operands.x.device.type != "cpu" or not all(part.is_contiguous for part in parts):
        return None
    if operands.scale.dtype is torch.float16:
        return None
    columns, has_zero = operands.groups * operands.group_size, operands.zero_point is not None
    kernel = _planned(operands.bits, has_zero, operands.n, columns, operands.group_size)
    is_half = operands.x.dtype is _BFLOAT16 and operands.residual is None
    if kernel is None or operands.m > kernel.most_tokens(is_half):
        return None
    return functools.partial(_product, kernel, operands.n)


def _product(kernel: Multiplier, n: int, tensors: Tensors) -> Tensor:
    x, codes, scale, zero_point, bias, residual, *_ = tensors
    dtype = x.dtype
    if dtype is torch.float16 or residual is not None:  # rounded once, with all of the sum
        x, bias = x.float(), None if bias is None else bias.float()
    out = kernel.multiply(x, Extent.of(x.shape, n), bias, codes, scale, zero_point)
    assert out is not None
    return (out if residual is None else out.add_(residual)).to(dtype)
