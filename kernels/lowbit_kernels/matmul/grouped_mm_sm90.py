"""Launches ``grouped_mm_sm90.cu``, grouped products of int8 or float8 on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.matmul.mm_tiles_sm90 import (
    CLUSTER,
    THREADS,
    TILE_K,
    TILE_M,
    Formats,
    instruction,
    ring,
)
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.runtime.tensor_map import tensor_map

WIDTH = 256
"""Columns of a tile."""


def beside(m: int, experts: int, n: int, ragged: bool) -> int:
    """Tiles of a cluster that lie beside each other: 2, or 1 where they lie under each other.

    Each expert's rows are filled up to whole clusters, and so are the columns. Tiles beside each other fill fewer rows
    and more columns. They read 4% more, as measured on an H200 where neither fills anything.
    """

    def filled(across: int) -> float:
        height, width = TILE_M * CLUSTER // across, WIDTH * across
        mean = m if ragged else max(m / experts, 1)
        rows = -(-m // height) * height / m if ragged else 1 + height / 2 / mean
        return rows * (-(-n // width) * width / n)

    return CLUSTER if 1.04 * filled(CLUSTER) < filled(1) else 1


def grouped_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``lowbit::grouped_scaled_mm`` on a GPU of compute capability 9.0. The operands are checked; no size is 0."""
    a, b = aligned(a), aligned(b)
    a_scale, b_scale, offsets = a_scale.contiguous(), b_scale.contiguous(), offsets.contiguous()
    experts, ragged = offsets.shape[0], b.dim() == 2
    m, n, k = a.shape[0], b.shape[-2], a.shape[1]
    tokens = a_scale.shape[0] if not ragged else k
    # The TMA stores rows that begin at multiples of 16 bytes. Other widths are cut from a wider result.
    pitch = -(-n * out_dtype.itemsize // 16) * 16
    shape = (experts, m) if ragged else (m,)
    out = a.new_empty((*shape, pitch // out_dtype.itemsize), dtype=out_dtype)
    with torch.cuda.device_of(a):
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        multiprocessors = nvrtc.multiprocessors(a.device)
        across = beside(m, experts, n, ragged)
        rows, box = experts * m if ragged else m, 128 // out_dtype.itemsize
        b_rows = n if ragged else experts * n
        maps = (
            tensor_map(a.data_ptr(), 1, m, k, k, TILE_M // across, TILE_K),
            tensor_map(b.data_ptr(), 1, b_rows, k, k, WIDTH * across // CLUSTER, TILE_K),
            tensor_map(out.data_ptr(), out.itemsize, rows, n, out.shape[-1], 64, box),
        )
        kernel = _kernel(out_dtype, (a.dtype, b.dtype), ragged, across, device)
        kernel(
            stream,
            multiprocessors // CLUSTER * CLUSTER,
            THREADS,
            *(one.getPtr() for one in maps),
            *(out.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr(), offsets.data_ptr()),
            *(pitch, int(b_scale.numel() > 1), experts, tokens, m, n, -(-k // TILE_K), 8 // across),
        )
    return out if out.shape[-1] == n else out[..., :n].contiguous()


def source(out: torch.dtype, formats: Formats, ragged: bool, across: int) -> str:
    """The CUDA C++ to compile, for operands in these formats."""
    macros: dict[str, object] = {"OUT": FLOAT_MACROS[out], "BIAS": "NONE", "TILE_N": WIDTH}
    macros |= {"SUM": "int" if formats[0] == torch.int8 else "float", "STAGES": ring(WIDTH)[0]}
    macros |= {"RAGGED": ragged, "BESIDE": across}
    own = instruction(formats, WIDTH), "matmul/mm_tiles_sm90.cuh", "matmul/grouped_mm_sm90.cu"
    return program(macros, *SM90, *own)


@functools.cache
def _kernel(
    out: torch.dtype, formats: Formats, ragged: bool, across: int, device: int
) -> nvrtc.Kernel:
    code, shared = source(out, formats, ragged, across), ring(WIDTH)[1]
    return nvrtc.kernel(code, "grouped_mm", 15, structs=3, shared=shared, overlaps=True)
