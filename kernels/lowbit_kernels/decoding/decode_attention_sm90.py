"""Launches ``decode_attention_sm90.cu``: `decode_attention` in one launch, for compute capability 9.0."""

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
from lowbit_kernels.weight_only.weight_operands import addresses

WARPS = {8: 8, 4: 4, 2: 4}
"""Warps of a block, by blocks of a cluster."""
TILE, QUERIES = 16, 8
"""Slots of a tile, queries that share a head at most."""
MOST_HEADS = {8: 28, 4: 60, 2: 132}
"""Clusters of so many blocks that run at once on an H200, two blocks on a multiprocessor."""
MOST_SLOTS = 1024
"""The most slots of a cache in one launch. With more, two launches that fill the GPU are faster."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class DecodeAttentionVariant:
    """The macros that the kernel is compiled with; the head of ``decode_attention_sm90.cu`` explains each."""

    x: str
    width: int
    group: int
    cluster: int
    rotated: bool
    factor: bool
    softcap: bool


def takes(operands: Sequence[Any]) -> bool:
    """True if the kernel takes these operands of `decode_attention`, in the op's order."""
    query, key, value, keys, values, _, _, cos, sin, sinks, x = operands
    vectors = [t for t in (query, key, value, keys, values, cos, sin, x) if t is not None]
    return (
        nvrtc.runs_on_hopper(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] in (64, 128)
        and query.shape[1] <= QUERIES * keys.shape[1]
        and keys.shape[0] * keys.shape[1] <= max(MOST_HEADS.values())
        and keys.shape[2] <= MOST_SLOTS
        and key.stride() == value.stride()
        and (sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()))
        and all(t.dtype == query.dtype and _is_aligned(t) for t in vectors)
        and (x is None or x.shape[2] % 8 == 0)
    )


def _is_aligned(t: Tensor) -> bool:
    strides = [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]
    return (
        (t.stride(-1) == 1 or t.shape[-1] == 1)
        and t.data_ptr() % 16 == 0
        and not any(stride % 8 for stride in strides if stride != 1)
    )


def attend(
    operands: Sequence[Any], scale: float, window: int, softcap: float, eps: float
) -> Tensor:
    """`decode_attention` of operands for which `takes` holds, in the op's order."""
    query, key, value, keys, values, position, start, cos, sin, sinks, x = operands
    batch, queries, _, width = query.shape
    heads, capacity = keys.shape[1:3]
    blocks = batch * heads
    cluster = next(n for n, most in MOST_HEADS.items() if blocks <= most)
    is_turned, has_factor = cos is not None, x is not None
    variant = DecodeAttentionVariant(
        *(FLOAT_MACROS[query.dtype], width, queries // heads, cluster),
        *(is_turned, has_factor, softcap != 0),
    )
    out = torch.empty((batch, queries, 1, width), dtype=query.dtype, device=query.device)
    units = 2 * scale / softcap * LOG2_E if softcap else scale * LOG2_E
    tensors = (query, key, value, x, cos, sin, keys, values, position, start, sinks, out)
    with torch.cuda.device_of(query):
        _kernel(variant, torch.cuda.current_device())(
            *(torch.cuda.current_stream().cuda_stream, blocks * cluster, 32 * WARPS[cluster]),
            *addresses(*tensors),
            *(*query.stride()[:2], *key.stride()[:2]),
            0 if cos is None or cos.shape[0] == 1 else width,
            *(heads, capacity, window, 0 if x is None else x.shape[2]),
            *map(nvrtc.float_word, (units, softcap * LOG2_E, eps)),
        )
    return out


def shared_bytes(variant: DecodeAttentionVariant) -> int:
    """Bytes of a block's shared memory."""
    warps = WARPS[variant.cluster]
    sums = 4 * warps * (variant.group * variant.width + 2 * QUERIES) + 2 * (variant.group + 1) * (
        variant.width + 32
    )
    sums += 4 * variant.cluster * variant.group * (variant.width // variant.cluster + 4)
    return 128 + 4 * warps * QUERIES * (TILE + 1) + sums


def source(variant: DecodeAttentionVariant) -> str:
    """The CUDA C++ to compile."""
    return program(asdict(variant), *SM90, "decoding/decode_attention_sm90.cu")


@functools.cache
def _kernel(variant: DecodeAttentionVariant, device: int) -> nvrtc.Kernel:
    code, shared = source(variant), shared_bytes(variant)
    return nvrtc.kernel(code, "attend", 24, shared=shared, cluster=variant.cluster, overlaps=True)
