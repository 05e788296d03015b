"""Tokens times the weights of the experts that a router chose, in Triton, for GPUs and layouts that the CUDA kernels
don't take: the pairs of an expert make up tiles.

`pairs_by_expert` sorts the pairs by expert, on the device, and one launch multiplies. A program multiplies BLOCK_N rows
of an expert's weight by BLOCK_M of its pairs, as `weight_mm_triton` does. It reads the rows of x where the tokens are
and writes each result where its pair is, so neither is gathered or sorted. The weight is never rounded.

The grid covers the most tiles that any choice of experts can give. A program finds its expert from the ends of the
experts' pairs, or finds that it has none. Ids that no expert has come last, and their results are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.matmul.grouped_mm_triton import find_tile
from lowbit_kernels.runtime.triton_runtime import (
    KeptKernel,
    jit,
    runs_on,
    stored_dtype,
    tl,
    triton,
)
from lowbit_kernels.weight_only.codes_format import E2M1
from lowbit_kernels.weight_only.dequantize_triton import kind_of, on_device, scale_bytes
from lowbit_kernels.weight_only.expert_operands import ExpertOperands, SortedPairs, Tensors
from lowbit_kernels.weight_only.pairs_by_expert import PairsByExpert
from lowbit_kernels.weight_only.weight_mm_triton import (
    block_of_k,
    codes_of_word,
    in_words,
    sums_of_blocks,
)

COLUMNS = 128
"""Rows of the weight in a tile."""
MOST_ROWS = 64
"""The most pairs of a tile. Tiles of 64 were the fastest, and smaller ones where experts have few pairs."""
MOST_TILES = 2**16 - 1
"""CUDA's limit of a grid's second dimension."""


@jit
def _columns(program, n, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of the weight for a program, and which exist. With GATED, the first half has `gate`, the second `up`."""
    own = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        column = program * HALF + own % HALF
        return tl.where(own < HALF, column, n // 2 + column).to(tl.int64), column < n // 2
    columns = program * BLOCK_N + own
    return columns.to(tl.int64), columns < n


@jit
def _kernel(
    x,
    codes,
    scale,
    zero_point,
    bias,
    table,
    whole,  # the global scale
    order,  # None: the pairs are sorted by expert
    ends,
    out,
    pairs,
    experts,
    n,
    k,
    width,  # words of a row
    top,  # pairs of a row of x
    x_stride,
    codes_expert,
    codes_stride,
    scale_expert,
    scale_stride,
    zero_expert,
    zero_stride,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,  # codes of a word
    GROUP_SIZE: tl.constexpr,  # 0: a row is one group
    SCALE: tl.constexpr,
    GATED: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, more than `experts`
    BLOCKS: tl.constexpr,  # of M, N and K
):
    BLOCK_M: tl.constexpr = BLOCKS[0]
    expert, tile, start, end = find_tile(
        ends, pairs, experts, tl.program_id(1), EXPERTS, BLOCK_M, 1
    )
    if expert > experts:
        return
    at = start + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = at if order is None else tl.load(order + at, mask=at < end, other=0)
    rows = rows.to(tl.int64)
    columns, inside = _columns(tl.program_id(0), n, GATED, BLOCKS[1])
    exists = expert < experts
    e = tl.where(exists, expert, 0).to(tl.int64)  # ids that no expert has come last
    if zero_point is not None:
        zero_point += e * zero_expert + columns * zero_stride
    codes += e * codes_expert + columns * codes_stride
    scale += e * scale_expert + columns * scale_stride
    parts = (x + (rows // top) * x_stride, at < end, codes, scale, zero_point, inside)
    upto = (0, tl.where(exists, k, 0), k, width)
    sums = sums_of_blocks(
        *parts, *upto, GROUP_SIZE, BITS, WORD, BLOCKS[2], table, whole, KIND=KIND, SCALE=SCALE
    )
    if bias is not None:
        sums += tl.load(bias + e * n + columns, mask=inside & exists, other=0)[:, None]
    _store(out, sums, rows, at < end, n, GATED)


@jit
def _store(out, sums, rows, row_inside, n, GATED: tl.constexpr):
    """Write sums [BLOCK_N, BLOCK_M] to the rows of their pairs."""
    N: tl.constexpr = sums.shape[0]
    if GATED:
        both = tl.permute(tl.reshape(sums, (2, N // 2, sums.shape[1])), (2, 1, 0))
        gate, up = tl.split(both)
        y = gate / (1 + tl.exp(-gate)) * up
        columns, n = tl.program_id(0) * (N // 2) + tl.arange(0, N // 2), n // 2
    else:
        y = tl.trans(sums)
        columns = tl.program_id(0) * N + tl.arange(0, N)
    wanted = row_inside[:, None] & (columns < n)[None, :]
    tl.store(out + rows[:, None] * n + columns[None, :], y.to(out.dtype.element_ty), mask=wanted)


def takes(operands: ExpertOperands) -> bool:
    """True if the kernel multiplies these: int4 and int8 with zero points or without, float8, and tables of E2M1, which
    are exact in x's dtype; groups that `block_of_k` takes; up to four million pairs."""
    format, groups = operands.format, operands.scale.shape[2]
    padded = operands.codes.shape[2] * 8 // format.bits
    return (
        (format.is_int4_or_int8 or format.exponent == 4 or format.table == E2M1)
        and bool(block_of_k(operands.group_size, groups))
        and (not format.exponent or operands.x.shape[1] == padded)
        and _grid(operands)[1] <= MOST_TILES
    )


def _rows(operands: ExpertOperands) -> int:
    """Pairs of a tile."""
    mean = -(-operands.pairs // operands.codes.shape[0])
    return max(16, min(triton.next_power_of_2(mean), MOST_ROWS))


def _grid(operands: ExpertOperands) -> tuple[int, int]:
    """Tiles of columns, and the most tiles of pairs that any choice of experts has."""
    pairs, experts = operands.pairs, operands.codes.shape[0]
    own = COLUMNS // 2 if operands.gated else COLUMNS
    return -(-operands.results // own), min(pairs, pairs // _rows(operands) + experts + 1)


def product(operands: ExpertOperands) -> ExpertsTriton | None:
    """The planned product; None where Triton doesn't run, or the operands are not the kernel's."""
    if not (runs_on(operands.x.device) and takes(operands)):
        return None
    return ExpertsTriton(operands)


class ExpertsTriton:
    """The product of operands for which `takes` holds."""

    def __init__(self, operands: ExpertOperands) -> None:
        x, codes = operands.x, operands.codes
        self.experts, self.format = codes.shape[0], operands.format
        self.pairs, self.top = operands.pairs, operands.pairs // x.shape[0]
        self.shape, self.dtype = (self.pairs, operands.results), x.dtype
        self.stored = stored_dtype(x.dtype, x.device)
        block = block_of_k(operands.group_size, operands.scale.shape[2])
        if x.dtype == torch.float32:
            block = min(block, 64)
        codes = codes if codes.strides[2] == 1 else codes.copied()
        self.word = codes_of_word(codes, self.format.bits, block)
        self.constants = {
            "KIND": kind_of(self.format),
            "BITS": self.format.bits,
            "WORD": self.word,
            "GROUP_SIZE": operands.group,
            "GATED": operands.gated,
            "EXPERTS": triton.next_power_of_2(self.experts + 1),
            "BLOCKS": (_rows(operands), COLUMNS, block),
        }
        self.kernels: dict[str, KeptKernel] = {}
        self.by_expert = PairsByExpert(self.pairs, self.experts, x)
        self.grid = _grid(operands)

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, ids, global_scale = tensors
        parts = (x, codes, scale, zero_point, bias, *self.by_expert.sorted(ids))
        return self.of_sorted(SortedPairs(*parts, global_scale))

    def of_sorted(self, pairs: SortedPairs) -> Tensor:
        """The product of sorted pairs, whose rows of x are read where they are."""
        x, codes, scale, zero_point, bias, order, ends, global_scale = pairs
        k = x.shape[1]
        if x.device.type == "cpu":  # the interpreter has no bfloat16
            x = x.float()
        x = x if x.stride(1) == 1 else x.contiguous()
        codes = codes if codes.stride(2) == 1 else codes.contiguous()
        scale = scale if scale.stride(2) == 1 else scale.contiguous()
        zeros = None if zero_point is None else zero_point.contiguous()
        table = on_device(self.format.table, x.device) if self.format.table else None
        if codes.dtype != torch.uint8:
            codes = codes.view(torch.int8)
        words, (stored, kind) = in_words(codes, self.word), scale_bytes(scale, global_scale)
        if kind not in self.kernels:
            constants = {**self.constants, "SCALE": kind}
            self.kernels[kind] = KeptKernel(_kernel, constants, num_warps=4, num_stages=3)
        out = x.new_empty(self.shape, dtype=self.stored)
        with torch.cuda.device_of(x):
            self.kernels[kind](
                self.grid,
                *(x, words, stored, zeros, None if bias is None else bias.contiguous()),
                *(table, global_scale, order, ends, out),
                *(self.pairs, self.experts, codes.shape[1], k),
                *(words.shape[2], self.top, x.stride(0)),
                *(*words.stride()[:2], *scale.stride()[:2]),
                *((0, 0) if zeros is None else zeros.stride()[:2]),
            )
        return out.to(self.dtype)
