"""The large-batch kernel: launches ``weight_mm_large_batch_sm90.cu``, a GEMM on the wgmma instructions of compute
capability 9.0, for weights of 4 or 8 bits, integers or float8.

    out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero_point[n, k // G]) * scale[n, k // G]
                + bias[n] + residual[m, n]

Blocks of a cluster may share the K of a tile (split-K). They exchange their sums through shared memory and add them in
the order of K, so results are the same in every run. A launch overlaps with the end of the previous one.

Only the result is rounded, with one exception: for 256 tokens or more and bfloat16 x and scales, weights may be rounded
to bfloat16, as a weight is that is dequantized before the product.
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
from lowbit_kernels.weight_only.weight_operands import (
    CODE_MACROS,
    E4M3,
    GROUP_STEP,
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
def plan(
    m: int,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    multiprocessors: int,
    may_round: bool = False,
) -> LargeBatchDivision:
    """The plan with the fewest estimated clocks (`_clocks`).

    `group_size` 0 stands for one scale a row. `may_round` allows scales to be multiplied into the weights, which are
    rounded to bfloat16 then. Plans do so only for groups of multiples of 128 and at least 256 tokens, where registers
    don't hold two sets of sums. With fewer tokens it would gain 3 to 5% and lose exactness.
    """
    # Plans bound by memory have the same estimated cost. min() takes the first, which was slightly faster in practice.
    tiles = []
    if group_size == 0 and m > 64:
        tiles = [(tile, False) for tile in (BROAD, *LARGE)]
    elif may_round and group_size % 128 == 0 and m >= 256:
        tiles = [(LARGE[1], True)]
    fitting = [t for t in (*PAIRED, *SMALL, *MIDDLE) if t.tokens < 2 * max(m, 16)]
    tiles += [(tile, False) for tile in fitting if not _spills(tile, group_size)]
    candidates = [
        LargeBatchDivision(*tile, beside, split, rounds, chunk, depth, clusters)
        for tile, rounds in tiles
        for chunk in [chunk_of(tile, bits, group_size, k)]
        for beside in (1, 2)
        for split in (1, 2, 4, 8)
        if beside * split <= 8 and split <= min(-(-k // chunk), tile.rows // 16)
        if split == 1 or tile.tokens * tile.rows < 2**15
        if beside == 1 or tile.lanes == 1
        if not tile.overlaps or (beside, split) == (2, 1)
        for depth in [stages(*tile, split, bits, chunk)]
        if depth >= 2 * tile.turns
        for clusters in [_clusters(m, n, tile, beside, split, multiprocessors)]
    ]
    return min(candidates, key=lambda c: _clocks(c, m, n, k, bits))


def _spills(tile: Tile, group_size: int) -> bool:
    """True if the sums of groups, the scales and the rest exceed a thread's registers."""
    if tile[:2] != (64, 256) or group_size == 0:
        return False
    return tile.groups == 4 or group_size % 128 > 0


