"""Launches ``quantized_attention_sm90.cu``: one token over a cache in 8 and 4 bits, for compute capability 9.0.

The cache is read once, at the speed of memory. Products with int8 keys are exact sums of integers, with queries of 15
bits in units of their largest magnitude. Other codes become fp16 exactly, and queries fp16. The softmax is float32, and
the weights of the values are fp16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.runtime.tensor_map import tensor_map
from lowbit_kernels.weight_only.weight_operands import addresses

FORMATS = {torch.int8: "INT8", torch.float8_e4m3fn: "E4M3", torch.uint8: "UINT4"}
WARPS, TILE, SCALE_BYTES = 4, 32, 2
"""Warps of a block, slots of a tile, bytes of a scale."""
WIDEST, MAX_STAGES, MAX_SPLITS = 256, 6, 64
MOST_BLOCKS = 2
"""Blocks that share a multiprocessor."""
LOG2_E = math.log2(math.e)
OVERHEAD = 3
"""Tiles of each warp in whose time a block begins and ends."""


@dataclass(frozen=True)
class AttentionVariant:
    """The macros that the kernel is compiled with; the head of ``quantized_attention_sm90.cu`` explains each."""

    x: str
    keys: str
    values: str
    zero: bool
    softcap: bool
    width: int
    rows: int
    stages: int


@dataclass(frozen=True)
class Room:
    """A block's shared memory: stages of each warp, bytes, and blocks that fit on a multiprocessor."""

    stages: int
    shared: int
    blocks: int


def takes(key_codes: Tensor, value_codes: Tensor, dtype: torch.dtype, width: int) -> bool:
    """True if the kernel takes a cache with these codes and queries of this dtype and width."""
    batch, heads, capacity, channels = key_codes.shape
    return (
        nvrtc.runs_on_hopper(key_codes.device)
        and dtype in (torch.bfloat16, torch.float16)
        and key_codes.numel() > 0
        and width % 4 == 0
        and channels % (32 if value_codes.dtype == torch.uint8 else 16) == 0
        and channels <= WIDEST
        and value_codes.shape[3] == channels // (1 + (value_codes.dtype == torch.uint8))
        and capacity % TILE == 0
        and batch * heads * capacity < 2**31
    )


