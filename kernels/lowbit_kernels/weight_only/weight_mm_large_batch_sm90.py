"""The large-batch kernel: launches ``weight_mm_large_batch_sm90.cu``, a GEMM on the wgmma instructions of compute
capability 9.0, for weights of 1 to 8 bits: integers, float8 and tables (`weight_lookup_sm90`).

    out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero_point[n, k // G]) * scale[n, k // G]
                + bias[n] + residual[m, n]

Blocks of a cluster may share the K of a tile (split-K). They exchange their sums through shared memory and add them in
the order of K, so results are the same in every run. A launch overlaps with the end of the previous one.

Only the result is rounded, with these exceptions. For 256 tokens or more and bfloat16 x and scales, weights may be
rounded to bfloat16, as a weight is that is dequantized before the product. Numbers of at most two significant bits,
such as integers up to 4, lose little by it. They and weights with zero points that are values are rounded for any
number of tokens. A table's values are rounded to the dtype of x, after a factor that brings them close to such numbers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program
from lowbit_kernels.runtime.tensor_map import takes_rows, tensor_map
from lowbit_kernels.weight_only.weight_lookup_sm90 import STEP, Unpacking, unpacking_of
from lowbit_kernels.weight_only.weight_operands import (
    HALVES,
    TensorLayout,
    Tensors,
    WeightOperands,
    addresses,
)

BOX = 16 * 48  # bytes of a warp's shared memory for results
MAX_STAGES = 12
BAND = 8  # tiles of tokens that the grid works through together


class LargeBatchDivision(NamedTuple):
    """How a product is divided: the macros of ``weight_mm_large_batch_sm90.cu``, and the number of clusters."""

    tokens: int  # of a tile
    rows: int  # of the weight in a block's tile; see `PAIRED` for 224
    groups: int  # warp groups that multiply
    beside: int  # blocks of a cluster on adjacent rows, which share copies of tokens
    split: int  # blocks of a cluster that share a tile's K (split-K)
    rounded: bool  # scales are multiplied into the weights
    chunk: int  # of K, in a pipeline stage
    stages: int
    clusters: int

    @property
    def cluster(self) -> int:
        return self.beside * self.split

    @property
    def divides(self) -> bool:
        """True if two blocks of a cluster share a tile of the last round, if at most half of the clusters have one."""
        tile = Tile(*self[:3])
        return self.beside == 2 and self.split * tile.lanes == 1 and not tile.overlaps


class Tile(NamedTuple):
    tokens: int
    rows: int
    groups: int

    @property
    def lanes(self) -> int:
        """Warp groups that take turns at chunks of the same rows."""
        return max(self.groups * 64 // self.rows, 1)

    @property
    def overlaps(self) -> bool:
        """True if two blocks hold the same 64 rows and take turns at their chunks."""
        return self.rows % 64 > 0

    @property
    def turns(self) -> int:
        return 2 if self.overlaps else self.lanes


SMALL = tuple(Tile(tokens, rows, 4) for tokens in (16, 32, 64) for rows in (64, 128, 256))
# Two adjacent blocks share 448 rows, and both hold the middle 64: see `weight_mm_large_batch_sm90.cu`.
PAIRED = tuple(Tile(tokens, 224, 4) for tokens in (16, 32))
BROAD = Tile(128, 128, 2)
MIDDLE = (*(Tile(tokens, 128, 2) for tokens in (16, 32, 64)), BROAD, Tile(64, 256, 2))
LARGE = (Tile(128, 256, 2), Tile(256, 128, 2))  # registers hold one set of sums only


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, unpacking: Unpacking, multiprocessors: int) -> LargeBatchDivision:
    """The plan with the fewest estimated clocks (`_clocks`)."""
    # Plans bound by memory have the same estimated cost. min() takes the first, which was slightly faster in practice.
    candidates = [
        LargeBatchDivision(*tile, beside, split, rounds, chunk, depth, clusters)
        for tile, rounds in _tiles(m, unpacking)
        for chunk in [chunk_of(tile, unpacking, k)]
        for beside in (1, 2)
        for split in (1, 2, 4, 8)
        if beside * split <= 8 and split <= min(-(-k // chunk), tile.rows // 16)
        if split == 1 or tile.tokens * tile.rows < 2**15
        if beside == 1 or tile.lanes == 1
        if not tile.overlaps or (beside, split) == (2, 1)
        for depth in [stages(*tile, split, unpacking, chunk)]
        if depth >= 2 * tile.turns
        for clusters in [_clusters(m, n, tile, beside, split, multiprocessors)]
    ]
    return min(candidates, key=lambda c: _clocks(c, m, n, k, unpacking))


def _tiles(m: int, unpacking: Unpacking) -> list[tuple[Tile, bool]]:
    """Tiles for M tokens, and whether scales are multiplied into the weights.

    The registers of the largest tiles don't hold two sets of sums. So integers of 4 and 8 bits are rounded with such
    tiles only: with smaller ones it would gain 3 to 5% and lose exactness. Sums of groups of 32 take 1.7 times bf16's
    time, rounded weights 1.1.
    """
    fitting = [t for t in (*PAIRED, *SMALL, *MIDDLE) if t.tokens < 2 * max(m, 16)]
    group, is_looked_up = unpacking.group, unpacking.lookup_bytes > 0
    rounds = unpacking.rounds(m)
    tiles = []
    if rounds and is_looked_up:
        large = (BROAD, *LARGE) if m > 64 else ()
        tiles = [(tile, True) for tile in (*large, *fitting)]
        if unpacking.rounding != "large":
            return tiles
    elif rounds and (group % 128 == 0 or unpacking.codes == "INT4"):
        tiles = [(LARGE[1], True), (BROAD, True)]
    elif group == 0 and m > 64:
        tiles = [(tile, False) for tile in (BROAD, *LARGE)]
    return [*tiles, *((tile, False) for tile in fitting if not _spills(tile, unpacking))]


def _spills(tile: Tile, unpacking: Unpacking) -> bool:
    """True if the sums of groups, the scales and the rest exceed a thread's registers."""
    if tile.tokens != 64 or unpacking.group == 0:
        return False
    if tile.rows < 256:
        return tile.groups == 4 and unpacking.codes in ("LOOKUP", "STREAM")
    return tile.groups == 4 or unpacking.group % 128 > 0


