"""Launches ``int8_mm_sm90.cu``, the int8 product on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels import nvrtc
from lowbit_kernels.mm_tiles_sm90 import CLUSTER, THREADS, TILE_K, TILE_M, instruction, ring
from lowbit_kernels.sources import FLOAT_MACROS, program
from lowbit_kernels.tensor_map import takes_rows, tensor_map

DTYPES = {**FLOAT_MACROS, torch.int32: "SLICES"}
WIDTHS = (256, 128, 64)  # columns of a tile
MAX_SLICES = 16


class Plan(NamedTuple):
    """The division of a product.

    Attributes:
        width: columns of a tile.
        group: rows of clusters whose tiles follow each other, so that they share b in the L2 cache.
        slices: slices of K with separate sums; 1 unless tiles are 256 wide.
    """

    width: int
    group: int
    slices: int

    @property
    def under(self) -> int:
        """Tiles of a cluster that lie under each other; narrow tiles lie beside each other."""
        return CLUSTER if self.width == WIDTHS[0] else 1

    @property
    def beside(self) -> int:
        return CLUSTER // self.under

    def a_rows(self, m: int) -> int:
        """Rows of one copy of a: a multiple of the 8 rows of a swizzle group, with few rows outside of a."""
        if m <= TILE_M:
            return -(-m // (8 * self.beside)) * 8
        return TILE_M if self.under > 1 else 64 if -m % 64 < 16 else 32

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of clusters."""
        return -(-m // (TILE_M * self.under)), -(-n // (self.width * self.beside))


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, multiprocessors: int) -> Plan:
    """The division with the lowest estimated time of the busiest cluster.

    The estimate is in microseconds, fitted to an H200: the steps of 128 along K of the cluster's tiles, the store of
    each tile, and for slices a second launch that writes and reads their sums.
    """
    steps = -(-k // TILE_K)

    def cost(one: Plan) -> float:
        rows, columns = one.tiles(m, n)
        rounds = -(-rows * columns * one.slices // (multiprocessors // CLUSTER))
        step = 0.22 + 0.38 * one.width / 256
        second = 6 + m * n * one.slices / 750_000 if one.slices > 1 else 0
        return rounds * (-(-steps // one.slices) * step + 0.4 + one.width / 128) + second

    def group(width: int) -> int:
        return 4 if -(-n // width) <= 16 else 8

    wide = WIDTHS[0]
    plans = [Plan(wide, group(wide), s) for s in range(1, min(steps, MAX_SLICES) + 1)]
    return min((*plans, *(Plan(width, group(width), 1) for width in WIDTHS[1:])), key=cost)


def int8_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``lowbit::scaled_mm`` of int8 on a GPU of compute capability 9.0. The operands are checked; M, N, K > 0."""
    (m, k), n = a.shape, b.shape[0]
    a, b = (
        x if _is_readable(x) else x.clone(memory_format=torch.contiguous_format) for x in (a, b)
    )
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    # The TMA stores rows that begin at multiples of 16 bytes. Other widths are cut from a wider result.
    pitch = -(-n * out_dtype.itemsize // 16) * 16 // out_dtype.itemsize
    out = a.new_empty((m, pitch), dtype=out_dtype)
    with torch.cuda.device_of(a):
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        multiprocessors = nvrtc.multiprocessors(a.device)
        chosen = plan(m, n, k, multiprocessors)
        width, group, slices = chosen
        scales = (a_scale.data_ptr(), b_scale.data_ptr(), 0 if bias is None else bias.data_ptr())
        shape = (int(a_scale.numel() > 1), int(b_scale.numel() > 1), m, n)
        bias_dtype, to = None if bias is None else bias.dtype, out
        rows, columns = chosen.tiles(m, n)
        tall = rows * chosen.under * TILE_M
        if slices > 1:
            to = a.new_empty((slices * tall, -(-n // 4) * 4), dtype=torch.int32)
        box = 128 // to.itemsize
        maps = (
            tensor_map(a.data_ptr(), 1, m, k, _row_stride(a), chosen.a_rows(m), 128),
            tensor_map(b.data_ptr(), 1, n, k, _row_stride(b), width // chosen.under, 128),
            tensor_map(to.data_ptr(), to.itemsize, to.shape[0], n, to.shape[1], 64, box),
        )
        product = _product(to.dtype, None if slices > 1 else bias_dtype, width, device)
        product(
            stream,
            min(rows * columns * slices, multiprocessors // CLUSTER) * CLUSTER,
            THREADS,
            *(one.getPtr() for one in maps),
            *(*scales, *shape, -(-k // TILE_K), group, slices, chosen.a_rows(m)),
        )
        if slices > 1:
            step = tall * to.shape[1]
            _combine(out_dtype, bias_dtype, device)(
                stream,
                -(-m * to.shape[1] // 1024),
                256,
                *(to.data_ptr(), out.data_ptr(), *scales, *shape),
                *(slices, step, to.shape[1], pitch),
            )
    return out if pitch == n else out[:, :n].contiguous()


def source(out: torch.dtype, bias: torch.dtype | None, width: int = WIDTHS[0]) -> str:
    """The CUDA C++ to compile; `out` is int32 for slices."""
    macros: dict[str, object] = {"OUT": DTYPES[out], "BIAS": DTYPES[bias] if bias else "NONE"}
    macros |= {"TILE_N": width, "STAGES": ring(width)[0], "SUM": "int"}
    parts = (
        "ptx.cuh",
        "sm90.cuh",
        instruction((torch.int8, torch.int8), width),
        "mm_tiles_sm90.cuh",
        "int8_mm_sm90.cu",
    )
    return program(macros, *parts)


@functools.cache
def _module(out: torch.dtype, bias: torch.dtype | None, width: int, device: int) -> nvrtc.Module:
    return nvrtc.Module(nvrtc.compiled(source(out, bias, width), "sm_90a"))


@functools.cache
def _product(out: torch.dtype, bias: torch.dtype | None, width: int, device: int) -> nvrtc.Kernel:
    shared = ring(width)[1]
    return _module(out, bias, width, device).kernel(
        "int8_mm", 14, structs=3, shared=shared, overlaps=True
    )


@functools.cache
def _combine(out: torch.dtype, bias: torch.dtype | None, device: int) -> nvrtc.Kernel:
    return _module(out, bias, WIDTHS[0], device).kernel("combine", 13, overlaps=True)


def _is_readable(x: Tensor) -> bool:
    """Whether the TMA can read x: contiguous rows that do not overlap, each beginning at a multiple of 16 bytes."""
    apart = takes_rows(_row_stride(x), x.shape[1])
    return apart and x.stride(1) == 1 and x.data_ptr() % 16 == 0


def _row_stride(x: Tensor) -> int:
    """The row stride of x. A single row may have any stride, but the TMA needs a multiple of 16 bytes."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
