"""Launches ``scaled_mm_sm90.cu``, the int8 and float8 product on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from typing import NamedTuple

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
from lowbit_kernels.runtime import launch_plan, launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch, Map
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.runtime.tensor_map import takes_rows
from lowbit_kernels.weight_only.weight_operands import Description, TensorLayout, described

SLICES = torch.int32
"""The dtype of a buffer for the sums of slices: of their bits, since float8 has float32 sums."""
WIDTHS = (256, 128, 64)  # columns of a tile
MAX_SLICES = 16


class ScaledMmDivision(NamedTuple):
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
def plan(m: int, n: int, k: int, multiprocessors: int) -> ScaledMmDivision:
    """The division with the lowest estimated time of the busiest cluster.

    The estimate is in microseconds, fitted to an H200: the steps of 128 along K of the cluster's tiles, the store of
    each tile, and for slices a second launch that writes and reads their sums.
    """
    steps = -(-k // TILE_K)

    def cost(one: ScaledMmDivision) -> float:
        rows, columns = one.tiles(m, n)
        rounds = -(-rows * columns * one.slices // (multiprocessors // CLUSTER))
        step = 0.22 + 0.38 * one.width / 256
        second = 6 + m * n * one.slices / 750_000 if one.slices > 1 else 0
        return rounds * (-(-steps // one.slices) * step + 0.4 + one.width / 128) + second

    def group(width: int) -> int:
        return 4 if -(-n // width) <= 16 else 8

    wide = WIDTHS[0]
    plans = [ScaledMmDivision(wide, group(wide), s) for s in range(1, min(steps, MAX_SLICES) + 1)]
    return min(
        (*plans, *(ScaledMmDivision(width, group(width), 1) for width in WIDTHS[1:])), key=cost
    )


def multiply(a, b, a_scale, b_scale, bias, out_dtype) -> Tensor:
    """``lowbit::scaled_mm`` on a GPU of compute capability 9.0. The operands are checked; M, N, K > 0."""
    given = a, b, a_scale, b_scale, bias
    a, b = (
        x
        if is_readable(TensorLayout(*described(x)))
        else x.clone(memory_format=torch.contiguous_format)
        for x in (a, b)
    )
    a_scale = a_scale.contiguous()
    b_scale, bias = (None if x is None else x.contiguous() for x in (b_scale, bias))
    operands = a, b, a_scale, b_scale, bias
    scales = a_scale.numel() > 1, b_scale is not None and b_scale.numel() > 1
    bias_dtype = None if bias is None else bias.dtype
    found = planned(described(a), described(b), *scales, bias_dtype, out_dtype)
    n = b.shape[0]
    is_whole = found.results[0].shape[1] == n
    as_given = all(x is y for x, y in zip(given, operands, strict=True))
    (out,) = launcher.carried_out("scaled_mm", found, operands, is_whole and as_given)
    return out if is_whole else out[:, :n].contiguous()


@functools.lru_cache(maxsize=4096)
def planned(
    a: Description,
    b: Description,
    a_scales: bool,
    b_scales: bool,
    bias: torch.dtype | None,
    out: torch.dtype,
) -> launch_plan.LaunchPlan:
    """The plan of operands a, b, a_scale, b_scale and bias, contiguous. The TMA stores rows that begin at multiples of
    16 bytes; so the result may be wider than N.

    Args:
        a, b: [M, K] and [N, K], described, which the TMA can read.
        a_scales, b_scales: True for a scale for each row of a, and of b.
        bias, out: the dtypes of the bias, or None, and of the result.
    """
    own_a, own_b = TensorLayout(*a), TensorLayout(*b)
    (m, k), n, device = own_a.shape, own_b.shape[0], own_a.device
    chosen = plan(m, n, k, nvrtc.multiprocessors(device))
    width, group, slices = chosen
    pitch = -(-n * out.itemsize // 16) * 16 // out.itemsize
    rows, columns = chosen.tiles(m, n)
    tall = rows * chosen.under * TILE_M
    result, to = Buffer((m, pitch), out), 5
    stored = result
    if slices > 1:
        stored, to = Buffer((slices * tall, -(-n // 4) * 4), SLICES), 6
    size = stored.dtype.itemsize
    maps = (
        Map(0, 1, m, k, _stride(own_a), chosen.a_rows(m), 128),
        Map(1, 1, n, k, _stride(own_b), width // chosen.under, 128),
        Map(to, size, stored.shape[0], n, stored.shape[1], 64, 128 // size),
    )
    scales: tuple[int | Address, ...] = (Address(2), Address(3), Address(4))
    scales += int(a_scales), int(b_scales), m, n
    formats = own_a.dtype, own_b.dtype
    product = Launch(
        _product(formats, stored.dtype, None if slices > 1 else bias, width, device),
        min(rows * columns * slices, nvrtc.multiprocessors(device) // CLUSTER) * CLUSTER,
        THREADS,
        (*maps, *scales, -(-k // TILE_K), group, slices, chosen.a_rows(m)),
    )
    if slices == 1:
        return launch_plan.LaunchPlan((result,), (), (product,))
    pitch_of_sums = stored.shape[1]
    sizes = (slices, tall * pitch_of_sums, pitch_of_sums, pitch)
    blocks = -(-m * pitch_of_sums // 1024)
    sum_up = Launch(
        _combine(formats, out, bias, device), blocks, 256, (Address(6), Address(5), *scales, *sizes)
    )
    return launch_plan.LaunchPlan((result,), (stored,), (product, sum_up))


def source(
    formats: Formats, out: torch.dtype, bias: torch.dtype | None, width: int = WIDTHS[0]
) -> str:
    """The CUDA C++ to compile; `out` is `SLICES` for slices."""
    names = {**FLOAT_MACROS, SLICES: "SLICES"}
    macros: dict[str, object] = {"OUT": names[out], "BIAS": names[bias] if bias else "NONE"}
    macros |= {"TILE_N": width, "STAGES": ring(width)[0]}
    macros |= {"SUM": "int" if formats[0] == torch.int8 else "float"}
    own = instruction(formats, width), "matmul/mm_tiles_sm90.cuh", "matmul/scaled_mm_sm90.cu"
    return program(macros, *SM90, *own)


@functools.cache
def _product(
    formats: Formats, out: torch.dtype, bias: torch.dtype | None, width: int, device: torch.device
) -> nvrtc.Kernel:
    code, shared = source(formats, out, bias, width), ring(width)[1]
    with torch.cuda.device(device):
        return nvrtc.kernel(code, "scaled_mm", 14, structs=3, shared=shared, overlaps=True)


@functools.cache
def _combine(
    formats: Formats, out: torch.dtype, bias: torch.dtype | None, device: torch.device
) -> nvrtc.Kernel:
    with torch.cuda.device(device):
        return nvrtc.kernel(source(formats, out, bias), "combine", 13, overlaps=True)


def is_readable(x: TensorLayout) -> bool:
    """True if the TMA can read x: contiguous rows that do not overlap, each beginning at a multiple of 16 bytes."""
    return takes_rows(_stride(x), x.shape[1]) and x.strides[1] == 1 and x.misaligned == 0


def _stride(x: TensorLayout) -> int:
    """The row stride of x. A single row may have any stride, but the TMA needs a multiple of 16 bytes."""
    return x.strides[0] if x.shape[0] > 1 else x.shape[1]
