"""Many tokens times the weights of the experts that a router chose, in Triton: the pairs of an expert make up tiles.

`pairs_by_expert` sorts the pairs by expert, on the device, and one launch multiplies. A program multiplies BLOCK_N
rows of an expert's weight by BLOCK_M of its pairs. It reads the rows of x where the tokens are and writes each result
where its pair is, so neither is gathered or sorted. The weight is the first operand of the product, in registers. A
block of K lies in one group, so its sum is scaled once, in float32, and the weight is never rounded.

The grid covers the most tiles that any choice of experts can give. A program finds its expert from the ends of the
experts' pairs, or finds that it has none. Ids that no expert has come last, and their results are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.runtime.triton_runtime import (
    KeptKernel,
    jit,
    runs_on,
    stored_dtype,
    tl,
    triton,
)
from lowbit_kernels.weight_only.expert_operands import ExpertOperands, Tensors
from lowbit_kernels.weight_only.pairs_by_expert import PairsByExpert

FORMATS = ("INT4", "INT8", "E4M3", "E2M1")
COLUMNS = 128
"""Rows of the weight in a tile."""
MOST_ROWS = 64
"""The most pairs of a tile. Tiles of 64 were the fastest, and smaller ones where experts have few pairs."""
MOST_TILES = 2**16 - 1
"""CUDA's limit of a grid's second dimension."""


def _assembly(code: str) -> tl.constexpr:
    """The eight numbers of each of two words of four-bit codes, in bf16: eight registers of two numbers."""
    lines = [".reg .b32 low, high, t, s;", "prmt.b32 low, $8, $9, 0x5410;"]
    lines.append("prmt.b32 high, $8, $9, 0x7632;")
    for i in range(8):
        half = "low" if i < 4 else "high"
        lines += [f"shr.u32 t, {half}, {4 * (i % 4)};", code.replace("$i", f"${i}")]
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


if triton is not None:
    # The mantissa of 128 with a code in it is 128 + code, and a code is the number + 8.
    INT4_IN_BF16 = _assembly(
        "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; mov.b32 s, 0x3f803f80;\n"
        "{ .reg .b32 c; mov.b32 c, 0xc308c308; fma.rn.bf16x2 $i, t, s, c; }"
    )
    # The lowest bits of an exponent and the highest of a mantissa, times 2**126.
    E2M1_IN_BF16 = _assembly(
        "and.b32 s, t, 0x00080008; shl.b32 s, s, 12; and.b32 t, t, 0x00070007; shl.b32 t, t, 6;\n"
        "or.b32 t, t, s; mov.b32 s, 0x7e807e80;\n"
        "{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.bf16x2 $i, t, s, c; }"
    )
    REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")


@jit
def _eight_numbers(words, CODES: tl.constexpr):
    """The numbers of words of eight four-bit codes, those of the j-th codes in the j-th of eight tensors."""
    return tl.inline_asm_elementwise(
        INT4_IN_BF16 if CODES == "INT4" else E2M1_IN_BF16,
        REGISTERS,
        args=[words],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@jit
def _of_codes(nibbles, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of four-bit codes, by operations that every GPU and the interpreter have."""
    if CODES == "INT4":
        numbers = (nibbles - 8).to(DTYPE)
    else:
        exponent, fraction = (nibbles >> 1) & 3, (nibbles & 1).to(tl.float32) * 0.5
        power = (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
        magnitude = tl.where(exponent == 0, fraction, (1 + fraction) * power)
        numbers = tl.where(nibbles > 7, -magnitude, magnitude).to(DTYPE)
    return numbers


@jit
def _of_nibbles(
    words, CODES: tl.constexpr, WORD: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """The numbers of words of WORD four-bit codes [BLOCK_N, words]: [BLOCK_N, WORD * words]."""
    N: tl.constexpr = words.shape[0]
    K: tl.constexpr = words.shape[1] * WORD
    if ASSEMBLY and WORD == 8:
        n0, n1, n2, n3, n4, n5, n6, n7 = _eight_numbers(words, CODES)
        even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
        odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
        numbers = tl.reshape(tl.join(even, odd), (N, K))
    else:
        shifts = 4 * tl.arange(0, WORD)
        nibbles = (words.to(tl.int32)[:, :, None] >> shifts[None, None, :]) & 15
        nibbles = tl.reshape(nibbles, (N, K))
        numbers = _of_codes(nibbles, CODES, DTYPE)
    return numbers


@jit
def _numbers(
    words, CODES: tl.constexpr, WORD: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """The numbers of codes [BLOCK_N, words]: [BLOCK_N, BLOCK_K] in DTYPE, exactly."""
    if CODES == "INT4" or CODES == "E2M1":
        numbers = _of_nibbles(words, CODES, WORD, DTYPE, ASSEMBLY)
    elif CODES == "E4M3":
        numbers = words.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        numbers = words.to(DTYPE)
    return numbers


@jit
def _scales(at, inside, BYTES: tl.constexpr):
    if BYTES:
        s = tl.load(at, mask=inside, other=0).to(tl.int32)
        bits = tl.where(s == 0, 0x400000, tl.where(s == 255, 0x7FC00000, s << 23))
        return bits.to(tl.float32, bitcast=True)
    return tl.load(at, mask=inside, other=0).to(tl.float32)


@jit
def _find(ends, pairs, experts, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's expert (more than `experts` where there is none), and where its pairs begin and end. The pairs after the
    last end are those of "expert" `experts`."""
    every = tl.arange(0, EXPERTS)
    end = tl.minimum(tl.load(ends + every, mask=every < experts, other=pairs), pairs)
    inside = (every > 0) & (every <= experts)
    start = tl.minimum(tl.load(ends + every - 1, mask=inside, other=0), pairs)
    tiles = tl.maximum(tl.where(every <= experts, end - start, 0), 0)
    tiles = (tiles + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    own = every == expert
    first = tl.sum(tl.where(own, start + (tile - upto + tiles) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)


@jit
def _sums(
    x_rows,  # pointers to rows of x, [BLOCK_M]
    row_inside,
    codes_rows,  # pointers to rows of the weight, [BLOCK_N], in words of WORD codes
    scale_rows,
    zero_rows,  # or None
    inside,
    k,
    width,
    CODES: tl.constexpr,
    WORD: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BYTE_SCALES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The scaled sums over the first k columns of the weight: float32 [BLOCK_N, BLOCK_M]."""
    sums = tl.zeros((codes_rows.shape[0], x_rows.shape[0]), tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        word = start // WORD + tl.arange(0, BLOCK_K // WORD)
        wanted = inside[:, None] & (word < width)[None, :]
        words = tl.load(codes_rows[:, None] + word[None, :], mask=wanted, other=0)
        group = 0 if GROUP_SIZE == 0 else start // GROUP_SIZE
        element = start + tl.arange(0, BLOCK_K)
        wanted = row_inside[:, None] & (element < k)[None, :]
        tokens = tl.load(x_rows[:, None] + element[None, :], mask=wanted, other=0)
        numbers = _numbers(words, CODES, WORD, tokens.dtype, ASSEMBLY)
        if zero_rows is not None:
            zero = tl.load(zero_rows + group, mask=inside, other=0)
            numbers -= zero.to(numbers.dtype)[:, None]
        if GROUP_SIZE == 0:
            sums = tl.dot(numbers, tl.trans(tokens), sums, input_precision="ieee")
        else:
            partial = tl.dot(numbers, tl.trans(tokens), input_precision="ieee")
            sums += partial * _scales(scale_rows + group, inside, BYTE_SCALES)[:, None]
    if GROUP_SIZE == 0:
        sums *= _scales(scale_rows, inside, BYTE_SCALES)[:, None]
    return sums


@jit
def _sums_of_words(
    x_rows,
    row_inside,
    codes_rows,
    scale_rows,
    zero_rows,
    inside,
    k,
    width,
    CODES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BYTE_SCALES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """`_sums` for words of eight codes, and x in the order of `in_order_of_words`: code j of each of 16 words is a
    matrix, which is multiplied by 16 adjacent columns of x. So codes stay in the registers that loaded them. Powers of
    two for each 32 elements are multiplied into the numbers, exactly."""
    BY_WORD: tl.constexpr = BYTE_SCALES and GROUP_SIZE == 32
    FLUSHES: tl.constexpr = GROUP_SIZE > 0 and not BY_WORD
    sums = tl.zeros((codes_rows.shape[0], x_rows.shape[0]), tl.float32)
    own = tl.arange(0, 16)
    for start in tl.range(0, k, 128):
        word = (start // 8 + own)[None, :]
        wanted = inside[:, None] & (word < width)
        words = tl.load(codes_rows[:, None] + word, mask=wanted, other=0)
        if ASSEMBLY:
            numbers = _eight_numbers(words, CODES)
        group = 0 if GROUP_SIZE == 0 else start // GROUP_SIZE
        if BY_WORD:
            scales = _scales(scale_rows[:, None] + word // 4, wanted, True).to(
                x_rows.dtype.element_ty
            )
        partial = tl.zeros(sums.shape, tl.float32) if FLUSHES else sums
        for j in tl.static_range(8):
            at = x_rows[:, None] + (start + 16 * j + own)[None, :]
            tokens = tl.load(at, mask=row_inside[:, None], other=0)
            if ASSEMBLY:  # noqa: SIM108 a tuple has no item in the other case
                number = numbers[j]
            else:
                number = _of_codes((words >> (4 * j)) & 15, CODES, tokens.dtype)
            if BY_WORD:
                number *= scales
            if zero_rows is not None:
                zero = tl.load(zero_rows + group, mask=inside, other=0)
                number -= zero.to(number.dtype)[:, None]
            partial = tl.dot(number, tl.trans(tokens), partial, input_precision="ieee")
        if FLUSHES:
            sums += partial * _scales(scale_rows + group, inside, BYTE_SCALES)[:, None]
        else:
            sums = partial
    if GROUP_SIZE == 0:
        sums *= _scales(scale_rows, inside, BYTE_SCALES)[:, None]
    return sums


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
    CODES: tl.constexpr,
    WORD: tl.constexpr,  # codes of a word
    GROUP_SIZE: tl.constexpr,  # 0: a row is one group
    BYTE_SCALES: tl.constexpr,
    GATED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ORDERED: tl.constexpr,  # x is in the order of `in_order_of_words`
    EXPERTS: tl.constexpr,  # a power of two, more than `experts`
    BLOCKS: tl.constexpr,  # of M, N and K
):
    BLOCK_M: tl.constexpr = BLOCKS[0]
    expert, first, end = _find(ends, pairs, experts, tl.program_id(1), EXPERTS, BLOCK_M)
    if expert > experts:
        return
    at = first + tl.arange(0, BLOCK_M)
    rows = at if order is None else tl.load(order + at, mask=at < end, other=0)
    rows = rows.to(tl.int64)
    columns, inside = _columns(tl.program_id(0), n, GATED, BLOCKS[1])
    exists = expert < experts
    e = tl.where(exists, expert, 0).to(tl.int64)  # ids that no expert has come last
    if zero_point is not None:
        zero_point += e * zero_expert + columns * zero_stride
    x_rows = x + (rows // top) * x_stride
    codes_rows = codes + e * codes_expert + columns * codes_stride
    scale_rows = scale + e * scale_expert + columns * scale_stride
    k = tl.where(exists, k, 0)
    parts = (x_rows, at < end, codes_rows, scale_rows, zero_point, inside, k)
    if ORDERED:
        sums = _sums_of_words(*parts, width, CODES, GROUP_SIZE, BYTE_SCALES, ASSEMBLY)
    else:
        sums = _sums(
            *parts, width, CODES, WORD, GROUP_SIZE, BYTE_SCALES, ASSEMBLY, BLOCK_K=BLOCKS[2]
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


def in_order_of_words(x: Tensor) -> Tensor:
    """x [T, K], padded to a multiple of 128 columns, with those of each 128 in the order 0, 8, 16 … 120, 1, 9 …: first
    those of the first codes of 16 words, then those of the second ones."""
    if x.shape[1] % 128:
        x = F.pad(x, (0, -x.shape[1] % 128))
    return x.view(len(x), -1, 16, 8).transpose(2, 3).reshape(x.shape)


def takes(operands: ExpertOperands) -> bool:
    """True if the kernel multiplies these: int4 and int8 with zero points or without, float8, and MXFP4; groups of
    multiples of 32; up to four million pairs."""
    scale = operands.scale
    return (
        operands.name in FORMATS
        and (scale.dtype.is_floating_point or scale.dtype == torch.uint8)
        and scale.dtype != torch.float8_e4m3fn
        and operands.has_integer_zeros
        and (operands.group % 32 == 0)
        and (operands.name != "E4M3" or operands.x.shape[1] == operands.codes.shape[2])
        and (operands.name != "E4M3" or operands.x.device.type == "cuda")
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
        x = operands.x
        self.experts = operands.codes.shape[0]
        self.pairs, self.top = operands.pairs, operands.pairs // x.shape[0]
        self.shape, self.dtype = (self.pairs, operands.results), x.dtype
        self.stored = stored_dtype(x.dtype, x.device)
        self.word = operands.word
        is_cuda = x.device.type == "cuda" and torch.version.hip is None
        # Powers of two in float16 would leave its range.
        by_word = operands.scale.dtype == torch.uint8 and x.dtype != torch.float16
        by_word = by_word and operands.group == 32
        self.orders = self.word == 8 and (operands.group % 128 == 0 or by_word)
        block = next(b for b in (128, 64, 32) if operands.group % b == 0)
        if x.dtype == torch.float32:
            block = min(block, 64)
        constants = {
            "CODES": operands.name,
            "WORD": self.word,
            "GROUP_SIZE": operands.group,
            "BYTE_SCALES": operands.scale.dtype == torch.uint8,
            "GATED": operands.gated,
            "ASSEMBLY": is_cuda and x.dtype == torch.bfloat16,
            "ORDERED": self.orders,
            "EXPERTS": triton.next_power_of_2(self.experts + 1),
            "BLOCKS": (_rows(operands), COLUMNS, block),
        }
        warps, stages = 8 if self.orders else 4, 3 if block == 128 else 4
        self.kernel = KeptKernel(_kernel, constants, num_warps=warps, num_stages=stages)
        self.by_expert = PairsByExpert(self.pairs, self.experts, x)
        self.grid = _grid(operands)

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, ids, _ = tensors
        return self.of_sorted(x, codes, scale, zero_point, bias, *self.by_expert.sorted(ids))

    def of_sorted(
        self,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        bias: Tensor | None,
        order: Tensor | None,
        ends: Tensor,
    ) -> Tensor:
        """The product where pairs `order` are sorted by expert, and end at `ends`; None: the pairs as they are."""
        k = x.shape[1]
        if x.device.type == "cpu":  # the interpreter has no bfloat16
            x = x.float()
        x = x if x.stride(1) == 1 else x.contiguous()
        x = in_order_of_words(x) if self.orders else x
        codes = codes if codes.stride(2) == 1 else codes.contiguous()
        scale = scale if scale.stride(2) == 1 else scale.contiguous()
        zeros = None if zero_point is None else zero_point.contiguous()
        words = codes.view(torch.int32 if self.word == 8 else torch.int8)
        out = x.new_empty(self.shape, dtype=self.stored)
        with torch.cuda.device_of(x):
            self.kernel(
                self.grid,
                *(x, words, scale, zeros, None if bias is None else bias.contiguous()),
                *(order, ends, out, self.pairs, self.experts, codes.shape[1], k),
                *(words.shape[2], self.top, x.stride(0)),
                *(*words.stride()[:2], *scale.stride()[:2]),
                *((0, 0) if zeros is None else zeros.stride()[:2]),
            )
        return out.to(self.dtype)