def _clusters(m: int, n: int, tile: Tile, beside: int, split: int, multiprocessors: int) -> int:
    """As many clusters as the GPU runs at a time, or as there are tiles. A cluster of more than 2 blocks lies in one
    part of the GPU: an H200 with 132 multiprocessors runs 30 of 4 blocks or 15 of 8."""
    size = beside * split
    most = (multiprocessors if size <= 2 else multiprocessors * 10 // 11) // size
    return min(max(most, 1), -(-n // (tile.rows * beside)) * -(-m // tile.tokens))


def _clocks(plan: LargeBatchDivision, m: int, n: int, k: int, bits: int) -> float:
    """The estimated clocks of a cluster, fitted to measurements on an H200.

    Each chunk takes the slowest of: unpacking and products (with two warp groups, their latency); the L2 cache, at 44
    bytes a clock; memory, at 2,110 bytes a clock for all clusters. The exchange of sums and the results come on top.
    """
    chunks = -(-k // (plan.chunk * plan.split))
    columns = -(-m // plan.tokens)
    tiles = -(-n // (plan.rows * plan.beside)) * columns
    codes, tokens = plan.rows * plan.chunk * bits // 8, plan.tokens * plan.chunk * 2
    alone = plan.rows <= 64 * plan.groups  # a warp group has 64 rows, which hide less latency
    unpacking = 165 + 3.4 * plan.tokens
    if plan.groups == 2 and alone:
        unpacking = max(300, 200 + 3.15 * plan.tokens)
    if bits == 8 or plan.rounded:  # sums of groups are usually not scaled
        unpacking -= 35
    part = plan.chunk / 128
    products = max(unpacking * part + (110 if alone or bits == 8 else 55), 4.8 * plan.tokens * part)
    chunk = max(
        plan.rows / 64 * products,
        (codes + tokens / plan.beside) / 44,
        codes * plan.clusters * plan.cluster / 2110 / min(columns, BAND),
    )
    end = 3500
    if plan.split * Tile(*plan[:3]).lanes > 1:
        end = 4730 + _fixed(*plan[:3], plan.split) // 12
    whole, left = divmod(tiles, plan.clusters)
    divided = plan.divides and left * 2 <= plan.clusters
    rounds = whole + (left > 0) * (0.6 if divided else 1.0)
    if rounds > 1 and columns > 1 and plan.beside == 1:
        rounds *= 1.03  # blocks that read the same tokens drift apart in time
    return rounds * (chunks * chunk + end)


def chunk_of(tile: Tile, bits: int, group_size: int, k: int) -> int:
    """K of a pipeline stage. Narrow tiles load rows of 128 bytes of codes, since the TMA takes nearly as long for rows
    of 64. Wide tiles have smaller stages, so that more of them fit. The scales of a chunk's two groups are read
    together, so a row must have an even number of them."""
    if tile.tokens == 256 and bits == 8:
        return 64
    paired = group_size % 128 == 0 and (group_size != 128 or -(-k // 128) % 2 == 0)
    narrow = tile.tokens <= 32 or tile == (64, 128, 2)
    return 256 if narrow and bits == 4 and paired else 128


def stages(tokens: int, rows: int, groups: int, split: int, bits: int, chunk: int) -> int:
    """The pipeline stages that fit into shared memory, a multiple of the tile's turns."""
    fixed = _fixed(tokens, rows, groups, split) + 16 * MAX_STAGES
    most = min((nvrtc.SHARED_LIMIT - fixed) // _stage(tokens, rows, bits, chunk), MAX_STAGES)
    return most - most % Tile(tokens, rows, groups).turns


def _stage(tokens: int, rows: int, bits: int, chunk: int) -> int:
    held = -(-rows // 64) * 64  # 256 for 224 rows, which overlap
    return held * chunk * bits // 8 + tokens * chunk * 2


def _fixed(tokens: int, rows: int, groups: int, split: int) -> int:
    """Bytes of shared memory besides the stages and their barriers."""
    tile = Tile(tokens, rows, groups)
    if split * tile.lanes > 1:
        return tokens * rows * 4 * tile.lanes + BOX + 16
    return (tokens * 128 if tile.overlaps else 1024) + 4 * groups * BOX + 16


def takes(operands: WeightOperands) -> bool:
    """True if the kernel multiplies these: codes that the TMA can read, in rows that begin at multiples of 16 bytes,
    and groups of multiples of 32. float8 takes float16 x, one scale a row, and K without padding, which may be NaN."""
    x, codes, scale = operands.x, operands.codes, operands.scale
    width = operands.padded_k
    pitch = codes.strides[0] if operands.n > 1 else codes.shape[1]
    return (
        (x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and codes.dtype != E4M3))
        and ((operands.groups == 1 and operands.k == width) or codes.dtype != E4M3)
        and codes.dtype in CODE_MACROS
        and (codes.dtype == E4M3 or operands.format.is_int4_or_int8)
        and scale.dtype in FLOAT_MACROS
        and x.strides[1] == 1
        and codes.strides[1] == 1
        and takes_rows(pitch, codes.shape[1])
        and codes.misaligned == 0
        and width % 32 == 0
        and operands.group_size % GROUP_STEP == 0
        and operands.n * operands.groups < 2**32
        and min(*x.shape, *codes.shape) > 0
    )


def product(operands: WeightOperands) -> LargeBatchProduct | None:
    """The planned product; None where the device or the operands are not the kernel's."""
    if not (nvrtc.runs_on_hopper(operands.x.device) and takes(operands)):
        return None
    may_round = operands.x.dtype == operands.scale.dtype == torch.bfloat16
    processors = nvrtc.multiprocessors(operands.x.device)
    shape = (operands.m, operands.n, operands.k, operands.bits, operands.group)
    return LargeBatchProduct(operands, plan(*shape, processors, may_round))


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
        dtypes = (x.dtype, operands.out, operands.scale.dtype, codes.dtype)
        self.macros = (*dtypes, operands.zero_point is not None, operands.group, plan[:8])

    @functools.cached_property
    def kernel(self) -> nvrtc.Kernel:
        """On the current device."""
        return _kernel(*self.macros, torch.cuda.current_device())

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, residual, token_scale, *_ = tensors
        if not self.is_ready:  # the kernel reads two scales at a time
            scale = aligned(scale)
            zero_point = None if zero_point is None else zero_point.contiguous()
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
                *addresses(scale, zero_point, bias, residual, token_scale, out),
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
    scale: torch.dtype,
    codes: torch.dtype,
    zero: bool,
    group: int,
    shape: tuple[int, int, int, int, int, bool, int, int],
) -> str:
    """The CUDA C++ to compile; `shape` is a `LargeBatchDivision` without its clusters."""
    names = ("TOKENS", "ROWS", "GROUPS", "BESIDE", "SPLIT", "ROUNDED", "CHUNK", "STAGES")
    macros: dict[str, object] = {
        "DTYPE": FLOAT_MACROS[dtype],
        "OUT": FLOAT_MACROS[out],
        "CODES": CODE_MACROS[codes],
    }
    macros |= {"GROUP": group, "SCALE": FLOAT_MACROS[scale], "ZERO": zero}
    macros |= dict(zip(names, shape, strict=True))
    own = _multiply(shape[0], dtype), "weight_only/weight_mm_large_batch_sm90.cu"
    return program(macros, "runtime/ptx.cuh", "runtime/sm90.cuh", *own)


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
    scale: torch.dtype,
    codes: torch.dtype,
    zero: bool,
    group: int,
    shape: tuple[int, int, int, int, int, bool, int, int],
    device: int,
) -> nvrtc.Kernel:
    code = source(dtype, out, scale, codes, zero, group, shape)
    module = nvrtc.Module(nvrtc.compiled(code, "sm_90a"))
    tokens, rows, groups, _, split, _, chunk, stages = shape
    bits = 4 if codes == torch.uint8 else 8
    shared = stages * (_stage(tokens, rows, bits, chunk) + 16) + _fixed(tokens, rows, groups, split)
    return module.kernel("weight_mm", 16, structs=2, shared=shared, overlaps=True)
