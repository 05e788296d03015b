"""The decode kernel: launches ``weight_mm_decode_sm90.cu``, a small-batch GEMM bound by the weight's bytes.

    out[m, n] = token_scale[m] * sum_k x[m, k] * weight[n, k] + bias[n] + residual[m, n]

It takes at most 16 tokens and weights of 1 to 8 bits in the formats of `codes_format`, on GPUs of compute capability
9.0: integers, float8 e4m3, and tables of up to 16 numbers. The weight is not rounded: codes minus zero points are exact
in x's dtype, sums and scales are float32. bfloat16 x is multiplied by powers of two, which are undone in float32; only
products below 2^-27 of a token's largest may be lost. Only numbers of a table are rounded to x's dtype, after a factor
that makes them round well (`table_of`): NF4's to 7e-4 of their norm in bfloat16.

With `WeightOperands.rounds` the kernel rounds x [m, k] to int8 or e4m3 codes with a scale a token, as `quantize_rowcol`
does, and multiplies these. A launch of its own for that would take 2 to 3 us. With `WeightOperands.exact` as well, int8
products with one scale a row are summed in int32 alone, so that no order of the sums can change a result.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Argument, Launch, Map
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.runtime.tensor_map import takes_rows
from lowbit_kernels.weight_only.codes_format import E2M1, CodesFormat
from lowbit_kernels.weight_only.one_launch import CODES, OUT, SCALE, OneLaunch, X
from lowbit_kernels.weight_only.weight_lookup_sm90 import table_of
from lowbit_kernels.weight_only.weight_mm_decode_memory import (
    ALONE,
    BOX_BYTES,
    CHUNK,
    FEW_STAGES,
    IN_FLIGHT,
    LOOK_UP_BYTES,
    MAX_STAGES,
    ROWS,
    bank_step,
    chunk_bytes,
    neighbours,
    scale_pitch_of,
    stage_bytes,
    stages_of,
    sums_and_x,
    with_boxes,
)
from lowbit_kernels.weight_only.weight_operands import (
    E4M3,
    GROUP_STEP,
    HALVES,
    SCALE_MACROS,
    WeightOperands,
)

MAX_TOKENS, WARPS = 16, 16
THREADS = {1: 32 * (WARPS + 4), 2: 32 * (WARPS + 2)}  # of a block, by blocks of a multiprocessor
COLUMNS = 8  # of mma
TEAM_PART = 17 * 1024  # most bytes of codes that a team loads at once
KEPT_LIMIT = 32 * 1024  # bytes of shared memory for sums that wait for those of other blocks
# By blocks of a multiprocessor: bytes of shared memory of each, and registers of a thread that hold x.
RESIDENT = {1: (nvrtc.SHARED_LIMIT, 64), 2: (113 * 1024, 16)}
ARGUMENTS = 24  # of the kernel
EARLY: set[int] = set()
"""Handles of kernels that copy parts early where their last argument, `constant`, is 1."""
ROUNDING_BYTES = 1536  # of shared memory, for the scales of tokens
ROUNDS_MACROS = {torch.int8: "INT8", E4M3: "E4M3"}
PARTS = (
    "quantize/row_codes.cuh",
    "weight_only/round_tokens_sm90.cuh",
    "weight_only/int4_as_int8.cuh",
    "weight_only/weight_codes_sm90.cuh",
    "weight_only/weight_mm_decode_copies_sm90.cuh",
    "weight_only/weight_mm_decode_products_sm90.cuh",
    "weight_only/weight_mm_decode_sm90.cu",
)


@dataclass(frozen=True)
class DecodeVariant:
    """The macros that the kernel is compiled with; the head of ``weight_mm_decode_sm90.cu`` explains each."""

    codes: str
    bits: int
    group: int
    scaling: str
    x: str
    out: str
    scale: str
    zero: str
    tokens: int
    chunks: int
    height: int
    split: int
    parts: int
    whole: bool
    even: bool
    box: int
    paired: bool
    teams: int
    resident: int
    boxed: bool
    look_up: bool
    loads_x: bool
    early: int
    rounds: str = "NONE"
    source: str = "BF16"  # of x in memory, where it is rounded
    exact: bool = False
    gate: str = "NONE"
    normed: bool = False
    values: str = ""  # of a table
    unit_value: str = "1.0f"


@dataclass(frozen=True)
class DecodeDivision:
    """How a product is divided among blocks and warps."""

    tokens: int  # computed, a power of 2
    height: int  # of a tile, in 16 rows
    split: int  # blocks of a cluster, which share K (split-K)
    parts: int  # of a block's K, loaded one after the other
    chunks: int  # of a part, for one warp
    pitch: int  # bytes from row to row of a part in shared memory
    grid: int  # blocks
    stages: int  # of the pipeline
    shared: int  # bytes of shared memory
    box: int  # chunks whose x one copy loads; 0: x is loaded without the TMA's boxes
    apart: int  # stages that share no memory with x
    teams: int  # that take turns at tiles
    resident: int  # blocks of a multiprocessor, of this launch and the next one
    depth: int  # chunks whose groups have columns of mma of their own; 0: groups have none
    scale_pitch: int  # bytes between rows of a part's scales; 0: whole rows are copied
    looks_up: bool  # half of the codes of E2M1, in a table
    loads_x: bool = False  # by the lanes that multiply it
    early: int = 0  # parts that are copied early where no launch writes the weight


@functools.lru_cache(maxsize=4096)
def plan(
    m: int,
    n: int,
    k: int,
    bits: int,
    multiprocessors: int,
    *,
    scale_bytes: int = 0,
    vector: int = 4,
    depth: int = 0,
    table_bytes: int = 0,
    rounding: bool = False,
    scale_box: tuple[int, int] = (0, 16),
    is_e2m1: bool = False,
    splits: tuple[int, ...] = (1, 2, 4, 8),
    heights: tuple[int, ...] | None = None,
) -> DecodeDivision | None:
    """The plan with the least estimated time; None where k is too long for any.

    Args:
        k: the codes' K, padded.
        scale_bytes: bytes of the scales and zero points of a row.
        vector: see `neighbours`.
        depth: chunks whose groups have columns of mma of their own; 0: the groups of a chunk do not.
        table_bytes: bytes of shared memory for a table.
        rounding: the kernel rounds x.
        scale_box: see `_scale_box`.
        is_e2m1: the codes are numbers of 4 bits, which can be looked up in a table.
        splits, heights: the choices; by default no higher tiles where they were never faster.
    """
    weight = _Unpacking(scale_bytes, vector, depth, table_bytes, rounding, scale_box, is_e2m1)
    heights = heights or ((1,) if m <= 8 or bits < 8 else (1, 2))
    least = 1 << (m - 1).bit_length()
    # At 8 bits compute 8 tokens where their x fits: 5 to 13% faster for 4, whose x would pass through shared memory.
    for tokens in (8, least) if bits == 8 and 1 < m < 8 else (least,):
        shape = (m, tokens, n, k, bits, multiprocessors)
        plans = [_divided(*shape, weight, split, height) for split in splits for height in heights]
        if possible := [one for one in plans if one is not None]:
            break
    # Higher tiles leave enough registers only with one chunk a warp, and were faster only with at most two blocks.
    low = [p for p in possible if p.height == 1 or (p.parts * p.chunks == 1 and p.split <= 2)]
    possible = low or possible
    if not possible:
        return None
    best = min(possible, key=lambda one: _nanoseconds(one, m, n, k, bits, multiprocessors))
    if best.tokens > 1 or best.split > 1 or bits > 4 or table_bytes or rounding or is_e2m1:
        return best
    if best.teams == 2 and bits > 2:  # measured: faster than beside the next launch
        return best
    return _divided(*shape, weight, 1, 1, resident=2) or best


def _nanoseconds(
    one: DecodeDivision, m: int, n: int, k: int, bits: int, multiprocessors: int
) -> float:
    """The estimated time without the 2.2 us of every launch, fitted to measurements on an H200.

    All blocks together load 4,100 bytes of the weight a nanosecond; a tile takes at least the time of its chunks.
    Before that a block loads 31 bytes of x a nanosecond, partly hidden. At the end blocks exchange their sums.
    """
    slice_ = k * bits / (8 * one.split)
    waves = math.ceil(one.grid / multiprocessors)
    rounds = waves * math.ceil(-(-n // (ROWS * one.height)) / (one.grid // one.split))
    chunks = one.height * one.parts * one.chunks / one.teams / (2 if bits == 8 else 1)  # of 128
    seen = 0.6 if bits == 8 or one.box > 0 else 1.0
    work, exchange = 380 + 170 * chunks, 525 + 250 * one.split
    if m > 8:
        work = 450 + 400 * chunks
    if m > 8 and one.box > 0:
        seen, work, exchange = 0.35, 640 * chunks, 200 * one.split
    elif one.box > 0:
        exchange = 450 + 125 * one.split
    tile = max(one.height * ROWS * slice_ * one.grid / waves / 4100, work)
    x = m * slice_ * 16 / bits / 31 * seen
    return rounds * tile + waves * x + (exchange if one.split > 1 else 0)


class _Unpacking(NamedTuple):
    """The arguments of `plan` that depend on the format."""

    scale_bytes: int
    vector: int
    depth: int
    table_bytes: int
    rounding: bool
    scale_box: tuple[int, int]
    is_e2m1: bool


def _divided(
    m: int,
    tokens: int,
    n: int,
    k: int,
    bits: int,
    multiprocessors: int,
    weight: _Unpacking,
    split: int,
    height: int,
    resident: int = 1,
) -> DecodeDivision | None:
    """The plan for clusters of `split` blocks, tiles of `height` and m tokens computed as `tokens`; None if registers
    or shared memory are too small."""
    scale_bytes, vector, depth, table_bytes, rounding, scale_box, is_e2m1 = weight
    size = chunk_bytes(bits)
    chunks = -(-k * bits // (8 * size))
    if split > chunks:
        return None
    tiles, pieces = -(-n // (ROWS * height)), height * -(-tokens // 8)
    clusters = _clusters(tiles, pieces, split, multiprocessors)
    rounds, slice_ = -(-tiles // clusters), -(-chunks // split)
    gap = bank_step(bits, vector)
    if resident == 2 and rounds != 2:  # with fewer or more tiles a block slower
        return None
    # Teams are faster where the work takes longer than the codes do.
    is_slow = bits < 4 or (bits == 4 and (depth > 0 or table_bytes > 0 or is_e2m1))
    has_teams = is_slow and tokens * split * resident == 1 and rounds > 1 and slice_ <= 32
    shares = _shares(slice_, bits, tokens, gap, depth, resident, has_teams and not rounding)
    if shares is None:
        return None
    teams, parts, own = shares
    warps, part = WARPS // teams, -(-slice_ // parts)
    pitch = part * size
    pitch += (gap - pitch) % 128 if gap else 0
    copies_x = tokens * resident == 1 or (1 < tokens < 8 and parts > 2)
    x = slice_ * size * 16 // bits if copies_x else 0
    # 128 bytes more: for the last chunk of a row the kernel reads past the scales, and ignores these bytes.
    fixed = 512 + 128 + table_bytes + rounding * ROUNDING_BYTES
    fixed += sums_and_x(m, tokens, pieces, warps, rounds, split, x)
    room, is_one = RESIDENT[resident][0] - fixed, tokens * resident == 1 and not rounding
    stage, scale_pitch = stage_bytes(height, pitch + scale_bytes), 0
    # Measured: whole rows are copied faster, except where they take much memory or lanes read scales often.
    is_large = split * parts > 2 and (parts > 2 or min(room, IN_FLIGHT) < FEW_STAGES * stage)
    if is_one and (is_large or (is_e2m1 and depth == 0)):
        scale_pitch = scale_pitch_of(chunks, split, parts, *scale_box)
        stage = stage_bytes(height, pitch + (scale_pitch or scale_bytes))
    wanted = stages_of(rounds, parts, stage, teams, resident)
    looks_up = is_e2m1 and is_one and depth != 1  # measured: slower for groups of 16 by columns
    looks_up &= room - LOOK_UP_BYTES >= min(wanted, MAX_STAGES) * stage
    fixed, room = fixed + looks_up * LOOK_UP_BYTES, room - looks_up * LOOK_UP_BYTES
    stages = min(room // stage, wanted, MAX_STAGES) // teams * teams
    if stages < (wanted if resident == 2 else min(2, wanted)):
        return None
    shared, box, apart = fixed + stages * stage, 0, stages
    if bits < 8 and tokens >= 8:  # at 8 bits loading x takes less time than loading codes
        shared, box, apart = with_boxes(fixed, stage, stages, slice_, tokens)
    grid = clusters * split
    return DecodeDivision(
        *(tokens, height, split, parts, own, pitch, grid, stages, shared, box, apart),
        *(teams, resident, depth, scale_pitch, looks_up, resident == 2),
    )


def _clusters(tiles: int, pieces: int, split: int, multiprocessors: int) -> int:
    """The clusters of `split` blocks for so many tiles, whose sums have so many pieces."""
    # A cluster lies in one part of the GPU: 30 clusters of 4 or 15 of 8 fit on an H200 with 132 multiprocessors.
    usable = multiprocessors if split <= 2 else multiprocessors * 10 // 11
    clusters = min(tiles, max(usable // split, 1))
    if split == 1:
        return clusters
    # A cluster gets as many tiles as it can keep sums of. More clusters start when it is done.
    return min(tiles, clusters * -(-tiles * pieces * 512 // (clusters * KEPT_LIMIT)))


def _shares(
    slice_: int, bits: int, tokens: int, gap: int, depth: int, resident: int, has_teams: bool
) -> tuple[int, int, int] | None:
    """Teams, parts and a warp's chunks of a part whose x fits the registers; None where it never does."""
    for teams in (2, 1) if has_teams else (1,):
        warps = WARPS // teams
        parts = _parts(slice_, bits, gap, warps, teams, resident == 2 and bits > 2 and not depth)
        own = math.ceil(math.ceil(slice_ / parts) / warps)
        sets = parts * -(-own // depth) if depth else -(-parts * own // max(8 // tokens, 1))
        registers = sets * max(tokens // 8, 1) * (8 if bits == 8 else 16)
        if registers <= RESIDENT[resident][1] // teams:
            return teams, parts, own
    return None


def _parts(slice_: int, bits: int, gap: int, warps: int, teams: int, is_single: bool) -> int:
    """The number of parts of a slice of so many chunks, whose rows are apart by up to 112 bytes if there is a `gap`.

    Args:
        is_single: a warp has one chunk of a part, which takes fewer registers.
    """
    parts = -(-slice_ // ((BOX_BYTES - (112 if gap else 0)) // chunk_bytes(bits)))
    if teams == 2:
        parts = max(parts, -(-ROWS * slice_ * chunk_bytes(bits) // TEAM_PART))
    is_single |= bits == 8 and slice_ <= 4 * warps  # measured: 7% faster with K in four parts
    if is_single and slice_ % warps == 0:
        parts = max(parts, slice_ // warps)
    even = (n for n in range(parts, 2 * parts + 1) if slice_ % (n * warps) == 0)
    return next(even, parts)  # equal shares for all warps are 3 to 5% faster, even with more parts


def takes(operands: WeightOperands) -> bool:
    """True if the kernel multiplies these: 1 to 16 tokens, and codes whose rows begin at multiples of 16 bytes and hold
    whole groups. For float8 K is not padded, since the padding may hold NaN."""
    x, codes, zero, format = operands.x, operands.codes, operands.zero_point, operands.format
    k = operands.groups * operands.group_size
    return (
        1 <= operands.m <= MAX_TOKENS
        and 1 <= operands.k <= k
        and (x.strides[1] == 1 or operands.k == 1)
        and x.dtype in HALVES
        and (operands.k == k or codes.dtype != E4M3)
        and (format.exponent == 0 or codes.dtype == E4M3)
        and (not format.table or format.bits <= 4)
        and operands.scale.dtype in SCALE_MACROS
        and (zero is None or zero.dtype.itemsize == 1 or zero.dtype == operands.scale.dtype)
        and operands.n > 0
        and k % 32 == 0
        and codes.shape[1] % 16 == 0
        and codes.shape[1] * 8 == k * format.bits
        and scaling_of(operands) is not None
        and (operands.rounds is None or _can_round(operands))
        and (not operands.exact or _has_int32_sums(operands))
        and (not operands.gate or _can_gate(operands))
        and (codes.strides[1] == 1 or codes.shape[1] == 1)
        and codes.misaligned == 0
        and (operands.n == 1 or takes_rows(codes.strides[0], codes.shape[1]))
    )


def _can_gate(operands: WeightOperands) -> bool:
    """True for halves of whole tiles. Only one token's norm is computed in the kernel."""
    is_normed = operands.gate is not None and operands.gate.eps is not None
    parts = [t for t in (operands.scale, operands.zero_point) if t is not None]
    return (
        operands.n % ROWS == 0
        and all(ROWS // 2 * operands.groups * t.dtype.itemsize % 16 == 0 for t in parts)
        and operands.residual is operands.rounds is None
        and not (is_normed and (operands.m > 1 or operands.k % 8 or operands.x.misaligned))
    )


def _can_round(operands: WeightOperands) -> bool:
    """True for a weight whose products with rounded x the kernel has: int4, int8, float8, and E2M1 for float8."""
    format = operands.format
    if format.table == E2M1:
        return operands.rounds == E4M3 and operands.scale.dtype in SCALE_MACROS
    return (format.is_int4_or_int8 or format.exponent > 0) and operands.scale.dtype in FLOAT_MACROS


def _has_int32_sums(operands: WeightOperands) -> bool:
    """True for int8 by int8 with one scale a row, without a residual."""
    is_int8 = operands.rounds == operands.codes.dtype == torch.int8
    return is_int8 and operands.group == 0 and operands.zero_point is operands.residual is None


def scaling_of(operands: WeightOperands, by_column: bool = True) -> str | None:
    """How the kernel scales groups; None for groups that it doesn't take.

    Args:
        by_column: groups of codes that are exact times scales may have columns of mma.
    """
    group, tokens = operands.group, 1 << (operands.m - 1).bit_length()
    is_small = operands.bits < 8 and 0 < group < CHUNK and CHUNK % group == 0 and group % 16 == 0
    if is_small and (operands.rounds is None or operands.format.table):
        is_exact = _is_exact_scaled(operands)
        if CHUNK // group * tokens <= COLUMNS and (by_column or not is_exact):
            return "BY_COLUMN"
        if is_exact:
            return "IN_CODES"
    return "BY_UNIT" if group % GROUP_STEP == 0 else None


def _is_exact_scaled(operands: WeightOperands) -> bool:
    """True if the numbers of the table times scales are exact in x's dtype."""
    table, bits = operands.format.table, 8 if operands.numbers == torch.bfloat16 else 11
    if not table or operands.scale.dtype not in (torch.uint8, E4M3):
        return False
    if operands.scale.dtype == torch.uint8 and operands.numbers != torch.bfloat16:
        return False  # beyond float16's range
    bits -= 4 if operands.scale.dtype == E4M3 else 1
    return all(
        (math.frexp(v)[0] * 2**bits).is_integer() and (v == 0 or 2.0**-6 <= abs(v) <= 2.0**6)
        for v in table
    )


def product(operands: WeightOperands) -> DecodeProduct | None:
    """The planned product; None where the device or the operands are not the kernel's."""
    if not (nvrtc.runs_on_hopper(operands.x.device) and takes(operands)):
        return None
    choices = {"splits": (1,), "heights": (1,)} if operands.gate else {}
    chosen = planned(operands, nvrtc.multiprocessors(operands.codes.device), **choices)
    return None if chosen is None else DecodeProduct(operands, chosen)


def planned(
    operands: WeightOperands, multiprocessors: int, **choices: tuple[int, ...]
) -> DecodeDivision | None:
    """The `plan` for these operands; `choices`: its `splits` and `heights`."""
    zero, bits = operands.zero_point, operands.bits
    macro = _codes_macro(operands.format, operands.numbers)
    # NVFP4 by blocks that have several tiles: scales in codes take fewer registers and instructions.
    is_nvfp4 = macro == "E2M1" and operands.scale.dtype == E4M3 and operands.rounds is None
    has_tiles = operands.n > ROWS * multiprocessors
    scaling = scaling_of(operands, by_column=not (is_nvfp4 and has_tiles))
    by_column = scaling == "BY_COLUMN"
    each = operands.scale.dtype.itemsize + (0 if zero is None else zero.dtype.itemsize)
    chosen = plan(
        *(operands.m, operands.n, operands.groups * operands.group_size, bits),
        multiprocessors,
        scale_bytes=operands.groups * each,
        vector=neighbours(bits, operands.group) if scaling == "BY_UNIT" else 4,
        depth=COLUMNS * operands.group // (CHUNK << (operands.m - 1).bit_length())
        if by_column
        else 0,
        table_bytes=(256 if bits == 4 else 128) << 2 * bits if macro == "TABLE" else 0,
        rounding=operands.rounds is not None,
        scale_box=_scale_box(operands),
        is_e2m1=macro == "E2M1",
        **choices,
    )
    if chosen is None:
        return None
    # With a residual it follows attention, whose few blocks leave multiprocessors free at different times. Two blocks
    # on each of the first ones take 0.9 us longer.
    if chosen.resident == 2 and operands.residual is not None:
        chosen = replace(chosen, shared=max(chosen.shared, ALONE))
    is_int4 = macro == "INT" and bits == 4 and zero is operands.rounds is None
    return _with_early_starts(chosen, operands) if is_int4 else chosen


def _with_early_starts(one: DecodeDivision, operands: WeightOperands) -> DecodeDivision:
    """The plan of an int4 product, in which lanes load one token's x, and a first part is copied early, where measured
    faster: with x of few chunks that warps share evenly, and in blocks of few tiles."""
    share = WARPS * one.parts * one.chunks
    if one.tokens * one.split * one.teams > 1 or share != operands.k // CHUNK or share > 2 * WARPS:
        return one
    rounds = -((-operands.n // ROWS) // one.grid)
    is_short = one.resident == 2 or (rounds == 3 and operands.residual is None)
    is_plain = share == 2 * WARPS and operands.gate is None and operands.has_aligned_scales
    return replace(one, loads_x=True, early=int(is_short and is_plain))


def _scale_box(operands: WeightOperands) -> tuple[int, int]:
    """Bytes of the scales of a row's chunk, 0 where the TMA can't copy those of a part alone; and the step of rows in
    shared memory at which lanes read from different banks."""
    size, group = operands.scale.dtype.itemsize, operands.group
    row, step = operands.groups * size, max(16, 8 * size)
    if operands.zero_point is not None or operands.bits == 8 or group == 0 or CHUNK % group:
        return 0, step
    is_readable = operands.has_aligned_scales and takes_rows(row, row)
    return CHUNK // group * size if is_readable else 0, step


def _codes_macro(format: CodesFormat, dtype: torch.dtype) -> str:
    if format.table:
        return "E2M1" if format.table == E2M1 and dtype == torch.bfloat16 else "TABLE"
    if format.exponent:
        return "E4M3"
    if format.bits < 8:
        return "INT"
    return "INT8" if format.low < 0 else "UINT8"


def _zero_macro(format: CodesFormat) -> str:
    if format.zero_point == "code":
        return "CODE" if format.low < 0 else "UNSIGNED"
    return "VALUE" if format.zero_point == "value" else "NONE"


class DecodeProduct(OneLaunch):
    """The product of operands for which `takes` holds, divided as `plan` says."""

    def __init__(self, operands: WeightOperands, plan: DecodeDivision) -> None:
        (m, k), (n, row), format = operands.x.shape, operands.codes.shape, operands.format
        x_stride = operands.x.strides[0] if m > 1 else 0
        pitch = operands.codes.strides[0] if n > 1 else row
        chunks = -(-row // chunk_bytes(format.bits))
        scaling = scaling_of(operands, plan.depth > 0) or "BY_UNIT"
        by_column = scaling == "BY_COLUMN"
        rows = ROWS * plan.height // (2 if operands.gate else 1)
        self.plan, self.shape, self.dtype = plan, (m, n // 2 if operands.gate else n), operands.out
        self.is_ready = operands.has_aligned_scales
        self.codes_map = (8, n, row // 8, pitch // 8, rows, plan.pitch // 8)
        self.x_map = _x_map(operands, plan)
        shape = (x_stride, m, n, k, chunks, operands.groups)
        size = operands.scale.dtype.itemsize
        scale_row = operands.groups * size
        sizes = plan.pitch, plan.stages, plan.apart, plan.scale_pitch or scale_row
        gate, eps = operands.gate or (None, None)
        self.sizes = (*shape, *sizes, nvrtc.float_word(eps or 0.0), 0)
        self.scale_map = (8, n, *[scale_row // 8] * 2, rows, plan.scale_pitch // 8)
        self.variant = DecodeVariant(
            _codes_macro(format, operands.numbers),
            format.bits,
            operands.group,
            scaling,
            FLOAT_MACROS[operands.numbers],
            FLOAT_MACROS[operands.out],
            SCALE_MACROS[operands.scale.dtype],
            _zero_macro(format),
            plan.tokens,
            plan.chunks,
            plan.height,
            plan.split,
            plan.parts,
            plan.parts * plan.split == 1 and plan.pitch == operands.codes.strides[0] == row,
            plan.split * plan.parts * plan.chunks * WARPS // plan.teams == chunks,
            0 if self.x_map is None else plan.box,
            by_column and plan.tokens == 1 and operands.groups % 2 == 0,
            plan.teams,
            plan.resident,
            plan.scale_pitch > 0,
            plan.looks_up,
            plan.loads_x,
            plan.early,
            "NONE" if operands.rounds is None else ROUNDS_MACROS[operands.rounds],
            FLOAT_MACROS[operands.x.dtype],
            operands.exact,
            "NONE" if gate is None else gate.upper(),
            eps is not None,
            *_table_macros(format, operands.numbers),
        )

    def launch(self) -> Launch:
        codes_map = Map(CODES, *self.codes_map)
        x_map = codes_map if self.x_map is None else Map(X, *self.x_map)
        scale_map = codes_map if self.plan.scale_pitch == 0 else Map(SCALE, *self.scale_map)
        maps: tuple[Argument, ...] = codes_map, x_map, scale_map
        arguments = *maps, *map(Address, range(OUT + 1)), *self.sizes
        kernel = _kernel(self.variant, self.plan.shared, torch.cuda.current_device())
        return Launch(kernel, self.plan.grid, THREADS[self.plan.resident], arguments)


def _table_macros(format: CodesFormat, dtype: torch.dtype) -> tuple[str, ...]:
    if _codes_macro(format, dtype) != "TABLE":
        return ()
    bits, factor = table_of(format.table, dtype, True)
    return ", ".join(map(str, bits)), f"{(1 / factor).hex()}f"


def _x_map(operands: WeightOperands, plan: DecodeDivision) -> tuple[int, ...] | None:
    """The tensor map of x in boxes, without its address; None where the plan has none or the TMA can't read x."""
    (m, k), x = operands.x.shape, operands.x
    stride = x.strides[0] if m > 1 else k
    if plan.box == 0 or x.misaligned or k % 8 or not takes_rows(2 * stride, 2 * k):
        return None
    return (8, m, k // 4, stride // 4, plan.tokens, plan.box * CHUNK // 4)


def source(variant: DecodeVariant) -> str:
    """The CUDA C++ to compile."""
    macros = {name: value for name, value in asdict(variant).items() if value != ""}
    return program({"scales_x": True, **macros}, *SM90, *PARTS)


@nvrtc.variants
def _kernel(variant: DecodeVariant, shared: int, device: int) -> nvrtc.Kernel:
    sizes = {"structs": 3, "shared": shared, "cluster": variant.split}
    kernel = nvrtc.kernel(source(variant), "decode_mm", ARGUMENTS, "sm_90a", **sizes, overlaps=True)
    if variant.early:
        EARLY.add(kernel.handle)
    return kernel