def room(width: int, value_width: int, rows: int, kinds: int) -> Room:
    """As many stages as fit with two blocks on a multiprocessor, or with one where two have no room for two stages."""

    def shared(stages: int) -> int:
        header = 8 * WARPS * stages + 3 * 4 * WARPS * rows
        header = -(-header // 16) * 16 + WARPS * stages * kinds * TILE * SCALE_BYTES
        return -(-header // 1024) * 1024 + WARPS * stages * TILE * (width + value_width)

    for blocks in range(MOST_BLOCKS, 0, -1):
        limit = nvrtc.SHARED_LIMIT // blocks - (1024 if blocks > 1 else 0)
        fitting = [stages for stages in range(2, MAX_STAGES + 1) if shared(stages) <= limit]
        if fitting:
            return Room(fitting[-1], shared(fitting[-1]), blocks)
    raise AssertionError(f"no room for heads of {width}")


@functools.cache
def splits_for(pairs: int, capacity: int, slots: int) -> int:
    """Blocks that share the slots of a head, where `slots` blocks run at once and there are `pairs` heads in all.

    The estimated time is that of the tiles of a block and of its beginning and end, in as many rounds as it takes.
    """
    tiles = -(-capacity // (TILE * WARPS))

    def time(splits: int) -> int:
        return -(-pairs * splits // slots) * (-(-tiles // splits) + OVERHEAD)

    return min(range(1, min(MAX_SPLITS, tiles) + 1), key=time)


def attend(
    query: Tensor, cache: Sequence[Any], scale: float, window: int, softcap: float, ring: bool
) -> Tensor:
    """`quantized_attention` of operands for which `takes` holds; `cache`: those after the query, in the op's order."""
    key_codes, key_scale, value_codes, value_scale, length, value_zero, mask, first, sinks = cache
    batch, queries, _, d = query.shape
    heads, capacity, width = key_codes.shape[1:]
    if query.stride(3) != 1 or query.data_ptr() % 8 or any(s % 4 for s in query.stride()[:2]):
        query = query.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    mask = mask if mask is None or mask.stride(1) == 1 else mask.contiguous()
    first = first if first is None else first.expand(batch).contiguous()
    variant, room_of = chosen(query, key_codes, value_codes, softcap != 0)
    pairs = batch * heads * -(-queries // heads // variant.rows)
    splits = splits_for(pairs, window, room_of.blocks * nvrtc.multiprocessors(query.device))
    out = torch.empty((batch, queries, 1, d), dtype=query.dtype, device=query.device)
    sums = batch * queries * splits if splits > 1 else 0
    parts = torch.empty(sums * (width + 2), dtype=torch.float32, device=query.device)
    stats = parts[sums * width :]
    units = scale / softcap if softcap else scale * LOG2_E
    with torch.cuda.device_of(query):
        stream = torch.cuda.current_stream().cuda_stream
        attend_kernel, combine_kernel = _kernels(
            variant, room_of.shared, torch.cuda.current_device()
        )
        attend_kernel(
            *(stream, pairs * splits, 32 * WARPS),
            *(_map(codes).getPtr() for codes in (key_codes, value_codes)),
            *(query.data_ptr(), query.stride(0), query.stride(1)),
            *addresses(key_scale, value_scale, value_zero),
            *(*addresses(length), length.stride(0) if len(length) > 1 else 0),
            *(*addresses(mask), mask.stride(0) if mask is not None and len(mask) > 1 else 0),
            *addresses(first, sinks, out, parts, stats),
            *(heads, queries // heads, d, capacity, window, int(ring), splits),
            *(nvrtc.float_word(units), nvrtc.float_word(softcap * LOG2_E)),
        )
        if splits > 1:
            own = addresses(parts, stats, sinks, out)
            combine_kernel(stream, batch * queries, width, *own, queries, d, splits)
    return out


def chosen(
    query: Tensor, key_codes: Tensor, value_codes: Tensor, caps: bool
) -> tuple[AttentionVariant, Room]:
    """The variant for these operands, and its shared memory."""
    rows = 8 if query.shape[1] <= 8 * key_codes.shape[1] else 16
    has_zero = value_codes.dtype == torch.uint8
    own = room(key_codes.shape[3], value_codes.shape[3], rows, 2 + has_zero)
    variant = AttentionVariant(
        FLOAT_MACROS[query.dtype],
        FORMATS[key_codes.dtype],
        FORMATS[value_codes.dtype],
        has_zero,
        caps,
        key_codes.shape[3],
        rows,
        own.stages,
    )
    return variant, own


def _map(codes: Tensor) -> Any:
    """The tensor map of codes [B, K, S, bytes] in tiles. Rows of 64 and 128 bytes are swizzled; 256 are two boxes."""
    batch, heads, capacity, width = codes.shape
    rows, at = batch * heads * capacity, codes.data_ptr()
    if width in (64, 128, 256):
        return tensor_map(at, 1, rows, width, width, TILE, min(width, 128))
    return tensor_map(at, 8, rows, width // 8, width // 8, TILE, width // 8)


def source(variant: AttentionVariant) -> str:
    """The CUDA C++ to compile."""
    return program(asdict(variant), *SM90, "decoding/quantized_attention_sm90.cu")


@functools.cache
def _kernels(
    variant: AttentionVariant, shared: int, device: int
) -> tuple[nvrtc.Kernel, nvrtc.Kernel]:
    code = source(variant)
    attend = nvrtc.kernel(code, "attend", 26, structs=2, shared=shared, overlaps=True)
    return attend, nvrtc.kernel(code, "combine", 7, overlaps=True)
