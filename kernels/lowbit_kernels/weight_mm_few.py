"""Launches ``weight_mm_few.cu``: weights of 4 or 8 bits, integers or float8, times at most 16 tokens, on GPUs of
compute capability 9.0.

    out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero_point[n, k // G]) * scale[n, k // G]
                + bias[n] + residual[m, n]

The weight is never rounded: codes minus zero points are exact in x's dtype (of e4m3, which has none, in float16: x has
to be that), sums and scales are float32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels import nvrtc
from lowbit_kernels.library import aligned
from lowbit_kernels.tensor_map import takes_rows, tensor_map

E4M3 = torch.float8_e4m3fn
DTYPES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
CODES = {torch.uint8: "INT4", torch.int8: "INT8", E4M3: "E4M3"}
MAX_TOKENS, ROWS, WARPS, MAX_STAGES = 16, 16, 16, 6
THREADS = 32 * (WARPS + 4)
CHUNK_BYTES = 64  # of codes of a row
CHUNK = 128  # of them, at 4 bits
BOX_BYTES = 2048  # of a row, at most, that one copy brings
X_BYTES = 1024  # of a token's x, at most, that one copy brings
SHARED_LIMIT = 227 * 1024
ON_THEIR_WAY = 112 * 1024  # bytes of a block's tiles; more get there later, and not in order
KEPT_LIMIT = 32 * 1024  # of shared memory, for sums that wait for those of other blocks
X_REGISTERS = 64  # of a thread, for the x that it keeps


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; the head of ``weight_mm_few.cu`` says what each means."""

    codes: str
    group: int
    x: str
    out: str
    scale: str
    zero: bool
    tokens: int
    chunks: int
    height: int
    split: int
    parts: int
    whole: bool
    even: bool
    box: int


@dataclass(frozen=True)
class Plan:
    """How a product is divided: `tokens` computed (a power of 2), tiles of `height` times 16 rows, `split` blocks that
    share k, `parts` of a block's k, `chunks` of a part that a warp has, `pitch` bytes from row to row of a part, `grid`
    blocks, `stages` of the ring, `shared` bytes of shared memory, `box` chunks (0: none) whose x is copied at once;
    `apart` stages share no memory with x."""

    tokens: int
    height: int
    split: int
    parts: int
    chunks: int
    pitch: int
    grid: int
    stages: int
    shared: int
    box: int
    apart: int


def plan(
    m: int,
    n: int,
    k: int,
    bits: int,
    multiprocessors: int,
    *,
    scale_bytes: int = 0,
    vector: int = 4,
    splits: tuple[int, ...] = (1, 2, 4, 8),
    heights: tuple[int, ...] | None = None,
) -> Plan | None:
    """The division that is expected to be done first; None where k is too long for any. `k` is the codes' (padded),
    `scale_bytes` those of the scales and zero points of a row, `vector` as `neighbours` has it, `splits` and `heights`
    what to choose from (by default no higher tiles where they were never faster)."""
    heights = heights or ((1,) if m <= 8 or bits == 4 else (1, 2))
    least = 1 << (m - 1).bit_length()
    # 8 bits: 8 tokens where x fits so; measured for 4, whose x would come through shared memory: 5 to 13% faster.
    for tokens in (8, least) if bits == 8 and 1 < m < 8 else (least,):
        shape = (m, tokens, n, k, bits, multiprocessors, scale_bytes, vector)
        plans = [_divided(*shape, split, height) for split in splits for height in heights]
        if possible := [one for one in plans if one is not None]:
            break
    # Higher tiles need registers that only one chunk a warp leaves, and paid for at most two blocks.
    low = [p for p in possible if p.height == 1 or (p.parts * p.chunks == 1 and p.split <= 2)]
    possible = low or possible
    if not possible:
        return None
    return min(possible, key=lambda one: _nanoseconds(one, m, n, k, bits, multiprocessors))


