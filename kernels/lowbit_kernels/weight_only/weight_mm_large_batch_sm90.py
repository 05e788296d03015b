"""The large-batch kernel: launches ``weight_mm_large_batch_sm90.cu``, a GEMM on the wgmma instructions of compute
capability 9.0, for weights of 1 to 8 bits: integers, float8 and tables (`weight_lookup_sm90`).

    out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero_point[n, k // G]) * scale[n, k // G]
                + bias[n] + residual[m, n]

Blocks of a cluster may share the K of a tile (split-K). They exchange their sums through shared memory and add them in
the order of K, so results are the same in every run. A launch overlaps with the end of the previous one.

Only the result is rounded, with these exceptions. For more than 128 tokens and bfloat16 x and scales, weights may be
rounded to bfloat16, as a weight is that is dequantized before the product; an infinite scale then gives NaN. Numbers of
at most two significant bits, such as integers up to 4, lose little by it. They and weights with zero points that are
values are rounded for any number of tokens. A table's values are rounded to the dtype of x, after a factor that brings
them close to such numbers. MXFP8's are exact, unless scales of a row span more than 124 octaves.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Argument, Launch, Map
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.runtime.tensor_map import takes_rows
from lowbit_kernels.runtime.wgmma import multiply_from_registers
from lowbit_kernels.weight_only.one_launch import CODES, OUT, SCALE, OneLaunch, X, even
from lowbit_kernels.weight_only.weight_lookup_sm90 import STEP, Unpacking, unpacking_of
from lowbit_kernels.weight_only.weight_operands import (
    HALVES,
    TensorLayout,
    WeightOperands,
)

BOX = 16 * 48  # bytes of shared memory for results, if blocks or warp groups share sums
LINES = 2 * 16 * 144  # the same of a warp group otherwise
MAX_STAGES = 12
BAND = 8  # tiles of tokens that the grid works through together
LAST_ROUNDS = 4  # of tiles of equal size, at most, that smaller ones replace
MIXED_WITHIN, MIXED_GAIN = 1.2, 0.99
"""Tiles of two sizes are tried where the estimate for tiles of one size is below MIXED_WITHIN times the best one. They
are taken where their estimate is below MIXED_GAIN times it, since a kernel of two sizes takes longer to compile."""


class LargeBatchDivision(NamedTuple):
    """How a product is divided: the macros of ``weight_mm_large_batch_sm90.cu``, and the number of clusters."""

    tokens: int  # of a tile
    rows: int  # of the weight in a block's tile; see `PAIRED` for 224
    groups: int  # warp groups that multiply
    beside: int  # blocks of a cluster on adjacent rows, which share copies of tokens
    split: int  # blocks of a cluster that share a tile's K (split-K)
    rounded: bool  # scales are multiplied into the weights
    chunk: int  # of K, whose scales are read together: `joined` pipeline stages
    stages: int
    clusters: int
    last_tokens: int = 0  # of a tile in the last rows; 0: as of the others
    full_rows: int = 0  # rows of tiles before the last ones
    joined: int = 1  # pipeline stages of a chunk: 1, 2 or 4

    @property
    def stage(self) -> int:
        """K of a pipeline stage."""
        return self.chunk // self.joined

    @property
    def cluster(self) -> int:
        return self.beside * self.split

    @property
    def divides(self) -> bool:
        """See `Tile.divides`."""
        return not self.last_tokens and Tile(*self[:3]).divides(self.beside, self.split)


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

    def clusters(self, m: int, n: int, beside: int) -> int:
        """Tiles of clusters with so many blocks beside each other."""
        return -(-n // (self.rows * beside)) * -(-m // self.tokens)

    def divides(self, beside: int, split: int) -> bool:
        """True if two blocks of a cluster share a tile of the last round, if at most half of the clusters have one."""
        return beside == 2 and split * self.lanes == 1 and not self.overlaps

    def is_once(self, split: int) -> bool:
        """True if sums that blocks share take the ring's place, so that a block has one tile."""
        return split > 1 and self.lanes == 1 and self.tokens > 64


