"""Few tokens by a weight of 4 or 8 bits in Triton: for GPUs and layouts that the CUDA kernels don't take.

A program multiplies BLOCK_N rows of the weight by BLOCK_M tokens over a slice of K. A block of K lies in one group, so
its sum is scaled once, in float32: the weight is never rounded. Of 4 bits, word c holds the values of k = 8c .. 8c + 7
(of shorter words: 4c, 2c); nibble j of all words is a matrix of its own, multiplied by every eighth column of x from
j on, so that nothing is interleaved. Weights are the first operand of the product: they stay in registers.

Where rows are too few to fill the GPU, K is cut in slices, whose sums a second launch adds in their order.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.triton_runtime import jit, stored_dtype, tl, triton

MOST_TOKENS = 64
MOST_SLICES = 16


@jit
def sums_of_blocks(
    x_rows,  # where tokens begin, [BLOCK_M]
    row_inside,
    codes_rows,  # where rows of the weight begin, [BLOCK_N]; words of WORD values
    scale_rows,
    zero_rows,  # or None
    column_inside,
    first,  # of K
    last,
    k,
    width,  # words of a row
    GROUP_SIZE: tl.constexpr,  # 0: the whole row is one
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_N, BLOCK_M]: of the weight's columns first .. last, scaled."""
    BLOCK_N: tl.constexpr = codes_rows.shape[0]
    BLOCK_M: tl.constexpr = x_rows.shape[0]
    WORDS: tl.constexpr = BLOCK_K // WORD
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        word = start // WORD + tl.arange(0, WORDS)
        inside = column_inside[:, None] & (word < width)[None, :]
        words = tl.load(codes_rows[:, None] + word[None, :], mask=inside, other=0)
        group = 0 if GROUP_SIZE == 0 else start // GROUP_SIZE
        s = tl.load(scale_rows + group, mask=column_inside, other=0).to(tl.float32)
        zero = tl.zeros((BLOCK_N,), tl.float32)
        if zero_rows is not None:
            zero += tl.load(zero_rows + group, mask=column_inside, other=0).to(tl.float32)
        partial = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for j in tl.static_range(WORD):
            if BITS == 4:  # a nibble in the mantissa of 2**23 is the float 2**23 + nibble
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
def _finished(sums, bias, residual, token_scale, rows, row_inside, columns, column_inside, n):
    """sums [BLOCK_M, BLOCK_N] by the tokens' scales, with bias and residual; each of them may be None."""
    if token_scale is not None:
        sums *= tl.load(token_scale + rows, mask=row_inside, other=0)[:, None]
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
    token_scale,
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
    sums = sums_of_blocks(
        x + rows * x_stride,
        row_inside,
        codes + columns * codes_stride,
        scale + columns * scale_stride,
        zero_point,
        column_inside,
        first,
        min(first + steps * BLOCK_K, k),
        k,
        width,
        GROUP_SIZE,
        BITS,
        WORD,
        BLOCK_K,
    )
    sums = tl.trans(sums)
    inside = row_inside[:, None] & column_inside[None, :]
    if SLICES > 1:
        out += tl.program_id(1).to(tl.int64) * m * n
    else:
        sums = _finished(
            sums, bias, residual, token_scale, rows, row_inside, columns, column_inside, n
        )
    at = rows[:, None] * n + columns[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@jit
def _combine(
    partial,  # float32 [slices, m, n]
    bias,
    residual,
    token_scale,
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
    sums = _finished(sums, bias, residual, token_scale, rows, row_inside, columns, column_inside, n)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


def block_of_k(group_size: int, groups: int) -> int:
    """Elements of K multiplied at a time, all of one group; 0 where the kernel can't take the groups."""
    if groups == 1:
        return 128
    return next((block for block in (128, 64, 32) if group_size % block == 0), 0)


def words_of(codes: Tensor, bits: int, block: int) -> tuple[Tensor, int]:
    """The codes as the longest words that their layout and a product of `block // word` allow; values of a word."""
    if bits == 8:
        return codes, 1
    for word, dtype in ((8, torch.int32), (4, torch.int16)):
        layout = (codes.data_ptr(), codes.shape[-1], *codes.stride()[:-1])
        if block // word >= 16 and all(n % (word // 2) == 0 for n in layout):
            return codes.view(dtype), word
    return codes, 2


def plan(n: int, k: int, block: int, multiprocessors: int) -> tuple[int, int]:
    """Slices of K, and blocks of a slice: two programs of 64 rows for each multiprocessor, where K is that long."""
    blocks = -(-k // block)
    wanted = -(-2 * multiprocessors // -(-n // 64))
    steps = -(-blocks // max(1, min(wanted, MOST_SLICES, blocks // 4)))
    return -(-blocks // steps), steps


def weight_mm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    token_scale: Tensor | None,
    *,
    bits: int,
    group_size: int,
    slices: int | None = None,
) -> Tensor:
    """The product of `weight_linear`, of at most MOST_TOKENS tokens and groups that `block_of_k` takes; M, N, K > 0.

    token_scale: float32 [M], by which the sums are multiplied as well. slices: of K, for tests.
    """
    (m, k), (n, groups), dtype = x.shape, scale.shape, x.dtype
    if x.device.type == "cpu":  # the interpreter has no bfloat16
        x = x.float()
    x, codes, scale = (
        part if part.stride(1) == 1 else part.contiguous() for part in (x, codes, scale)
    )
    zeros, *ends = (
        None if part is None else part.contiguous()
        for part in (zero_point, bias, residual, token_scale)
    )
    block = block_of_k(group_size, groups)
    words, word = words_of(codes, bits, block)
    planned, steps = plan(n, k, block, _multiprocessors(x.device))
    if slices is not None:
        blocks = triton.cdiv(k, block)
        steps = triton.cdiv(blocks, slices)
        planned = triton.cdiv(blocks, steps)
    out = x.new_empty((m, n), dtype=stored_dtype(dtype, x.device))
    to = x.new_empty((planned, m, n), dtype=torch.float32) if planned > 1 else out
    block_m = max(16, triton.next_power_of_2(m))
    with torch.cuda.device_of(x):
        _kernel[(triton.cdiv(n, 64), planned)](
            *(x, words, scale, zeros, *ends, to, m, n, k, words.shape[1]),
            *(x.stride(0), words.stride(0), scale.stride(0), groups, steps),
            SLICES=planned,
            GROUP_SIZE=0 if groups == 1 else group_size,
            BITS=bits,
            WORD=word,
            BLOCK_M=block_m,
            BLOCK_N=64,
            BLOCK_K=block,
            num_warps=4,
            num_stages=3,
        )
        if planned > 1:
            grid = (triton.cdiv(n, 256), triton.cdiv(m, 4))
            _combine[grid](to, *ends, out, m, n, planned, m * n, BLOCK_M=4, BLOCK_N=256)
    return out.to(dtype)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
