"""Launches ``weight_mm_few.cu``: weights of 4 or 8 bits times at most 16 tokens, on GPUs of compute capability 9.0.

    out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero_point[n, k // G]) * scale[n, k // G]
                + bias[n] + residual[m, n]

The weight is never rounded: codes minus zero points are exact in x's dtype, sums and scales are float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from lowbit_kernels import nvrtc

DTYPES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
MAX_TOKENS, ROWS, WARPS, MAX_STAGES = 16, 16, 16, 8
THREADS = 32 * (WARPS + 4)
CHUNK_BYTES = 64  # of codes of a row
SHARED_LIMIT = 227 * 1024
ON_THEIR_WAY = (
    112 * 1024
)  # bytes of a block's tiles; with more, they get there later and not in order
KEPT_LIMIT = 32 * 1024  # of shared memory, for sums that wait for those of other blocks
X_REGISTERS = 64  # of a thread, for the x that it keeps


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; the head of ``weight_mm_few.cu`` says what each means."""

    bits: int
    group: int
    x: str
    scale: str
    zero: bool
    tokens: int
    chunks: int
    height: int
    split: int
    whole: bool


@dataclass(frozen=True)
class Plan:
    """How a product is divided: `tokens` computed (8 or 16), `chunks` of a warp, tiles of `height` times 16 rows,
    `split` blocks that share k, `grid` blocks, `stages` of the ring, `shared` bytes of shared memory."""

    tokens: int
    chunks: int
    height: int
    split: int
    grid: int
    stages: int
    shared: int


