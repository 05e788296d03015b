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
from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch, LaunchPlan, Map
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.weight_only.weight_operands import Description, TensorLayout, described

WIDTH = 256
"""Columns of a tile."""


def beside(m: int, experts: int, n: int, ragged: bool, blocks: bool = False) -> int:
    """Tiles of a cluster that lie beside each other: 2, or 1 where they lie under each other.

    Each expert's rows are filled up to whole clusters, and so are the columns. Tiles beside each other fill fewer rows
    and more columns. They take 4% longer, with blocks 4% less, as measured on an H200 where neither fills anything.
    """

    def filled(across: int) -> float:
        height, width = TILE_M * CLUSTER // across, WIDTH * across
        mean = m if ragged else max(m / experts, 1)
        rows = -(-m // height) * height / m if ragged else 1 + height / 2 / mean
        return rows * (-(-n // width) * width / n)

    cost = 0.96 if blocks else 1.04
    return CLUSTER if cost * filled(CLUSTER) < filled(1) else 1


def grouped_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    blocks: bool = False,
) -> Tensor:
    """``lowbit::grouped_scaled_mm``, or with `blocks` ``lowbit::grouped_block_mm``, on a GPU of compute capability 9.0.
    The operands are checked; no size is 0."""
    given = a, b, a_scale, b_scale, offsets
    operands = aligned(a), aligned(b), *(t.contiguous() for t in given[2:])
    experts, has_scales = offsets.shape[0], b_scale.numel() > 1
    n = b.shape[-2]
    across = beside(a.shape[0], experts, n, b.dim() == 2, blocks)
    of = described(operands[0]), described(operands[1])
    plan = planned(*of, experts, has_scales, out_dtype, across, blocks)
    is_whole = plan.results[0].shape[-1] == n
    as_given = all(x is y for x, y in zip(given, operands, strict=True))
    op = "grouped_block_mm" if blocks else "grouped_scaled_mm"
    (out,) = launcher.carried_out(op, plan, operands, is_whole and as_given)
    return out if is_whole else out[..., :n].contiguous()


@functools.lru_cache(maxsize=4096)
def planned(
    a: Description,
    b: Description,
    experts: int,
    b_scales: bool,
    out: torch.dtype,
    across: int,
    blocks: bool,
) -> LaunchPlan:
    """The plan of operands a, b, a_scale, b_scale and offsets, contiguous.

    Args:
        a, b: described, which the TMA can read.
        experts: how many.
        b_scales: True for a scale for each row of b.
        out: the dtype of the result.
        across: tiles of a cluster that lie beside each other.
        blocks: True for the scales of `grouped_block_mm`.
    """
    own_a, own_b = TensorLayout(*a), TensorLayout(*b)
    (m, k), n, ragged, device = own_a.shape, own_b.shape[-2], len(own_b.shape) == 2, own_a.device
    # The TMA stores rows that begin at multiples of 16 bytes. Other widths are cut from a wider result.
    pitch = -(-n * out.itemsize // 16) * 16
    wide = pitch // out.itemsize
    multiprocessors = nvrtc.multiprocessors(device)
    rows, b_rows = experts * m if ragged else m, n if ragged else experts * n
    maps = (
        Map(0, 1, m, k, k, TILE_M // across, TILE_K),
        Map(1, 1, b_rows, k, k, WIDTH * across // CLUSTER, TILE_K),
        Map(5, out.itemsize, rows, n, wide, 64, 128 // out.itemsize),
    )
    sizes = (pitch, int(b_scales), experts, k if ragged else m, m, n, -(-k // TILE_K), 8 // across)
    launch = Launch(
        _kernel(out, (own_a.dtype, own_b.dtype), ragged, across, blocks, device),
        multiprocessors // CLUSTER * CLUSTER,
        THREADS,
        (*maps, Address(5), Address(2), Address(3), Address(4), *sizes),
    )
    result = Buffer((experts, m, wide) if ragged else (m, wide), out)
    return LaunchPlan((result,), (), (launch,))


def source(
    out: torch.dtype, formats: Formats, ragged: bool, across: int, blocks: bool = False
) -> str:
    """The CUDA C++ to compile, for operands in these formats."""
    macros: dict[str, object] = {"OUT": FLOAT_MACROS[out], "BIAS": "NONE", "TILE_N": WIDTH}
    macros |= {"SUM": "int" if formats[0] == torch.int8 else "float", "STAGES": ring(WIDTH)[0]}
    macros |= {"RAGGED": ragged, "BESIDE": across, "BLOCKS": blocks}
    own = (
        instruction(formats, WIDTH // 2 if blocks else WIDTH),
        "matmul/mm_tiles_sm90.cuh",
        "matmul/grouped_mm_sm90.cu",
    )
    return program(macros, *SM90, *own)


@functools.cache
def _kernel(
    out: torch.dtype,
    formats: Formats,
    ragged: bool,
    across: int,
    blocks: bool,
    device: torch.device,
) -> nvrtc.Kernel:
    code, shared = source(out, formats, ragged, across, blocks), ring(WIDTH)[1]
    with torch.cuda.device(device):
        return nvrtc.kernel(code, "grouped_mm", 15, structs=3, shared=shared, overlaps=True)
