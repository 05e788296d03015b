"""Launches ``block_mm_sm90.cu``, the float8 product with scales of blocks on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels import nvrtc
from lowbit_kernels.library import aligned
from lowbit_kernels.sources import FLOAT_MACROS, program
from lowbit_kernels.tensor_map import tensor_map

TILE_N, TILE_K, WAVE, CLUSTER, THREADS = 128, 128, 64, 2, 384
RING = {2: (3, 4), 1: (5, 2)}
"""Stages of the ring and boxes of a warpgroup, by `Plan.waves`."""


class Plan(NamedTuple):
    """The division of a product.

    Attributes:
        waves: rows of a tile / 128.
        group: rows of tiles whose clusters follow each other, so that they share b in the L2 cache.
    """

    waves: int
    group: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 2 * self.waves * WAVE

    def tiles(self, m: int, n: int) -> int:
        """Clusters of tiles."""
        return -(-m // self.rows) * -(-n // (TILE_N * CLUSTER))


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, multiprocessors: int) -> Plan:
    """The division with the lowest estimated time of the busiest cluster, in steps of a tile of 256 rows."""

    def cost(one: Plan) -> float:
        rounds = -(-one.tiles(m, n) // (multiprocessors // CLUSTER))
        each = 1.0 if one.waves == 2 else 0.6
        return rounds * each * (k // TILE_K + 4)

    return min((Plan(2, 8), Plan(1, 16)), key=cost)


def block_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``lowbit::block_scaled_mm`` on a GPU of compute capability 9.0. The operands are checked; M, N, K > 0."""
    (m, k), n = a.shape, b.shape[0]
    steps, by_column = k // TILE_K, b_scale.shape == (k // TILE_K, n)
    a, b = aligned(a), aligned(b)
    a_scale, b_scale = _rows_of_16_bytes(a_scale), b_scale.contiguous()
    b_scales = _rows_of_16_bytes(b_scale) if by_column else a_scale  # the latter is not read
    bias = None if bias is None else bias.contiguous()
    # The TMA stores rows that begin at multiples of 16 bytes. Other widths are cut from a wider result.
    pitch = -(-n * out_dtype.itemsize // 16) * 16 // out_dtype.itemsize
    out = a.new_empty((m, pitch), dtype=out_dtype)
    with torch.cuda.device_of(a):
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        multiprocessors = nvrtc.multiprocessors(a.device)
        chosen = plan(m, n, k, multiprocessors)
        own, box = chosen.rows // CLUSTER, 128 // out_dtype.itemsize
        maps = (
            tensor_map(a.data_ptr(), 1, m, k, k, own, TILE_K),
            tensor_map(b.data_ptr(), 1, n, k, k, TILE_N, TILE_K),
            _pairs(a_scale, chosen.rows),
            _pairs(b_scales, TILE_N if by_column else chosen.rows),
            tensor_map(out.data_ptr(), out_dtype.itemsize, m, n, pitch, WAVE, box),
        )
        bias_dtype = None if bias is None else bias.dtype
        _kernel(out_dtype, bias_dtype, by_column, chosen.waves, device)(
            stream,
            min(chosen.tiles(m, n), multiprocessors // CLUSTER) * CLUSTER,
            THREADS,
            *(one.getPtr() for one in maps),
            *(b_scale.data_ptr(), 0 if bias is None else bias.data_ptr()),
            *(m, n, steps, chosen.group),
        )
    return out if pitch == n else out[:, :n].contiguous()


def _rows_of_16_bytes(scale: Tensor) -> Tensor:
    """The scales [steps, rows] in rows that begin at multiples of 16 bytes, as the TMA takes them."""
    return aligned(F.pad(scale, (0, -scale.shape[1] % 4)))


def _pairs(scale: Tensor, width: int):
    """The map of scales [steps, rows] in boxes of `width`. A pair is one element, since boxes of scales are longer than
    the 128 bytes of a swizzled row."""
    steps, rows = scale.shape
    return tensor_map(scale.data_ptr(), 8, steps, rows // 2, rows // 2, 1, width // 2)


def source(
    out: torch.dtype, bias: torch.dtype | None, column_scales: bool, waves: int = 2
) -> str:
    """The CUDA C++ to compile."""
    stages, boxes = RING[waves]
    macros: dict[str, object] = {
        "OUT": FLOAT_MACROS[out],
        "BIAS": FLOAT_MACROS[bias] if bias else "NONE",
        "COLUMN_SCALES": column_scales,
        "WAVES": waves,
        "STAGES": stages,
        "BOXES": boxes,
    }
    return program(macros, "ptx.cuh", "sm90.cuh", _multiply(), "block_mm_sm90.cu")


def shared_bytes(waves: int) -> int:
    """Bytes of shared memory of a block, at most."""
    stages, boxes = RING[waves]
    rows = 2 * waves * WAVE
    stage = (rows + TILE_N) * (TILE_K + 4) + 16  # codes, scales and barriers
    return stages * stage + 2 * boxes * WAVE * 128


def _multiply() -> str:
    """The wgmma instruction for 64 x 32 bytes of a and 128 x 32 of b; generated, with an operand for each sum."""
    sums = TILE_N // 2
    names = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    a, b, add, high = (f"%{sums + i}" for i in range(4))
    return f"""
// sums = a * b, plus sums if `add`
DEVICE void multiply(float (&sums)[{sums}], uint32 a, uint32 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 x, y;\\n"
        "setp.ne.b32 p, {add}, 0;\\n"
        "mov.b64 x, {{{a}, {high}}};\\n"
        "mov.b64 y, {{{b}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{TILE_N}k32.f32.e4m3.e4m3 {{{names}}}, x, y, p, 1, 1;\\n}}"
        : {operands}
        : "r"(a), "r"(b), "r"(add), "n"(OPERAND_HIGH));
}}
"""


@functools.cache
def _kernel(
    out: torch.dtype, bias: torch.dtype | None, column_scales: bool, waves: int, device: int
) -> nvrtc.Kernel:
    module = nvrtc.Module(nvrtc.compiled(source(out, bias, column_scales, waves), "sm_90a"))
    return module.kernel("block_mm", 11, structs=5, shared=shared_bytes(waves), overlaps=True)
