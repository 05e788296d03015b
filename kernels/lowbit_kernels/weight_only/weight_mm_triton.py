"""Small-batch products with a weight of 4 or 8 bits in Triton, for GPUs and layouts that the CUDA kernels don't take.

A program multiplies BLOCK_N rows of the weight by BLOCK_M tokens over a slice of K. A block of K lies in one group, so
its sum is scaled once, in float32, and the weight is never rounded.

The codes are read in words. At 4 bits, word c holds the codes of k = 8c .. 8c + 7 (shorter words: 4c or 2c). The j-th
nibbles of all words form a matrix, which is multiplied by every eighth column of x from column j on, so
nothing has to be interleaved. The weight is the first operand of the product, since that one stays in registers.

Where the weight has too few rows to fill the GPU, K is cut into slices (split-K). A second launch adds their sums in a
fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, stored_dtype, tl, triton
from lowbit_kernels.weight_only.dequantize_triton import numbers_of_codes, scales_in_float32
from lowbit_kernels.weight_only.weight_operands import (
    Product,
    TensorLayout,
    Tensors,
    WeightOperands,
)

MOST_TOKENS = 64
MOST_SLICES = 16
WORDS = {8: torch.int32, 4: torch.int16}  # by codes of 4 bits in a word


@jit
def sums_of_blocks(
    x_rows,  # pointers to tokens, [BLOCK_M]
    row_inside,
    codes_rows,  # pointers to rows of the weight, [BLOCK_N], in words of WORD codes
    scale_rows,
    zero_rows,  # or None
    column_inside,
    first,  # of K
    last,
    k,
    width,  # words of a row
    GROUP_SIZE: tl.constexpr,  # 0: a row is one group
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    table,
    whole,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The scaled sums over columns first .. last of the weight: float32 [BLOCK_N, BLOCK_M]. The last four arguments are
    those of `dequantize_triton`."""
    BLOCK_N: tl.constexpr = codes_rows.shape[0]
    BLOCK_M: tl.constexpr = x_rows.shape[0]
    WORDS: tl.constexpr = BLOCK_K // WORD
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        word = start // WORD + tl.arange(0, WORDS)
        inside = column_inside[:, None] & (word < width)[None, :]
        words = tl.load(codes_rows[:, None] + word[None, :], mask=inside, other=0)
        group = 0 if GROUP_SIZE == 0 else start // GROUP_SIZE
        s = scales_in_float32(scale_rows + group, column_inside, whole, SCALE)
        zero = tl.zeros((BLOCK_N,), tl.float32)
        if zero_rows is not None:
            zero += tl.load(zero_rows + group, mask=column_inside, other=0).to(tl.float32)
        partial = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for j in tl.static_range(WORD):
            if KIND != "integers":
                code = (words.to(tl.int32) >> (BITS * j)) & ((1 << BITS) - 1)
                value = numbers_of_codes(code, table, inside, KIND)
            elif BITS == 4:  # the mantissa of 2**23 with a nibble in it is the float 2**23 + nibble
                nibble = ((words.to(tl.int32) >> (4 * j)) & 15) | 0x4B000000
                value = nibble.to(tl.float32, bitcast=True) - (zero + 8388616.0)[:, None]
            else:
                value = words.to(tl.float32) - zero[:, None]
            element = word * WORD + j
            wanted = row_inside[:, None] & (element < k)[None, :]
            tokens = tl.load(x_rows[:, None] + element[None, :], mask=wanted, other=0)
            weight = value.to(tokens.dtype)
            partial = tl.dot(weight, tl.trans(tokens), partial, input_precision="ieee")
        sums += partial * s[:, None]
    return sums


@jit
def _finished(sums, bias, residual, rows, row_inside, columns, column_inside, n):
    """sums [BLOCK_M, BLOCK_N] plus bias and residual, each of which may be None."""
    if bias is not None:
        sums += tl.load(bias + columns, mask=column_inside, other=0).to(tl.float32)[None, :]
    if residual is not None:
        at = residual + rows[:, None] * n + columns[None, :]
        inside = row_inside[:, None] & column_inside[None, :]
        sums += tl.load(at, mask=inside, other=0).to(tl.float32)
    return sums