SMALL = tuple(Tile(tokens, rows, 4) for tokens in (16, 32, 64) for rows in (64, 128, 256))
# Two adjacent blocks share 448 rows, and both hold the middle 64: see `weight_mm_large_batch_sm90.cu`.
PAIRED = tuple(Tile(tokens, 224, 4) for tokens in (16, 32))
# A number of tokens that leaves a tile half empty costs as much as a full one, so there are many.
TOKENS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
WIDE = tuple(
    Tile(tokens, rows, groups)
    for tokens in TOKENS
    for rows, groups, least, most in (
        *((64, 2, 64, 128), (128, 2, 16, 256)),
        *((192, 3, 80, 192), (256, 2, 64, 128)),
    )
    if least <= tokens <= most
)


UNPACKING = {
    "INT4": (236, 0),
    "INT8": (242, 0),
    "STREAM": (320, 2),
    "E4M3": (338, 5),
    "LOOKUP": (332, 10),
}
"""Clocks of 64 rows and 128 of K: what unpacking adds to products of up to 128 tokens, and to wider ones."""
SCALING = {
    ("E4M3", "E8M0"): (54, 90),
    ("LOOKUP", "E4M3"): (33, 20),
    ("LOOKUP", "FP32"): (39, 40),
    ("LOOKUP", "FP16"): (39, 40),
}
"""The same of scales multiplied into codes, by the dtype of scales."""
ZEROS = {"LOOKUP": 50, "INT8": 120}
"""Clocks of zero points beside scales multiplied into codes, in tiles of up to 128 tokens."""


DRIFT = 1.02  # blocks that read the same tokens drift apart in time


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, unpacking: Unpacking, multiprocessors: int) -> LargeBatchDivision:
    """The division with the fewest estimated clocks (`_clocks`).

    Args:
        m, n, k: tokens, outputs and inputs.
        unpacking: how codes become numbers.
        multiprocessors: of the GPU.
    """
    # Plans bound by memory have the same estimated cost. min() takes the first, which was slightly faster in practice.
    candidates = divisions(m, n, k, unpacking, multiprocessors)
    clocks = {c: _clocks(c, m, n, k, unpacking) for c in candidates}
    best = min(candidates, key=clocks.__getitem__)
    found = MIXED_GAIN * clocks[best], best
    for of in candidates:
        if of.tokens > 64 and clocks[of] < MIXED_WITHIN * clocks[best]:
            found = _mixed(found, of, m, n, k, unpacking)
    return found[1]


