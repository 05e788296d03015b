"""Launches ``quantize_rowcol_sm90.cu`` on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lowbit_kernels import nvrtc
from lowbit_kernels.sources import FLOAT_MACROS, program

TILE, THREADS, ROW_STEP = 128, 256, 2048
MAX_STEPS = 8
SHARED = 16384 + 2 * TILE * 8
"""Bytes of shared memory of a tile: its transposed codes and its scales."""


@dataclass(frozen=True)
class Variant:
    """The options of a compiled kernel; the head of ``quantize_rowcol_sm90.cu`` explains each field."""

    input: str
    format: str
    rows: bool
    columns: bool
    tensorwise: bool
    stochastic: bool
    factor: bool
    row_scales: bool
    aligned: bool
    steps: int


def quantize(
    x: Tensor,
    format: str,
    rows: bool,
    columns: bool,
    tensorwise: bool,
    seed: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write the results of ``lowbit::quantize_rowcol`` to `out`; the arguments have been checked, M and K are > 0."""
    x = x if x.stride(1) == 1 else x.contiguous()
    m, k = x.shape
    in_one_pass = rows and not columns and not tensorwise
    variant = Variant(
        FLOAT_MACROS[x.dtype],
        format.upper(),
        rows,
        columns,
        tensorwise,
        seed is not None,
        False,
        False,
        x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0,
        min(-(-k // ROW_STEP), MAX_STEPS) if in_one_pass else 0,
    )
    codes, scale, codes_t, scale_t = (part.data_ptr() for part in out)
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream().cuda_stream
        found = 0
        if not in_one_pass:
            scratch = torch.zeros(m + k, dtype=torch.int32, device=x.device)
            found = scratch.data_ptr()
        arguments = (
            *(x.data_ptr(), x.stride(0), codes, scale, codes_t, scale_t),
            *(found, found + 4 * m, 0 if seed is None else seed.data_ptr(), 0, m, k),
        )
        device = torch.cuda.current_device()
        if in_one_pass:
            _kernel(variant, "rows", device)(stream, m, THREADS, *arguments)
            return
        tiles = -(-m // TILE) * -(-k // TILE)
        _kernel(variant, "absmax", device)(stream, tiles, THREADS, *arguments)
        _kernel(variant, "quantize", device)(stream, tiles, THREADS, *arguments)


def source(variant: Variant, primitives: str = "ptx.cuh") -> str:
    """The CUDA C++ to compile."""
    return program(asdict(variant), primitives, "random_bits.h", "quantize_rowcol_sm90.cu")


@functools.cache
def _module(variant: Variant, device: int) -> nvrtc.Module:
    arch = nvrtc.architecture(torch.device("cuda", device))
    return nvrtc.Module(nvrtc.compiled(source(variant), arch))


@functools.cache
def _kernel(variant: Variant, name: str, device: int) -> nvrtc.Kernel:
    shared = 0 if name == "rows" else SHARED
    return _module(variant, device).kernel(name, 12, shared=shared)
