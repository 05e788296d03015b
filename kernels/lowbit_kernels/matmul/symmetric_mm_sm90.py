"""Launches ``symmetric_mm_sm90.cu``, symmetric products of fp16 matrices on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.matmul.mm_tiles_sm90 import instruction
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.sources import SM90, program
from lowbit_kernels.runtime.tensor_map import tensor_map

TILE, TILE_K, STAGES, THREADS = 128, 64, 5, 384
BOX = TILE * TILE_K * 2
"""Bytes of a box of TILE x TILE_K elements."""
SHARED = (2 * STAGES + 4) * BOX + 8 * (2 * STAGES + 2)


def takes(m: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """True if the kernel multiplies matrices [M, K] of this dtype."""
    return m % TILE == 0 and k % TILE_K == 0 and dtype is out_dtype is torch.float16


def symmetric_mm(
    a: Tensor, b: Tensor, addend: Tensor | None, alpha: float, beta: float, gamma: float
) -> Tensor:
    """alpha · a · bᵀ + beta · addend + gamma · I, [count, M, M], as `batched_mm` describes it.

    Args:
        a, b: [count, M, K], contiguous, at multiples of 16 bytes; no size is 0, and `takes` their sizes.
        addend: [count, M, M], contiguous, at a multiple of 16 bytes, or None.
    """
    count, m, k = a.shape
    out = a.new_empty((count, m, m))
    added = out if addend is None else addend
    tiles = m // TILE * (m // TILE + 1) // 2
    maps = [
        tensor_map(x.data_ptr(), 2, count * m, x.shape[2], x.shape[2], TILE, TILE_K)
        for x in (a, b, added, out)
    ]
    with torch.cuda.device_of(a):
        kernel = _kernel(addend is not None, torch.cuda.current_device())
        kernel(
            torch.cuda.current_stream().cuda_stream,
            min(count * tiles, nvrtc.multiprocessors(a.device)),
            THREADS,
            *(one.getPtr() for one in maps),
            *(m, k // TILE_K, tiles, count * tiles),
            *map(nvrtc.float_word, (alpha, beta, gamma)),
        )
    return out


def source(adds: bool) -> str:
    """The CUDA C++ to compile, with or without an addend."""
    formats = torch.float16, torch.float16
    macros = {"ADDS": adds, "STAGES": STAGES, "SUM": "float"}
    return program(macros, *SM90, instruction(formats, TILE), "matmul/symmetric_mm_sm90.cu")


@functools.cache
def _kernel(adds: bool, device: int) -> nvrtc.Kernel:
    return nvrtc.kernel(source(adds), "symmetric_mm", 11, structs=4, shared=SHARED, overlaps=True)