def divisions(
    m: int, n: int, k: int, unpacking: Unpacking, multiprocessors: int
) -> list[LargeBatchDivision]:
    """All divisions of a product that the kernel takes.

    Args: those of `plan`.
    """
    return [
        LargeBatchDivision(*tile, beside, split, rounds, chunk, depth, clusters, joined=joined)
        for tile, rounds in _tiles(m, unpacking)
        for chunk, joined in _chunks(tile, unpacking, k, rounds)
        for beside in (1, 2)
        for split in (1, 2, 4, 8)
        if beside * split <= 8 and split <= -(-k // chunk) and tile.rows // 16 % split == 0
        if beside == 1 or (tile.lanes == 1 and (joined == 1 or tile.tokens > 128))
        if split == 1 or joined == 1 or unpacking.codes != "INT8" or tile.tokens > 128
        if not tile.overlaps or ((beside, split) == (2, 1) and unpacking.bits < 8)
        for depth in [stages(*tile, split, unpacking, chunk // joined) // joined * joined]
        if depth >= max(3, 2 * tile.turns, joined)
        for clusters in [_clusters(m, n, tile, beside, split, multiprocessors)]
        if not tile.is_once(split) or clusters == tile.clusters(m, n, beside)
        if _ring_holds_sums(tile, beside, split, depth * _stage(tile, unpacking, chunk // joined))
    ]


def _tiles(m: int, unpacking: Unpacking) -> list[tuple[Tile, bool]]:
    """Tiles for M tokens, and whether scales are multiplied into the weights."""
    rounds, group = unpacking.rounds(m), unpacking.group
    must_round = rounds and unpacking.rounding != "large"
    ways = [True] if must_round else [True, False] if rounds else [False]
    return [
        (tile, rounded)
        for tile in (*PAIRED, *SMALL, *WIDE)
        if tile.tokens < 2 * max(m, 16)
        for rounded in ways
        if _holds(tile, unpacking, group > 0 and not rounded)
        if _has_enough_stages(tile, unpacking)
        if not rounded or unpacking.scales_pairs or _rounds_integers(tile, unpacking)
    ]


def _rounds_integers(tile: Tile, unpacking: Unpacking) -> bool:
    """True if this tile may round integers. Small tiles gain little by it, and lose exactness, unless it is "free"."""
    if unpacking.rounding == "free":
        return True
    return tile.tokens > 64 and (unpacking.group % 128 == 0 or unpacking.codes == "INT4")


def _has_enough_stages(tile: Tile, unpacking: Unpacking) -> bool:
    """False where 64 rows by two warp groups were slower than other tiles, with two stages a warp group."""
    if tile.rows > 64 or tile.groups > 2 or tile.tokens <= 64:
        return True
    fits = unpacking.codes == "LOOKUP" and tile.tokens <= 112
    return fits or unpacking.codes in ("INT4", "STREAM")


def _holds(tile: Tile, unpacking: Unpacking, twice: bool) -> bool:
    """True if a thread's registers hold its sums, `twice` where those of a group are scaled on their own."""
    sums = tile.tokens // 2 * (2 if tile.rows > 64 * tile.groups else 1)
    if not twice:
        is_integer = unpacking.codes in ("INT4", "INT8")
        return sums <= {2: 128, 3: 96 if is_integer else 80, 4: 64}[tile.groups]
    if tile.tokens != 64:
        return tile.groups != 3 and sums <= (64 if tile.groups == 2 and tile.rows < 256 else 32)
    if tile.rows < 256:
        return tile.groups == 2 or unpacking.codes not in ("LOOKUP", "STREAM")
    return tile.groups == 2 and unpacking.group % 128 == 0


def _ring_holds_sums(tile: Tile, beside: int, split: int, ring: int) -> bool:
    """True unless blocks exchange sums in the place of a ring of so many bytes that is too small."""
    divides = tile.divides(beside, split)
    if not (tile.is_once(split) or divides):
        return True
    parts = 2 if divides else split
    share = -(-tile.tokens // 16 // parts) * 16  # tokens that a block finishes
    return (parts - 1) * share * tile.rows * 4 <= ring


def _clusters(m: int, n: int, tile: Tile, beside: int, split: int, multiprocessors: int) -> int:
    """As many clusters as the GPU runs at a time, or as there are tiles. A cluster of more than 2 blocks lies in one
    part of the GPU: an H200 with 132 multiprocessors runs 30 of 4 blocks or 15 of 8."""
    size = beside * split
    most = max((multiprocessors if size <= 2 else multiprocessors * 10 // 11) // size, 1)
    return min(most, tile.clusters(m, n, beside))


def _clocks(plan: LargeBatchDivision, m: int, n: int, k: int, unpacking: Unpacking) -> float:
    """The estimated clocks of a product: rounds of tiles, each with its chunks of K and an end.

    Fitted to 373 plans of 28 shapes for int4 and int8 on an H200. Where plans of a shape are compared, it is within 4%
    (root of mean square). On 33 other shapes where int4 or int8 took more than 1.05 of bf16's time (483 plans), the
    plan that it chose took 1.005 times as long as the fastest on average, 1.05 times at most. `UNPACKING`
    and `SCALING` were fitted to 512 tokens of 4096 x 4096.

    Each chunk takes the slowest of: unpacking and products; the L2 cache, at 52 bytes a clock, for which rows of codes
    count as 128 bytes or more; memory, at 2,420 bytes a clock for all clusters. The end of a tile, and the exchange of
    sums where blocks share them, come on top.
    """
    tile, tokens = Tile(*plan[:3]), plan.tokens
    chunks, columns = -(-k // (plan.chunk * plan.split)), -(-m // tokens)
    chunk = _chunk_clocks(plan, tokens, m, unpacking)
    whole, left = divmod(tile.clusters(m, n, plan.beside), plan.clusters)
    divided = plan.divides and 0 < left * 2 <= plan.clusters
    whole += left > 0 and not divided
    end = _end_clocks(plan, tokens)
    exchange, parts = 0.34 * tokens * plan.rows, plan.split * tile.lanes
    clocks = whole * (chunks * chunk + end + exchange * (parts - 1) / parts)
    if divided:
        clocks += 0.46 * chunks * chunk + end + exchange / 2
    if whole + divided > 1 and columns > 1 and plan.beside == 1:
        clocks *= DRIFT
    return 1560 + clocks


def _mixed(
    best: tuple[float, LargeBatchDivision],
    of: LargeBatchDivision,
    m: int,
    n: int,
    k: int,
    unpacking: Unpacking,
) -> tuple[float, LargeBatchDivision]:
    """The clocks and the division of the best product with the tiles of `of` and smaller ones in the last rows, so that
    blocks share the last rounds evenly. `best` where none takes fewer clocks, or where blocks or warp groups share
    sums. The clocks are those of the block that takes the longest.
    """
    tile, height, columns = Tile(*of[:3]), -(-n // (of.rows * of.beside)), -(-m // of.tokens)
    if of.split > 1 or tile.lanes > 1 or tile.overlaps or columns * height <= of.clusters:
        return best
    chunks = -(-k // of.chunk)
    full = full_rows(height, columns, of.clusters)
    sizes = [of.tokens, *(t for t in TOKENS if 64 <= t < min(of.tokens, m))]
    first, *others = (
        chunks * _chunk_clocks(of, t, m, unpacking) + _end_clocks(of, t) for t in sizes
    )
    slower = (DRIFT if of.beside == 1 else 1.0) * _mixing(of)
    for tokens, last in zip(sizes[1:], others, strict=True):
        for rows in full:
            count = rows * columns
            tiles = count + (height - rows) * -(-m // tokens)
            longest = (count * first + (tiles - count) * last) / of.clusters  # at least
            if 1560 + longest * slower >= best[0]:
                continue
            longest = max(longest, longest_of(count, tiles, of.clusters, first, last))
            if 1560 + longest * slower < best[0]:
                best = 1560 + longest * slower, of._replace(last_tokens=tokens, full_rows=rows)
    return best


def full_rows(height: int, columns: int, clusters: int) -> list[int]:
    """How many rows of tiles may keep their size where the others get smaller ones: those of whole rounds of clusters,
    less up to `LAST_ROUNDS`."""
    rounds = columns * height // clusters
    found = {
        rows
        for i in range(max(rounds - LAST_ROUNDS + 1, 1), rounds + 1)
        for rows in (i * clusters // columns, -(-i * clusters // columns))
        if 0 < rows < height
    }
    return sorted(found)


def longest_of(count: int, tiles: int, clusters: int, first: float, last: float) -> float:
    """The clocks of the cluster that takes the longest: `count` tiles take `first` clocks each, the others `last`."""
    longest = 0.0
    for cluster in {i % clusters for i in (0, count - 1, count, tiles - 1)}:
        own = -(-max(count - cluster, 0) // clusters)
        more = -(-max(tiles - cluster, 0) // clusters) - own
        longest = max(longest, own * first + more * last)
    return longest


def _mixing(plan: LargeBatchDivision) -> float:
    """The factor by which tiles of two sizes took longer than the estimate, in 240 plans on an H200."""
    if plan.groups == 3:
        return 1.05
    return 1.04 if plan.stage == STEP and plan.rounded and plan.joined < 4 else 1.01


def _chunk_clocks(plan: LargeBatchDivision, tokens: int, m: int, unpacking: Unpacking) -> float:
    pitch, columns = _pitch(plan.stage, unpacking.bits), -(-m // tokens)
    slower = 1.05 if plan.beside > 1 else 1.0  # blocks that share copies wait for each other
    return max(
        plan.rows / 64 * _products(plan, tokens, unpacking) * slower,
        (plan.rows * max(pitch * plan.joined, 128) + tokens * plan.chunk * 2 / plan.beside) / 52,
        plan.rows * pitch * plan.joined * plan.clusters * plan.cluster / 2420 / min(columns, BAND),
    )


def _end_clocks(plan: LargeBatchDivision, tokens: int) -> float:
    return 2010 + 12 * tokens * (2 if plan.rows > 64 * plan.groups else 1)


def _products(plan: LargeBatchDivision, tokens: int, unpacking: Unpacking) -> float:
    """Clocks of a warp group for 64 rows of a chunk and so many tokens. Up to 128 tokens shared memory and the latency
    of unpacking bound them, beyond that the tensor cores, which long unpacking slows down."""
    once, part = plan.rounded or unpacking.group == 0, plan.chunk / 128
    codes = unpacking.codes
    alone, slowed = UNPACKING[codes]
    if codes == "INT4" and not once:
        alone = 195
    if plan.rounded:
        more, beside = SCALING.get((codes, unpacking.scale), (0, 0))
        alone, slowed = alone + more, slowed + beside
    if unpacking.zero >= 2 or (unpacking.zero and plan.rounded and not unpacking.table):
        alone, slowed = alone + ZEROS.get(codes, 90), slowed + 40
    if plan.tokens > 128 and plan.joined > 1 and codes != "E4M3":
        slowed = slowed // 2
    each = {"INT4": 2.03, "INT8": 2.05}.get(codes, 2.14) if once else 3.19
    base = alone * (0.96 if plan.groups == 4 else 1.0)  # more warps hide more of the latency
    each = 3.0 if plan.groups == 4 else each
    fixed = 76 if tokens <= 128 and plan.joined > 1 and codes != "INT4" else 38
    return max((base + each * tokens) * part + fixed, (4.04 * tokens + slowed) * part)


def chunk_of(tile: Tile, unpacking: Unpacking, k: int) -> int:
    """K of a pipeline stage. Narrow tiles load rows of 128 bytes of codes, since the TMA takes nearly as long for rows
    of 64. Wide tiles have smaller stages, so that more of them fit. The scales of a chunk's two groups are read
    together, so a row must have an even number of them. Scales that are multiplied are read for a whole chunk."""
    bits = unpacking.bits
    most = 128 if unpacking.table and bits == 4 else 240  # beside the table there is little memory
    if tile.tokens > most and bits > (2 if unpacking.table else 4):
        return STEP
    if unpacking.table:
        # With few stages, beside sums and the table.
        fills = tile.tokens >= 64 and tile.lanes > 1 and bits == 4
        return STEP if fills or (unpacking.rounding != "never" and k % (2 * STEP)) else 2 * STEP
    if unpacking.scales_pairs and unpacking.group and unpacking.rounding != "never":
        return STEP if k % (2 * STEP) else 2 * STEP
    narrow = tile.tokens <= 32 or tile == (64, 128, 2)
    return 256 if narrow and bits == 4 and _pairs_groups(unpacking, k) else 128


def _chunks(tile: Tile, unpacking: Unpacking, k: int, rounded: bool) -> tuple[tuple[int, int], ...]:
    """Each K that a chunk may have, with its pipeline stages. Longer chunks than `chunk_of` take fewer instructions."""
    own, most, codes = chunk_of(tile, unpacking, k), _joined(unpacking, k), unpacking.codes
    if tile.tokens == 256:  # fewer stages divide K in finer parts
        return tuple((STEP * n, n) for n in (4, 2) if n <= most) or ((own, 1),)
    if tile.tokens > 128:
        shorter = (2 * STEP, 2) if most > 1 and own == STEP else (own, 1)
        return ((4 * STEP, 4), shorter) if most == 4 and unpacking.bits == 4 else (shorter,)
    pairs = own == 2 * STEP and rounded and _pairs_groups(unpacking, k)
    if codes == "INT4" and pairs:
        return (own, 1), (2 * own, 2 if tile == (128, 128, 2) else 1)
    longer = False
    if own == 2 * STEP and tile.rows == 64 * tile.groups and tile.tokens >= 80:
        if codes == "LOOKUP" and rounded and tile.groups == 3 and most == 4:
            return (4 * STEP, 4), (own, 1)
        if codes == "STREAM" and unpacking.bits < 4:
            longer = most == 4 if unpacking.scales_pairs else pairs
        elif codes == "INT8":
            longer = not unpacking.group and k % (4 * STEP) == 0
    return ((2 * own, 2), (own, 1)) if longer else ((own, 1),)


def _joined(unpacking: Unpacking, k: int) -> int:
    """Stages of 64 K in a chunk of a tile of 256 tokens, at most.

    Four; two where registers do not hold the scales of four, where a chunk of four would end within a group, or where
    four were slower; one where a chunk has no scales of its own, or K is an odd multiple of 64.
    """
    group = unpacking.group
    if not group:
        return 1
    if unpacking.scales_pairs:
        sizes = {"FP32": 4, "E4M3": 1, "E8M0": 1}
        own = sizes.get(unpacking.scale, 2) + (0, 1, 4, 2)[unpacking.zero]
        is_whole = group % (4 * STEP) == 0 or 4 * STEP % group == 0
        fits = is_whole and 4 * STEP // group * own <= 32  # bytes of a row
    else:
        fits = group % 128 == 0
    if fits and k % (4 * STEP) == 0 and "E4M3" not in (unpacking.codes, unpacking.scale):
        return 4
    return 2 if k % (2 * STEP) == 0 or not unpacking.scales_pairs else 1


def _pairs_groups(unpacking: Unpacking, k: int) -> bool:
    """True if the scales of 256 K are those of two groups at an even index, or of one."""
    group = unpacking.group
    return group % 128 == 0 and (group != 128 or -(-k // 128) % 2 == 0)


def stages(
    tokens: int, rows: int, groups: int, split: int, unpacking: Unpacking, chunk: int
) -> int:
    """The pipeline stages that fit into shared memory, a multiple of the tile's turns.

    Args:
        tokens, rows, groups: of a `Tile`.
        split: blocks of a cluster that share K.
        unpacking: how codes become numbers.
        chunk: inputs of a stage.
    """
    fixed = _fixed(tokens, rows, groups, split, unpacking) + 16 * MAX_STAGES
    tile = Tile(tokens, rows, groups)
    most = min((nvrtc.SHARED_LIMIT - fixed) // _stage(tile, unpacking, chunk), MAX_STAGES)
    return most - most % tile.turns


def _stage(tile: Tile, unpacking: Unpacking, chunk: int) -> int:
    held = -(-tile.rows // 64) * 64  # 256 for 224 rows, which overlap
    return held * _pitch(chunk, unpacking.bits) + tile.tokens * chunk * 2


def _pitch(chunk: int, bits: int) -> int:
    """Bytes between rows of codes in a stage: PITCH of ``weight_mm_large_batch_tiles_sm90.cuh``."""
    row = chunk * bits // 8
    return (row + 15) // 32 * 32 + 16 if row % 16 else row


def _fixed(tokens: int, rows: int, groups: int, split: int, unpacking: Unpacking) -> int:
    """Bytes of shared memory besides the stages and their barriers."""
    tile, looked_up = Tile(tokens, rows, groups), unpacking.lookup_bytes
    if split * tile.lanes > 1 and not tile.is_once(split):
        return tokens * rows * 4 * tile.lanes + BOX + 32 + looked_up
    return (tokens * 128 if tile.overlaps else 1024) + groups * LINES + 32 + looked_up


def takes(operands: WeightOperands) -> bool:
    """True if the kernel multiplies these: a format that it unpacks, codes that the TMA can read, in rows that begin at
    multiples of 16 bytes, and groups of multiples of 32, or of 16 where scales are multiplied into the weights. float8
    takes K without padding, which may be NaN, and MXFP8 bfloat16 x."""
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


class LargeBatchProduct(OneLaunch):
    """The product of operands for which `takes` holds, divided as `plan` says."""

    def __init__(self, operands: WeightOperands, plan: LargeBatchDivision) -> None:
        x, codes, residual = operands.x, operands.codes, operands.residual
        (m, k), (n, row) = x.shape, codes.shape
        self.plan, self.shape, self.dtype = plan, (m, n), operands.out
        self.is_ready = operands.has_aligned_scales
        self.copies_x = not is_readable(x)
        x_pitch = even(k) if self.copies_x or m == 1 else x.strides[0]
        share, height = plan.tokens // plan.beside, _box_rows(plan.rows)
        pitch = codes.strides[0] if n > 1 else row
        self.codes_map = (1, n, row, pitch, height, _pitch(plan.stage, operands.bits))
        self.x_map = (2, m, k, x_pitch, share, 64)
        self.last_map = (2, m, k, x_pitch, plan.last_tokens // plan.beside, 64)
        wide = n % 8 == 0 and (residual is None or residual.misaligned == 0)
        self.grid, self.threads = plan.clusters * plan.cluster, 128 * (plan.groups + 1)
        last = (plan.full_rows, -(-m // plan.last_tokens)) if plan.last_tokens else ()
        self.sizes: tuple[int, ...] = (
            *(m, n, -(-k // plan.chunk), operands.groups),
            *(-(-n // (plan.rows * plan.beside)), -(-m // plan.tokens), BAND, int(wide)),
            *last,
        )
        own = unpacking_of(operands)
        assert own is not None
        self.macros = (x.dtype, operands.out, own, plan[:8], plan.last_tokens, plan.joined)

    def launch(self) -> Launch:
        maps = [Map(CODES, *self.codes_map), Map(X, *self.x_map)]
        if self.plan.last_tokens:
            maps.append(Map(X, *self.last_map))
        arguments: tuple[Argument, ...] = *maps, *map(Address, range(SCALE, OUT + 1))
        kernel = _kernel(*self.macros, torch.cuda.current_device())
        return Launch(kernel, self.grid, self.threads, (*arguments, *self.sizes))


def _box_rows(rows: int) -> int:
    """Rows of codes that the TMA copies at a time."""
    return 64 if rows % 64 else rows if rows % 128 else 128


def is_readable(x: TensorLayout) -> bool:
    """True if the TMA reads x [M, K] of 16-bit numbers: rows begin at multiples of 16 bytes and don't overlap."""
    apart = x.shape[0] == 1 or takes_rows(2 * x.strides[0], 2 * x.shape[1])
    return x.misaligned == 0 and apart


def source(
    dtype: torch.dtype,
    out: torch.dtype,
    unpacking: Unpacking,
    shape: tuple[int, int, int, int, int, bool, int, int],
    last_tokens: int = 0,
    joined: int = 1,
) -> str:
    """The CUDA C++ to compile; `shape` is the first fields of a `LargeBatchDivision`, without its clusters."""
    fields = ("TOKENS", "ROWS", "GROUPS", "BESIDE", "SPLIT", "ROUNDED", "CHUNK", "STAGES")
    macros = {"DTYPE": FLOAT_MACROS[dtype], "OUT": FLOAT_MACROS[out], **unpacking.macros()}
    macros |= dict(zip(fields, shape, strict=True)) | {"LAST_TOKENS": last_tokens, "JOINED": joined}
    tiles = "weight_only/weight_mm_large_batch_tiles_sm90.cuh"
    headers = *SM90, "runtime/load_words.cuh", "weight_only/weight_lookup_sm90.cuh", tiles
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    sizes = [shape[0], last_tokens] if last_tokens else [shape[0]]
    multiply = "".join(multiply_from_registers(t, 16, f"f32.{kind}.{kind}") for t in sizes)
    names = "weight_mm_large_batch_products_sm90.cuh", "weight_mm_large_batch_sm90.cu"
    return program(macros, *headers, multiply, *(f"weight_only/{name}" for name in names))


@nvrtc.variants
def _kernel(
    dtype: torch.dtype,
    out: torch.dtype,
    unpacking: Unpacking,
    shape: tuple[int, int, int, int, int, bool, int, int],
    last_tokens: int,
    joined: int,
    device: int,
) -> nvrtc.Kernel:
    code = source(dtype, out, unpacking, shape, last_tokens, joined)
    tokens, rows, groups, _, split, _, chunk, stages = shape
    shared = stages * (_stage(Tile(tokens, rows, groups), unpacking, chunk // joined) + 16)
    shared += _fixed(tokens, rows, groups, split, unpacking)
    more = 1 if last_tokens else 0
    sizes = 17 + 3 * more
    return nvrtc.kernel(code, "weight_mm", sizes, structs=2 + more, shared=shared, overlaps=True)