def _clusters(m: int, n: int, tile: Tile, beside: int, split: int, multiprocessors: int) -> int:
    """As many clusters as the GPU runs at a time, or as there are tiles. A cluster of more than 2 blocks lies in one
    part of the GPU: an H200 with 132 multiprocessors runs 30 of 4 blocks or 15 of 8."""
    size = beside * split
    most = max((multiprocessors if size <= 2 else multiprocessors * 10 // 11) // size, 1)
    return min(most, -(-n // (tile.rows * beside)) * -(-m // tile.tokens))


def _clocks(plan: LargeBatchDivision, m: int, n: int, k: int, unpacking: Unpacking) -> float:
    """The estimated clocks of a cluster, fitted to measurements on an H200 (looked-up codes: to 560 of them, 10% off).

    Each chunk takes the slowest of: unpacking and products (with two warp groups, their latency); the L2 cache, at 44
    bytes a clock; memory, at 2,110 bytes a clock for all clusters. The exchange of sums and the results come on top.
    """
    chunks = -(-k // (plan.chunk * plan.split))
    columns = -(-m // plan.tokens)
    tiles = -(-n // (plan.rows * plan.beside)) * columns
    bits = unpacking.bits
    codes, tokens = plan.rows * plan.chunk * bits // 8, plan.tokens * plan.chunk * 2
    alone = plan.rows <= 64 * plan.groups  # a warp group has 64 rows, which hide less latency
    own = 165 + 3.4 * plan.tokens
    if plan.groups == 2 and alone:
        own = max(300, 200 + 3.15 * plan.tokens)
    if bits == 8 or plan.rounded:  # sums of groups are usually not scaled
        own -= 35
    if unpacking.table:
        own += 100 if plan.groups == 2 else 40
    elif unpacking.codes == "STREAM":
        own += 250
    elif unpacking.codes == "E4M3" and plan.tokens >= 128:
        own += 50
    part = plan.chunk / 128
    products = max(own * part + (110 if alone or bits == 8 else 55), 4.8 * plan.tokens * part)
    chunk = max(
        plan.rows / 64 * products,
        (codes + tokens / plan.beside) / 44,
        codes * plan.clusters * plan.cluster / 2110 / min(columns, BAND),
    )
    end = 3500
    if plan.split * Tile(*plan[:3]).lanes > 1:
        sums = _fixed(*plan[:3], plan.split, unpacking) - unpacking.lookup_bytes
        end = 4730 + sums // (24 if unpacking.table and plan.split == 1 else 12)
    whole, left = divmod(tiles, plan.clusters)
    divided = plan.divides and left * 2 <= plan.clusters
    rounds = whole + (left > 0) * (0.6 if divided else 1.0)
    if rounds > 1 and columns > 1 and plan.beside == 1:
        rounds *= 1.03  # blocks that read the same tokens drift apart in time
    return rounds * (chunks * chunk + end)


def chunk_of(tile: Tile, unpacking: Unpacking, k: int) -> int:
    """K of a pipeline stage. Narrow tiles load rows of 128 bytes of codes, since the TMA takes nearly as long for rows
    of 64. Wide tiles have smaller stages, so that more of them fit. The scales of a chunk's two groups are read
    together, so a row must have an even number of them. Scales that are multiplied are read for a whole chunk."""
    bits, group = unpacking.bits, unpacking.group
    if tile.tokens == 256 and (bits == 8 or (unpacking.table and bits == 4)):
        return STEP
    if unpacking.table:
        fills = (
            tile.tokens == 64 and tile.lanes > 1 and bits == 4
        )  # with few stages, beside sums and the table
        return STEP if fills or (unpacking.rounding != "never" and k % (2 * STEP)) else 2 * STEP
    paired = group % 128 == 0 and (group != 128 or -(-k // 128) % 2 == 0)
    narrow = tile.tokens <= 32 or tile == (64, 128, 2)
    return 256 if narrow and bits == 4 and paired else 128


def stages(
    tokens: int, rows: int, groups: int, split: int, unpacking: Unpacking, chunk: int
) -> int:
    """The pipeline stages that fit into shared memory, a multiple of the tile's turns."""
    fixed = _fixed(tokens, rows, groups, split, unpacking) + 16 * MAX_STAGES
    most = min((nvrtc.SHARED_LIMIT - fixed) // _stage(tokens, rows, unpacking, chunk), MAX_STAGES)
    return most - most % Tile(tokens, rows, groups).turns


def _stage(tokens: int, rows: int, unpacking: Unpacking, chunk: int) -> int:
    held = -(-rows // 64) * 64  # 256 for 224 rows, which overlap
    return held * chunk * unpacking.bits // 8 + tokens * chunk * 2


def _fixed(tokens: int, rows: int, groups: int, split: int, unpacking: Unpacking) -> int:
    """Bytes of shared memory besides the stages and their barriers."""
    tile, looked_up = Tile(tokens, rows, groups), unpacking.lookup_bytes
    if split * tile.lanes > 1:
        return tokens * rows * 4 * tile.lanes + BOX + 16 + looked_up
    return (tokens * 128 if tile.overlaps else 1024) + 4 * groups * BOX + 16 + looked_up


def takes(operands: WeightOperands) -> bool:
    """True if the kernel multiplies these: a format that it unpacks, codes that the TMA can read, in rows that begin at
    multiples of 16 bytes, and groups of multiples of 32, or of 16 where scales are multiplied into the weights. float8
    takes one scale a row, and K without padding, which may be NaN."""
    x, codes = operands.x, operands.codes
    pitch = codes.strides[0] if operands.n > 1 else codes.shape[1]
    return (
        x.dtype in HALVES
        and x.strides[1] == 1
        and codes.strides[1] == 1
        and takes_rows(pitch, codes.shape[1])
        and codes.misaligned == 0
        and (operands.padded_k % 32 == 0 or operands.bits == 8)
        and operands.n * operands.groups < 2**32
        and min(*x.shape, *codes.shape) > 0
        and unpacking_of(operands) is not None
    )


def product(operands: WeightOperands) -> LargeBatchProduct | None:
    """The planned product; None where the device or the operands are not the kernel's."""
    if not (nvrtc.runs_on_hopper(operands.x.device) and takes(operands)):
        return None
    own, processors = unpacking_of(operands), nvrtc.multiprocessors(operands.x.device)
    assert own is not None
    return LargeBatchProduct(operands, plan(operands.m, operands.n, operands.k, own, processors))


class LargeBatchProduct:
    """The product of operands for which `takes` holds, divided as `plan` says."""

    def __init__(self, operands: WeightOperands, plan: LargeBatchDivision) -> None:
        x, codes, residual = operands.x, operands.codes, operands.residual
        (m, k), (n, row) = x.shape, codes.shape
        self.plan, self.shape, self.dtype = plan, (m, n), operands.out
        self.is_ready = operands.has_aligned_scales
        self.copies_x = not is_readable(x)
        x_pitch = _even(k) if self.copies_x or m == 1 else x.strides[0]
        share, height = plan.tokens // plan.beside, 64 if plan.rows % 64 else min(plan.rows, 128)
        pitch = codes.strides[0] if n > 1 else row
        self.codes_map = (1, n, row, pitch, height, plan.chunk * operands.bits // 8)
        self.x_map = (2, m, k, x_pitch, share, 64)
        wide = n % 8 == 0 and (residual is None or residual.misaligned == 0)
        self.grid, self.threads = plan.clusters * plan.cluster, 128 * (plan.groups + 1)
        self.sizes = (
            *(m, n, -(-k // plan.chunk), operands.groups),
            *(-(-n // (plan.rows * plan.beside)), -(-m // plan.tokens), BAND, int(wide)),
        )
        own = unpacking_of(operands)
        assert own is not None
        self.macros = (x.dtype, operands.out, own, plan[:8])

    @functools.cached_property
    def kernel(self) -> nvrtc.Kernel:
        """On the current device."""
        return _kernel(*self.macros, torch.cuda.current_device())

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, residual, token_scale, global_scale = tensors
        if not self.is_ready:  # the kernel reads two scales at a time
            scale = aligned(scale)
            zero_point = None if zero_point is None else aligned(zero_point)
        if self.copies_x:
            x = readable(x)
        out = x.new_empty(self.shape, dtype=self.dtype)
        with torch.cuda.device_of(x):
            self.kernel(
                torch.cuda.current_stream().cuda_stream,
                self.grid,
                self.threads,
                tensor_map(codes.data_ptr(), *self.codes_map).getPtr(),
                tensor_map(x.data_ptr(), *self.x_map).getPtr(),
                *addresses(scale, zero_point, bias, residual, token_scale, global_scale, out),
                *self.sizes,
            )
        return out


def is_readable(x: TensorLayout) -> bool:
    """True if the TMA reads x [M, K] of 16-bit numbers: rows begin at multiples of 16 bytes and don't overlap."""
    apart = x.shape[0] == 1 or takes_rows(2 * x.strides[0], 2 * x.shape[1])
    return x.misaligned == 0 and apart


def readable(x: Tensor) -> Tensor:
    """A copy of x that `is_readable`."""
    copy = x.new_empty((x.shape[0], _even(x.shape[1])))[:, : x.shape[1]]
    return copy.copy_(x)


def _even(k: int) -> int:
    """Elements between rows of k elements that begin at multiples of 16 bytes."""
    return -(-k // 8) * 8


def source(
    dtype: torch.dtype,
    out: torch.dtype,
    unpacking: Unpacking,
    shape: tuple[int, int, int, int, int, bool, int, int],
) -> str:
    """The CUDA C++ to compile; `shape` is a `LargeBatchDivision` without its clusters."""
    names = ("TOKENS", "ROWS", "GROUPS", "BESIDE", "SPLIT", "ROUNDED", "CHUNK", "STAGES")
    macros = {"DTYPE": FLOAT_MACROS[dtype], "OUT": FLOAT_MACROS[out], **unpacking.macros()}
    macros |= dict(zip(names, shape, strict=True))
    headers = "runtime/ptx.cuh", "runtime/sm90.cuh", "weight_only/weight_lookup_sm90.cuh"
    return program(
        macros, *headers, _multiply(shape[0], dtype), "weight_only/weight_mm_large_batch_sm90.cu"
    )


def _multiply(tokens: int, dtype: torch.dtype) -> str:
    """The wgmma instruction for 64 x 16 elements in registers and tokens x 16 in shared memory; generated, with an
    operand for each sum."""
    sums = tokens // 2
    names = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    first = ", ".join(f"%{sums + i}" for i in range(4))
    b, add = (f"%{sums + 4 + i}" for i in range(2))
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    return f"""
// sums = a * b, plus sums if `add`
DEVICE void multiply(float (&sums)[{sums}], const uint32 *a, uint64 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n"
        "setp.ne.b32 p, {add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{kind}.{kind} {{{names}}}, {{{first}}}, {b}, p, 1, 1, 0;\\n}}"
        : {operands}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}}
"""


@functools.cache
def _kernel(
    dtype: torch.dtype,
    out: torch.dtype,
    unpacking: Unpacking,
    shape: tuple[int, int, int, int, int, bool, int, int],
    device: int,
) -> nvrtc.Kernel:
    module = nvrtc.Module(nvrtc.compiled(source(dtype, out, unpacking, shape), "sm_90a"))
    tokens, rows, groups, _, split, _, chunk, stages = shape
    shared = stages * (_stage(tokens, rows, unpacking, chunk) + 16)
    shared += _fixed(tokens, rows, groups, split, unpacking)
    return module.kernel("weight_mm", 17, structs=2, shared=shared, overlaps=True)