def _nanoseconds(one: Plan, m: int, n: int, k: int, bits: int, multiprocessors: int) -> float:
    """But for 2.2 us of any launch, as measured on an H200: 4,100 bytes a nanosecond of the weight for all blocks
    together, while no tile takes less time than adding up and its chunks one after the other; before that 31 of x
    for each block, which shows less where 8 bits take longer or it comes in boxes; then the exchange between blocks."""
    slice_ = k * bits / (8 * one.split)
    waves = math.ceil(one.grid / multiprocessors)
    rounds = waves * math.ceil(-(-n // (ROWS * one.height)) / (one.grid // one.split))
    chunks = one.height * one.parts * one.chunks * 4 / bits  # of a warp, in those of 4 bits
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


def _divided(
    m: int,
    tokens: int,
    n: int,
    k: int,
    bits: int,
    multiprocessors: int,
    scale_bytes: int,
    vector: int,
    split: int,
    height: int,
) -> Plan | None:
    """With `split` blocks a cluster, tiles of `height`, and `tokens` of which m exist; None if x does not fit the
    registers, or tiles not the shared memory."""
    chunks = -(-k * bits // (8 * CHUNK_BYTES))
    if split > chunks:
        return None
    slice_ = -(-chunks // split)
    parts = _parts(slice_, bits, vector)
    part = -(-slice_ // parts)
    own = -(-part // WARPS)  # of a warp
    sets = -(-parts * own // max(8 // tokens, 1))
    if sets * max(tokens // 8, 1) * 64 // bits > X_REGISTERS:
        return None
    # Rows that lanes read at once lie in different banks; two in the same where they read 16 bytes, which costs little.
    pitch = part * CHUNK_BYTES
    pitch += (16 * vector - pitch) % 128 if vector < 4 else 0
    # A cluster lies within a part of the device: of an H200's 132 multiprocessors, 30 clusters of 4 and 15 of 8 fit.
    usable = multiprocessors if split <= 2 else multiprocessors * 10 // 11
    tiles, pieces = -(-n // (ROWS * height)), height * -(-tokens // 8)
    clusters = min(tiles, max(usable // split, 1))
    if split > 1:  # not more tiles a cluster than can keep their sums: others come when it is done
        clusters *= -(-tiles * pieces * 512 // (clusters * KEPT_LIMIT))
        clusters = min(tiles, clusters)
    rounds = -(-tiles // clusters)
    # 128 more: of a row's last chunk, places where no scale is are read, and not used.
    fixed = 512 + 128 + 2 * WARPS * pieces * 512
    if split > 1:
        fixed += -(-rounds // split) * split * pieces * 512
    if tokens == 1 or (tokens < 8 and parts > 2):  # x
        fixed += m * (-(-slice_ * CHUNK_BYTES * 16 // bits // 128) * 128 + 32)
    stage = -(-ROWS * height * (pitch + scale_bytes) // 128) * 128
    wanted = min(MAX_STAGES if parts > 4 else 4, rounds * parts)  # more did not pay elsewhere
    wanted = min(wanted, max(ON_THEIR_WAY // stage, 2))
    stages = min((SHARED_LIMIT - fixed) // stage, wanted)
    if stages < min(2, wanted):
        return None
    shared, box, apart = fixed + stages * stage, 0, stages
    if bits == 4 and tokens >= 8:  # of 8 bits x takes less time than codes do
        most, x = _boxes(slice_, tokens)
        if fixed + x + stage <= SHARED_LIMIT:
            box, apart = most, min((SHARED_LIMIT - fixed - x) // stage, stages)
            shared = max(shared, fixed + apart * stage + x)
    grid = clusters * split
    return Plan(tokens, height, split, parts, own, pitch, grid, stages, shared, box, apart)


def _parts(slice_: int, bits: int, vector: int) -> int:
    """Into how many parts a slice's chunks are divided."""
    gap = 0 if vector == 4 else 112  # at most, of a row
    parts = -(-slice_ // ((BOX_BYTES - gap) // CHUNK_BYTES))
    if bits == 8 and slice_ <= 4 * WARPS and slice_ % WARPS == 0:
        parts = slice_ // WARPS  # measured: 7% faster where all of k is four parts
    even = (n for n in range(parts, 2 * parts + 1) if slice_ % (n * WARPS) == 0)
    return next(even, parts)  # 3 to 5% faster, be it with more parts


def _boxes(slice_: int, tokens: int) -> tuple[int, int]:
    """Of x that belongs to `slice_` chunks: chunks of a box, all alike, and bytes of all boxes."""
    count = -(-slice_ * CHUNK * 2 // X_BYTES)
    box = -(-slice_ // count)
    return box, -(-slice_ // box) * box * CHUNK * 2 * tokens


def neighbours(bits: int, group: int) -> int:
    """Words of a row that a lane reads at once: 4, unless groups (0: one) begin within a chunk."""
    words = group * bits // 32
    return 4 if words % 16 == 0 else 2 if words % 8 == 0 else 1


def is_available(x: Tensor, codes: Tensor, scale: Tensor, *, bits: int, group_size: int) -> bool:
    """Whether `few_tokens_mm` takes these: a device of compute capability 9.0, 1..16 tokens, and codes whose rows are
    whole groups (float8: of no more than K, since beyond it may be NaN) and begin at multiples of 16 bytes."""
    return (
        nvrtc.runs_on_hopper(x.device)
        and _fits(x, codes, scale, bits, group_size)
        and _plan(x.shape[0], codes, scale, True, bits, group_size) is not None
    )


def _fits(x: Tensor, codes: Tensor, scale: Tensor, bits: int, group_size: int) -> bool:
    k = codes.shape[1] * 8 // bits
    return (
        1 <= x.shape[0] <= MAX_TOKENS
        and 1 <= x.shape[1] <= k
        and (x.stride(1) == 1 or x.shape[1] == 1)
        and (x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and codes.dtype != E4M3))
        and (x.shape[1] == k or codes.dtype != E4M3)
        and scale.dtype in DTYPES
        and codes.shape[0] > 0
        and k % 32 == 0
        and k % group_size == 0
        and (group_size % 32 == 0)
        and (codes.stride(1) == 1 or codes.shape[1] == 1)
        and codes.data_ptr() % 16 == 0
        and (codes.shape[0] == 1 or takes_rows(codes.stride(0), codes.shape[1]))
    )


def few_tokens_mm(
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
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The product, for operands that are checked and for which `is_available` holds.

    Args:
        x: bfloat16 or float16 [M, K], M in 1..16; rows may be strided.
        codes: bits 4: uint8 [N, Kp / 2], even k in the low half, each code + 8; bits 8: int8 or float8_e4m3fn [N, Kp].
            Kp is K padded to whole groups. Rows may be strided.
        scale: float32, bfloat16 or float16 [N, Kp / group_size].
        zero_point: int8, like scale, in -8..7 for 4 bits; None: 0, as it has to be for float8.
        bias: [N], `dtype`.
        residual: [M, N], `dtype`.
        token_scale: float32 [M].
        bits: 4 or 8.
        group_size: a multiple of 32, or Kp.
        dtype: of the result, bfloat16 or float16; None: x's.

    Returns:
        [M, N], contiguous, `dtype`.
    """
    chosen = _plan(x.shape[0], codes, scale, zero_point is not None, bits, group_size)
    if chosen is None:
        raise ValueError(f"no block holds rows of {codes.shape[1]} bytes; see is_available")
    operands = (x, codes, scale, zero_point, bias, residual, token_scale)
    return _launch(operands, group_size, chosen, dtype or x.dtype)


Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _launch(
    operands: Operands,
    group_size: int,
    chosen: Plan,
    dtype: torch.dtype,
    overlaps: bool = True,
) -> Tensor:
    x, codes, scale, zero_point, bias, residual, token_scale = operands
    scale = aligned(scale)
    zero_point = None if zero_point is None else aligned(zero_point)
    bias, residual, token_scale = (
        None if one is None else one.contiguous() for one in (bias, residual, token_scale)
    )
    (m, k), n, groups = x.shape, codes.shape[0], scale.shape[1]
    out = x.new_empty((m, n), dtype=dtype)
    chunks = -(-codes.shape[1] // CHUNK_BYTES)
    x_map = _x_map(x, chosen)
    variant = Variant(
        CODES[codes.dtype],
        0 if groups == 1 else group_size,
        DTYPES[x.dtype],
        DTYPES[dtype],
        DTYPES[scale.dtype],
        zero_point is not None,
        chosen.tokens,
        chosen.chunks,
        chosen.height,
        chosen.split,
        chosen.parts,
        chosen.parts * chosen.split == 1 and chosen.pitch == codes.stride(0) == codes.shape[1],
        chosen.split * chosen.parts * chosen.chunks * WARPS == chunks,
        chosen.box if x_map is not None else 0,
    )
    addresses = (
        0 if one is None else one.data_ptr()
        for one in (x, codes, scale, zero_point, bias, residual, token_scale, out)
    )
    row = codes.shape[1]
    stride = codes.stride(0) if n > 1 else row
    codes_map = tensor_map(
        codes.data_ptr(), 8, n, row // 8, stride // 8, ROWS * chosen.height, chosen.pitch // 8
    )
    maps = (codes_map.getPtr(), (codes_map if x_map is None else x_map).getPtr())
    x_stride = x.stride(0) if m > 1 else 0
    sizes = (m, n, k, chunks, groups, chosen.pitch, chosen.stages, chosen.apart)
    with torch.cuda.device_of(x):
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        _kernel(variant, chosen.shared, overlaps, device)(
            *(stream, chosen.grid, THREADS, *maps, *addresses, x_stride, *sizes)
        )
    return out


def _x_map(x: Tensor, chosen: Plan) -> Any:
    """x in boxes; None where the plan has none, or the tensor memory accelerator can't read it."""
    (m, k), stride = x.shape, x.stride(0) if x.shape[0] > 1 else x.shape[1]
    if chosen.box == 0 or x.data_ptr() % 16 or k % 8 or not takes_rows(2 * stride, 2 * k):
        return None
    return tensor_map(
        x.data_ptr(), 8, m, k // 4, stride // 4, chosen.tokens, chosen.box * CHUNK // 4
    )


def source(variant: Variant) -> str:
    """The CUDA C++ to compile."""
    folder = Path(__file__).parent
    lines = [
        f"#define {field.name.upper()} {value if isinstance(value, str) else int(value)}"
        for field in fields(variant)
        for value in [getattr(variant, field.name)]
    ]
    files = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("ptx.cuh", "sm90.cuh", "weight_mm_few.cu")
    )
    return "\n".join([*lines, *files])


def _plan(
    m: int, codes: Tensor, scale: Tensor, zero: bool, bits: int, group_size: int
) -> Plan | None:
    scale_bytes = scale.shape[1] * (scale.element_size() + zero)
    k = codes.shape[1] * 8 // bits
    vector = neighbours(bits, 0 if scale.shape[1] == 1 else group_size)
    processors = nvrtc.multiprocessors(codes.device)
    return _planned(m, codes.shape[0], k, bits, processors, scale_bytes, vector)


@functools.lru_cache(maxsize=4096)
def _planned(
    m: int, n: int, k: int, bits: int, processors: int, scale_bytes: int, vector: int
) -> Plan | None:
    return plan(m, n, k, bits, processors, scale_bytes=scale_bytes, vector=vector)


@functools.cache
def _kernel(variant: Variant, shared: int, overlaps: bool, device: int) -> nvrtc.Kernel:
    return _module(variant, device).kernel(
        "few_tokens_mm", 19, structs=2, shared=shared, cluster=variant.split, overlaps=overlaps
    )


@functools.cache
def _module(variant: Variant, device: int) -> nvrtc.Module:
    return nvrtc.Module(nvrtc.compiled(source(variant), "sm_90a"))
