"""Launches ``quantize_blocks_sm90.cu`` on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lowbit_kernels import nvrtc
from lowbit_kernels.quantize_rowcol_sm90 import SHARED, THREADS, TILE
from lowbit_kernels.sources import FLOAT_MACROS, program

OF_ROWCOL = {
    "FORMAT": "E4M3",
    "TENSORWISE": 0,
    "STOCHASTIC": 0,
    "FACTOR": 0,
    "ROW_SCALES": 0,
    "STEPS": -1,
}
"""The macros that ``quantize_rowcol_sm90.cu`` needs; these STEPS compile none of its kernels."""


@dataclass(frozen=True)
class Variant:
    """The options of a compiled kernel; the head of ``quantize_blocks_sm90.cu`` explains each field."""

    input: str
    tiles: bool
    rows: bool
    columns: bool
    power_of_two: bool
    aligned: bool


def quantize(
    x: Tensor,
    tiles: bool,
    rows: bool,
    columns: bool,
    power_of_two: bool,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write the results of ``lowbit::quantize_blocks`` to `out`; x has been checked, M and K are > 0."""
    x = x if x.stride(1) == 1 else x.contiguous()
    m, k = x.shape
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    variant = Variant(FLOAT_MACROS[x.dtype], tiles, rows, columns, power_of_two, is_aligned)
    pointers = (part.data_ptr() for part in out)
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream().cuda_stream
        kernel = _kernel(variant, torch.cuda.current_device())
        blocks = -(-m // TILE) * -(-k // TILE)
        kernel(stream, blocks, THREADS, x.data_ptr(), x.stride(0), *pointers, m, k)


def source(variant: Variant, primitives: str = "ptx.cuh") -> str:
    """The CUDA C++ to compile."""
    macros = {**asdict(variant), **OF_ROWCOL}
    files = ("random_bits.h", "quantize_rowcol_sm90.cu", "quantize_blocks_sm90.cu")
    return program(macros, primitives, *files)


@functools.cache
def _kernel(variant: Variant, device: int) -> nvrtc.Kernel:
    arch = nvrtc.architecture(torch.device("cuda", device))
    module = nvrtc.Module(nvrtc.compiled(source(variant), arch))
    return module.kernel("quantize_blocks", 8, shared=SHARED)
