"""Launches ``w4a8_mm_sm90.cu``: tokens of 8 bits times a weight of 4 bits, on GPUs of compute capability 9.0.

    out[m, n] = token_scale[m] * sum_g scale[n, g] * (sum_k x[m, k] * (code[n, k] - zero_point[n, g])) + bias[n]

int8 times int4: a group's sum is exact in int32. It is scaled, and added to those of other groups, in float32. Groups
are of 64 or a multiple of 128, or a row has one scale.

float8 e4m3 times MXFP4: the weight is exact in e4m3 under one scale a row, unless the exponents of a row span 15
octaves or more. Then all tiles of these rows are computed in several passes, each with the groups of 15 octaves.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.runtime.tensor_map import takes_rows, tensor_map
from lowbit_kernels.runtime.wgmma import multiply_from_registers
from lowbit_kernels.weight_only.codes_format import E2M1
from lowbit_kernels.weight_only.weight_mm_large_batch_sm90 import (
    MIXED_GAIN,
    MIXED_WITHIN,
    full_rows,
    longest_of,
)
from lowbit_kernels.weight_only.weight_operands import HALVES, Tensors, WeightOperands, addresses

CHUNK, THREADS = 128, 384
MAX_STAGES = 12
BAND = 8  # tiles of tokens that the grid works through together


class W4A8Division(NamedTuple):
    """How a product is divided: macros of ``w4a8_mm_sm90.cu``."""

    tokens: int  # of a tile
    split: int = 1  # blocks of a cluster that share a tile's K; if 1, two blocks have adjacent rows
    last_tokens: int = 0  # of a tile in the last rows; 0: as of the others
    full_rows: int = 0  # rows of tiles before the last ones, if those have fewer tokens
    lanes: int = 1  # warp groups that take turns at the K of the same 64 rows
    period: int = 4  # chunks that a warp group takes at a time; 8 takes fewer clocks

    @property
    def beside(self) -> int:
        return 2 if self.split == 1 else 1

    @property
    def cluster(self) -> int:
        return self.beside * self.split

    @property
    def rows(self) -> int:
        """Outputs that a block's tile has."""
        return 128 // self.lanes

    def height(self, n: int) -> int:
        """Rows of tiles of clusters."""
        return -(-n // (self.rows * self.beside))

    def chunks(self, k: int) -> int:
        """Chunks that warp groups take in equal numbers; those beyond K are zeros."""
        turn = self.period * self.lanes
        return max(-(-k // (CHUNK * turn)), self.split) * turn

    def stages(self) -> tuple[int, int]:
        """Stages of the ring, and bytes of shared memory of a block."""
        stage = self.rows * CHUNK // 2 + self.tokens * CHUNK
        sources, turn = self.split * self.lanes, self.period * self.lanes
        sums = 4 * 128 * self.tokens if sources > 1 else 1024
        results = 2 * self.tokens // sources * 128
        numbers = 16 * 8
        fixed = results + sums + 2 * 4 * self.tokens + numbers + 16 * (MAX_STAGES + 1)
        count = min((nvrtc.SHARED_LIMIT - fixed) // stage, MAX_STAGES) // turn * turn
        return count, count * stage + fixed


LEAST_TOKENS = 33  # for which an H200 was faster than with x's codes as floating-point numbers


TOKENS = (64, 80, 96, 112, 128)
CHUNK_CLOCKS = {"INT4": (264, 3.42), "INT4_64": (264, 3.42), "E2M1": (700, 2.0)}
"""Clocks of a chunk of 128 rows: without tokens, and for each one. INT4's are fitted, see `plan`; those of groups of 64
and of E2M1 are not."""
START, END, EXCHANGE = 9240, (1430, 7.2), (3340, 3.3)
"""Clocks of a launch; of the end of a tile, without tokens and for each one; and the same where sums are exchanged."""
MIXING = 1.04  # what tiles of two sizes cost beyond the estimate
LONG_PERIOD, LONG_TOKENS = 0.94, 96
"""Clocks of a chunk in periods of 8 over those in periods of 4, for INT4; the least tokens of a tile that has them."""


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, kind: str, multiprocessors: int) -> W4A8Division:
    """The division with the fewest estimated clocks. The estimate for int4 is fitted to 131 products of 18 shapes on an
    H200. The divisions that it chose of these took at most 1.004 times as long as the fastest ones.

    Args:
        kind: a key of `CHUNK_CLOCKS`.
    """
    candidates = [
        W4A8Division(tokens, split, lanes=lanes)
        for tokens in TOKENS
        for split, lanes in ((1, 1), (2, 1), (2, 2))
        if tokens % (16 * split * lanes) == 0
    ]
    if kind == "INT4":
        candidates += [W4A8Division(t, period=8) for t in TOKENS if t >= LONG_TOKENS]
    clocks = {c: _clocks(c, m, n, k, kind, multiprocessors) for c in candidates if c.stages()[0]}
    best = min(clocks, key=clocks.__getitem__)
    found = MIXED_GAIN * clocks[best], best
    for of in clocks:
        if of.split * of.lanes == 1 and clocks[of] < MIXED_WITHIN * clocks[best]:
            found = _mixed(found, of, m, n, k, kind, multiprocessors)
    return found[1]


def _clocks(of: W4A8Division, m: int, n: int, k: int, kind: str, multiprocessors: int) -> float:
    tiles, clusters = of.height(n) * -(-m // of.tokens), multiprocessors // of.cluster
    return START + -(-tiles // clusters) * _tile_clocks(of, of.tokens, k, kind)


def _tile_clocks(of: W4A8Division, tokens: int, k: int, kind: str) -> float:
    """Chunks, and the end of the tile."""
    parts = [CHUNK_CLOCKS[kind], END] + ([EXCHANGE] if of.split * of.lanes > 1 else [])
    chunk, *ends = (base + each * tokens for base, each in parts)
    chunk *= LONG_PERIOD if of.period == 8 else 1.0
    return of.chunks(k) / (of.split * of.lanes) * chunk + sum(ends)


def _mixed(
    best: tuple[float, W4A8Division],
    of: W4A8Division,
    m: int,
    n: int,
    k: int,
    kind: str,
    multiprocessors: int,
) -> tuple[float, W4A8Division]:
    """The clocks and the division of the best product with the tiles of `of` and smaller ones in the last rows; `best`
    where none takes fewer clocks."""
    height, columns, clusters = of.height(n), -(-m // of.tokens), multiprocessors // of.cluster
    first = _tile_clocks(of, of.tokens, k, kind)
    for tokens in (t for t in TOKENS if t < min(of.tokens, m)):
        last = _tile_clocks(of, tokens, k, kind)
        for rows in full_rows(height, columns, clusters):
            count = rows * columns
            tiles = count + (height - rows) * -(-m // tokens)
            clocks = START + MIXING * longest_of(count, tiles, clusters, first, last)
            if clocks < best[0]:
                best = clocks, of._replace(last_tokens=tokens, full_rows=rows)
    return best


def takes(operands: WeightOperands) -> bool:
    """True if the kernel multiplies these, whose x has int8 codes in the order of `quantize_rows_sm90`."""
    codes, width = operands.codes, operands.padded_k
    pitch = codes.strides[0] if operands.n > 1 else codes.shape[1]
    return (
        operands.out in HALVES
        and codes.dtype == torch.uint8
        and (_is_int4(operands) or is_mxfp4(operands))
        and width % 32 == 0
        and codes.strides[1] == 1
        and takes_rows(pitch, codes.shape[1])
        and codes.misaligned == 0
        and min(*operands.x.shape, *codes.shape) > 0
    )


def _is_int4(operands: WeightOperands) -> bool:
    is_integer = operands.format.is_int4_or_int8 and operands.scale.dtype in FLOAT_MACROS
    return is_integer and (operands.group % CHUNK == 0 or operands.group == 64)


def is_mxfp4(operands: WeightOperands) -> bool:
    """True for E2M1 with a power of two as the scale of each 32 codes."""
    is_power = operands.scale.dtype == torch.uint8
    return operands.format.table == E2M1 and is_power and operands.group_size == 32


def product(operands: WeightOperands) -> W4A8Product | None:
    """The planned product; None where the device or the operands are not the kernel's."""
    if not (nvrtc.runs_on_hopper(operands.x.device) and takes(operands)):
        return None
    return W4A8Product(operands)


class W4A8Product:
    """The product of operands for which `takes` holds. A residual is added to the rounded product.

    Codes of x and scales of tokens must be those of `quantize_rows_sm90.turned_codes`: without the signs of scales,
    sums of large int8 codes overflow. With MXFP4 the product takes the ranges of exponents in place of zero points.
    """

    def __init__(self, operands: WeightOperands, division: W4A8Division | None = None) -> None:
        (n, row), m, k = operands.codes.shape, operands.m, operands.k
        multiprocessors = nvrtc.multiprocessors(operands.codes.device)
        is_short = operands.group == 64
        kind = "E2M1" if is_mxfp4(operands) else "INT4_64" if is_short else "INT4"
        division = division or plan(m, n, k, kind, multiprocessors)
        tokens, beside, cluster = division.tokens, division.beside, division.cluster
        self.out = operands.out
        self.pitch = -(-n // 8) * 8  # the TMA stores rows that begin at multiples of 16 bytes
        pitch = operands.codes.strides[0] if n > 1 else row
        width = k + -k % CHUNK
        chunks = division.chunks(k)
        self.shape = m, n
        self.codes_map = (1, n, row, pitch, division.rows, CHUNK // 2)
        last = division.last_tokens or tokens
        self.x_maps = [(1, m, width, width, t // beside, CHUNK) for t in (tokens, last)]
        self.out_maps = [
            (2, m, n, self.pitch, t // (division.split * division.lanes), 64)
            for t in (tokens, last)
        ]
        rows, columns, last_columns = (
            -(-n // (division.rows * beside)),
            -(-m // tokens),
            -(-m // last),
        )
        full = division.full_rows if division.last_tokens else rows
        tiles = full * columns + (rows - full) * last_columns
        self.grid = min(tiles, multiprocessors // cluster) * cluster
        self.sizes = m, n, chunks, operands.groups, rows, columns, BAND, full, last_columns
        if kind == "E2M1":
            vector = operands.groups % (CHUNK // 32 * division.period) == 0
            self.macros = "E2M1", operands.out, torch.float32, 0, False, vector, division
        else:
            zero = operands.zero_point is not None
            # The groups of a period are loaded at once.
            vector = (
                0 < operands.group <= CHUNK
                and operands.groups % (CHUNK // operands.group * division.period) == 0
            )
            self.macros = (
                "INT4",
                operands.out,
                operands.scale.dtype,
                operands.group,
                zero,
                vector,
                division,
            )

    @functools.cached_property
    def kernel(self) -> nvrtc.Kernel:
        """On the current device."""
        return _kernel(*self.macros, torch.cuda.current_device())

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, residual, token_scale, _ = tensors
        scale = aligned(scale)  # both are read in vectors
        zero_point = None if zero_point is None else aligned(zero_point)
        (m, n), pitch = self.shape, self.pitch
        out = codes.new_empty((m, pitch), dtype=self.out)
        with torch.cuda.device_of(x):
            self.kernel(
                torch.cuda.current_stream().cuda_stream,
                self.grid,
                THREADS,
                tensor_map(codes.data_ptr(), *self.codes_map).getPtr(),
                *(
                    tensor_map(tensor.data_ptr(), *description).getPtr()
                    for maps in zip(self.x_maps, self.out_maps, strict=True)
                    for tensor, description in zip((x, out), maps, strict=True)
                ),
                *addresses(scale, zero_point, bias, token_scale),
                *self.sizes,
            )
        out = out if pitch == n else out[:, :n].contiguous()
        return out if residual is None else out.add_(residual)


CONSUMERS = {
    "INT4": ("s32.s8.s8", "weight_only/int4_as_int8.cuh", "matmul/w4a8_int4_sm90.cuh"),
    "E2M1": ("f32.e4m3.e4m3", "matmul/w4a8_e2m1_sm90.cuh"),
}
"""The types of the products of each format, and the files of its consumers."""


def source(
    codes: str,
    out: torch.dtype,
    scale: torch.dtype,
    group: int,
    zero: bool,
    vector: bool,
    division: W4A8Division,
) -> str:
    """The CUDA C++ to compile."""
    macros: dict[str, object] = {"CODES": codes, "OUT": FLOAT_MACROS[out]}
    macros |= {"SCALE": FLOAT_MACROS[scale], "GROUP": group, "ZERO": zero}
    macros |= {
        "VECTOR": vector,
        "LANES": division.lanes,
        "TOKENS": division.tokens,
        "LAST_TOKENS": division.last_tokens,
        "SPLIT": division.split,
        "PERIOD": division.period,
        "STAGES": division.stages()[0],
    }
    types, *consumer = CONSUMERS[codes]
    before = *SM90, "runtime/load_words.cuh", "matmul/w4a8_tiles_sm90.cuh"
    sizes = {t for t in (division.tokens, division.last_tokens) if t}
    multiply = "".join(multiply_from_registers(t, 32, types) for t in sorted(sizes))
    return program(macros, *before, multiply, *consumer, "matmul/w4a8_mm_sm90.cu")


@nvrtc.variants
def _kernel(
    codes: str,
    out: torch.dtype,
    scale: torch.dtype,
    group: int,
    zero: bool,
    vector: bool,
    division: W4A8Division,
    device: int,
) -> nvrtc.Kernel:
    code = source(codes, out, scale, group, zero, vector, division)
    shared = division.stages()[1]
    return nvrtc.kernel(code, "w4a8_mm", 18, structs=5, shared=shared, overlaps=True)