def plan(
    m: int,
    n: int,
    k: int,
    bits: int,
    multiprocessors: int,
    *,
    scale_bytes: int = 0,
    splits: tuple[int, ...] = (1, 2, 4, 8),
    heights: tuple[int, ...] | None = None,
) -> Plan | None:
    """The division that is expected to be done first; None where k is too long for any. `k` is the codes' (padded),
    `scale_bytes` those of the scales and zero points of a row, `splits` and `heights` what to choose from (by default
    no higher tiles for at most 8 tokens: they were never faster)."""
    heights = heights or ((1,) if m <= 8 else (1, 2))
    plans = [
        _divided(m, n, k, bits, multiprocessors, scale_bytes, split, height)
        for split in splits
        for height in heights
    ]
    possible = [one for one in plans if one is not None]
    if not possible:
        return None
    chunks = -(-k * bits // (8 * CHUNK_BYTES))

    def nanoseconds(one: Plan) -> float:
        """As measured on an H200: a multiprocessor gets 28 bytes a nanosecond of the weight, and 40 of x, before the
        first product; but no tile takes less time than its chunks one after the other, and adding up."""
        slice_ = -(-chunks // one.split)
        waves = -(-one.grid // multiprocessors)
        rounds = waves * -(-n * one.split // (ROWS * one.height * one.grid))
        work = 600 + 230 * one.height * one.chunks * one.tokens // 8
        tile = max(one.height * slice_ * CHUNK_BYTES * ROWS / 28, work)
        x = max(slice_ * CHUNK_BYTES * 8 // bits * 2 * m / 40 - 700, 0)
        return rounds * tile + waves * x + (300 if one.split > 1 else 0)

    return min(possible, key=nanoseconds)


def _divided(
    m: int,
    n: int,
    k: int,
    bits: int,
    multiprocessors: int,
    scale_bytes: int,
    split: int,
    height: int,
) -> Plan | None:
    """With `split` blocks a cluster and tiles of `height`; None if x does not fit the registers, or tiles not the
    shared memory."""
    tokens = 8 if m <= 8 else 16
    chunks = -(-k * bits // (8 * CHUNK_BYTES))
    if split > chunks:
        return None
    own = -(-chunks // (split * WARPS))  # of a warp
    if own * tokens * 8 // bits > X_REGISTERS:
        return None
    # A cluster lies within a part of the device: of an H200's 132 multiprocessors, 30 clusters of 4 and 15 of 8 fit.
    usable = multiprocessors if split <= 2 else multiprocessors * 10 // 11
    tiles, pieces = -(-n // (ROWS * height)), height * tokens // 8
    clusters = min(tiles, max(usable // split, 1))
    if split > 1:  # not more tiles a cluster than can keep their sums: others come when it is done
        clusters *= -(-tiles * pieces * 512 // (clusters * KEPT_LIMIT))
        clusters = min(tiles, clusters)
    rounds = -(-tiles // clusters)
    # 64 more: of a row's last chunk, places where no scale is are read, and not used.
    fixed = 512 + 64 + 2 * WARPS * pieces * 512 + (rounds * pieces * 512 if split > 1 else 0)
    stage = ROWS * height * (-(-chunks // split) * CHUNK_BYTES + 112 + scale_bytes)  # at most
    stages = min((SHARED_LIMIT - fixed) // stage, max(ON_THEIR_WAY // stage, 2), MAX_STAGES, rounds)
    if stages < min(2, rounds):
        return None
    shared = fixed + stages * stage
    return Plan(tokens, own, height, split, clusters * split, stages, shared)


def is_available(x: Tensor, codes: Tensor, scale: Tensor, *, bits: int, group_size: int) -> bool:
    """Whether `few_tokens_mm` takes these: a device of compute capability 9.0, 1..16 tokens, and codes whose rows are
    whole groups and begin at multiples of 16 bytes."""
    return (
        nvrtc.runs_on_hopper(x.device)
        and _fits(x, codes, scale, bits, group_size)
        and _plan(x.shape[0], codes, scale, True, bits, x.device) is not None
    )


def _fits(x: Tensor, codes: Tensor, scale: Tensor, bits: int, group_size: int) -> bool:
    k = codes.shape[1] * 8 // bits
    return (
        1 <= x.shape[0] <= MAX_TOKENS
        and 1 <= x.shape[1] <= k
        and (x.stride(1) == 1 or x.shape[1] == 1)
        and x.dtype in (torch.bfloat16, torch.float16)
        and scale.dtype in DTYPES
        and codes.shape[0] > 0
        and k % 32 == 0
        and k % group_size == 0
        and (group_size % 32 == 0)
        and (codes.stride(1) == 1 or codes.shape[1] == 1)
        and codes.data_ptr() % 16 == 0
        and (codes.shape[0] == 1 or codes.stride(0) % 16 == 0)
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
) -> Tensor:
    """The product, for operands that are checked and for which `is_available` holds.

    Args:
        x: bfloat16 or float16 [M, K], M in 1..16; rows may be strided.
        codes: bits 4: uint8 [N, Kp / 2], even k in the low half, each code + 8; bits 8: int8 [N, Kp].
            Kp is K padded to whole groups. Rows may be strided.
        scale: float32, bfloat16 or float16 [N, Kp / group_size].
        zero_point: int8, like scale, in -8..7 for 4 bits; None: 0.
        bias: [N], x's dtype.
        residual: [M, N], x's dtype.
        token_scale: float32 [M].
        bits: 4 or 8.
        group_size: a multiple of 32, or Kp.

    Returns:
        [M, N], contiguous, x's dtype.
    """
    device = x.device
    chosen = _plan(x.shape[0], codes, scale, zero_point is not None, bits, device)
    if chosen is None:
        raise ValueError(f"no block holds rows of {codes.shape[1]} bytes; see is_available")
    operands = (x, codes, scale, zero_point, bias, residual, token_scale)
    return _launch(operands, bits, group_size, chosen)


Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _launch(
    operands: Operands,
    bits: int,
    group_size: int,
    chosen: Plan,
    overlaps: bool = True,
) -> Tensor:
    x, codes, scale, zero_point, bias, residual, token_scale = operands
    scale = _aligned(scale)
    zero_point = None if zero_point is None else _aligned(zero_point)
    bias, residual, token_scale = (
        None if one is None else one.contiguous() for one in (bias, residual, token_scale)
    )
    (m, k), n, groups = x.shape, codes.shape[0], scale.shape[1]
    out = x.new_empty((m, n))
    variant = Variant(
        bits,
        0 if groups == 1 else group_size,
        DTYPES[x.dtype],
        DTYPES[scale.dtype],
        zero_point is not None,
        chosen.tokens,
        chosen.chunks,
        chosen.height,
        chosen.split,
        _is_whole(codes, groups, group_size, chosen.split),
    )
    addresses = (
        0 if one is None else one.data_ptr()
        for one in (x, codes, scale, zero_point, bias, residual, token_scale, out)
    )
    with torch.cuda.device_of(x):
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        _kernel(variant, chosen.shared, overlaps, device)(
            *(stream, chosen.grid, THREADS, *addresses),
            *(
                x.stride(0) if m > 1 else 0,
                codes.stride(0),
                m,
                n,
                k,
                codes.shape[1],
                groups,
                chosen.stages,
            ),
        )
    return out


def _is_whole(codes: Tensor, groups: int, group_size: int, split: int) -> bool:
    """Whether rows have no gaps between them, and lanes read 16 bytes of a row at once: rows of a multiple of 128 bytes
    share banks of shared memory, which costs little then."""
    chunk = CHUNK_BYTES * (2 if codes.dtype == torch.uint8 else 1)
    neighbours = groups == 1 or group_size % chunk == 0
    return split == 1 and codes.stride(0) == codes.shape[1] and neighbours


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
        for name in ("ptx.cuh", "hopper.cuh", "weight_mm_few.cu")
    )
    return "\n".join([*lines, *files])


def _plan(
    m: int, codes: Tensor, scale: Tensor, zero: bool, bits: int, device: torch.device
) -> Plan | None:
    scale_bytes = scale.shape[1] * (scale.element_size() + zero)
    k = codes.shape[1] * 8 // bits
    return _planned(m, codes.shape[0], k, bits, nvrtc.multiprocessors(device), scale_bytes)


@functools.lru_cache(maxsize=4096)
def _planned(m: int, n: int, k: int, bits: int, processors: int, scale_bytes: int) -> Plan | None:
    return plan(m, n, k, bits, processors, scale_bytes=scale_bytes)


def _aligned(x: Tensor) -> Tensor:
    """As the bulk copies take it: without gaps, from a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@functools.cache
def _kernel(variant: Variant, shared: int, overlaps: bool, device: int) -> nvrtc.Kernel:
    return _module(variant, device).kernel(
        "few_tokens_mm", 16, shared=shared, cluster=variant.split, overlaps=overlaps
    )


@functools.cache
def _module(variant: Variant, device: int) -> nvrtc.Module:
    return nvrtc.Module(nvrtc.compiled(source(variant), "sm_90a"))