@jit
def _kernel(
    x,
    codes,
    scale,
    zero_point,
    bias,
    residual,
    out,  # [m, n], or float32 [slices, m, n] if SLICES > 1
    m,
    n,
    k,
    width,
    x_stride,
    codes_stride,
    scale_stride,
    zero_stride,
    steps,  # blocks of K of a slice
    SLICES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    row_inside, column_inside = rows < m, columns < n
    if zero_point is not None:
        zero_point += columns * zero_stride
    first = tl.program_id(1) * steps * BLOCK_K
    codes += columns * codes_stride
    scale += columns * scale_stride
    parts = (x + rows * x_stride, row_inside, codes, scale, zero_point, column_inside)
    upto = (first, min(first + steps * BLOCK_K, k), k, width)
    sums = sums_of_blocks(
        *parts, *upto, GROUP_SIZE, BITS, WORD, BLOCK_K, None, None, "integers", "float"
    )
    sums = tl.trans(sums)
    inside = row_inside[:, None] & column_inside[None, :]
    if SLICES > 1:
        out += tl.program_id(1).to(tl.int64) * m * n
    else:
        sums = _finished(sums, bias, residual, rows, row_inside, columns, column_inside, n)
    at = rows[:, None] * n + columns[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@jit
def _combine(
    partial,  # float32 [slices, m, n]
    bias,
    residual,
    out,
    m,
    n,
    slices,
    step,  # m * n
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_inside, column_inside = rows < m, columns < n
    inside = row_inside[:, None] & column_inside[None, :]
    at = rows[:, None] * n + columns[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, slices):
        sums += tl.load(partial + at, mask=inside, other=0)
        partial += step
    sums = _finished(sums, bias, residual, rows, row_inside, columns, column_inside, n)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


def block_of_k(group_size: int, groups: int) -> int:
    """Elements of K that a product takes, all in one group; 0 where the kernel doesn't take the groups."""
    if groups == 1:
        return 128
    return next((block for block in (128, 64, 32) if group_size % block == 0), 0)


def codes_of_word(codes: TensorLayout, bits: int, block: int) -> int:
    """The number of codes in the longest word that the layout and a product of `block // word` elements allow."""
    if bits == 8:
        return 1
    for word in WORDS:
        numbers = (codes.misaligned, codes.shape[-1], *codes.strides[:-1])
        if block // word >= 16 and all(n % (word // 2) == 0 for n in numbers):
            return word
    return 2


def in_words(codes: Tensor, word: int) -> Tensor:
    """The codes as words of `codes_of_word`."""
    return codes.view(WORDS[word]) if word in WORDS else codes


def plan(n: int, k: int, block: int, multiprocessors: int) -> tuple[int, int]:
    """Slices of K, and blocks of a slice: two programs of 64 rows for each multiprocessor where K is long enough."""
    blocks = -(-k // block)
    wanted = -(-2 * multiprocessors // -(-n // 64))
    return _even_slices(blocks, max(1, min(wanted, MOST_SLICES, blocks // 4)))


def _even_slices(blocks: int, slices: int) -> tuple[int, int]:
    """At most so many slices, and the blocks of each."""
    steps = -(-blocks // slices)
    return -(-blocks // steps), steps


def product(operands: WeightOperands, slices: int | None = None) -> Product | None:
    """The planned product; None where Triton doesn't run, for more than MOST_TOKENS tokens, for formats other than int4
    and int8, for groups that `block_of_k` refuses, and with a token_scale. `slices`: of K, for tests."""
    if operands.token_scale is not None or not operands.format.is_int4_or_int8:
        return None
    block = block_of_k(operands.group_size, operands.groups)
    if not (runs_on(operands.x.device) and operands.m <= MOST_TOKENS and block):
        return None
    return TritonProduct(operands, block, slices)


class TritonProduct:
    """The product of operands that `product` takes."""

    def __init__(self, operands: WeightOperands, block: int, slices: int | None) -> None:
        device, k = operands.x.device, operands.k
        codes = operands.codes
        codes = codes if codes.strides[-1] == 1 else codes.copied()
        self.shape, self.dtype = (operands.m, operands.n), operands.out
        self.stored = stored_dtype(operands.out, device)
        self.word = codes_of_word(codes, operands.bits, block)
        if slices is None:
            processors = 2 if device.type == "cpu" else nvrtc.multiprocessors(device)
            self.slices, self.steps = plan(operands.n, k, block, processors)
        else:
            self.slices, self.steps = _even_slices(-(-k // block), slices)
        self.options = {
            "SLICES": self.slices,
            "GROUP_SIZE": operands.group,
            "BITS": operands.bits,
            "WORD": self.word,
            "BLOCK_M": max(16, triton.next_power_of_2(operands.m)),
            "BLOCK_N": 64,
            "BLOCK_K": block,
            "num_warps": 4,
            "num_stages": 3,
        }

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, residual, *_ = tensors
        (m, n), k = self.shape, x.shape[1]
        if x.device.type == "cpu":  # the interpreter has no bfloat16
            x = x.float()
        x, codes, scale = (t if t.stride(1) == 1 else t.contiguous() for t in (x, codes, scale))
        zero_point = None if zero_point is None else zero_point.contiguous()
        words, ends = in_words(codes, self.word), (bias, residual)
        out = x.new_empty((m, n), dtype=self.stored)
        to = x.new_empty((self.slices, m, n), dtype=torch.float32) if self.slices > 1 else out
        with torch.cuda.device_of(x):
            _kernel[(-(-n // 64), self.slices)](
                *(x, words, scale, zero_point, *ends, to, m, n, k, words.shape[1]),
                *(x.stride(0), words.stride(0), scale.stride(0), scale.shape[1], self.steps),
                **self.options,
            )
            if self.slices > 1:
                grid = (-(-n // 256), -(-m // 4))
                _combine[grid](to, *ends, out, m, n, self.slices, m * n, BLOCK_M=4, BLOCK_N=256)
        return out.to(self.dtype)
