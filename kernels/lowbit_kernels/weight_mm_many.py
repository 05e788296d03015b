"""Launches ``weight_mm_many.cu``: int4, int8 and float8 weights times many tokens, on GPUs of compute capability 9.0.

    out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero_point[n, k // G]) * scale[n, k // G]
                + bias[n] + residual[m, n]

Blocks of a cluster may share a tile's sum over K; they exchange their sums through shared memory and add them in the
order of K: results are the same each time. A launch's beginning overlaps with the end of the one before.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels import nvrtc
from lowbit_kernels.library import aligned
from lowbit_kernels.tensor_map import takes_rows, tensor_map
from lowbit_kernels.weight_mm_few import CODES, DTYPES, E4M3, SHARED_LIMIT

BOX = 16 * 48  # bytes of shared memory of a warp
MAX_STAGES = 12
BAND = 8  # tiles of tokens that are worked through together


class Plan(NamedTuple):
    """How a product is divided; the macros of ``weight_mm_many.cu`` and the number of clusters."""

    tokens: int  # of a tile
    rows: int  # of the weight, of a block's tile; of 224 `PAIRED` tells
    groups: int  # warpgroups that multiply
    beside: int  # blocks of a cluster, on rows beside each other, that share copies of tokens
    split: int  # blocks of a cluster that share a tile's K
    rounded: bool  # scales are multiplied into the weights
    chunk: int  # of K, that is copied at a time
    stages: int
    clusters: int

    @property
    def cluster(self) -> int:
        return self.beside * self.split

    @property
    def divides(self) -> bool:
        """Whether blocks of a cluster share a tile in the last round, if at most half of the clusters have one."""
        tile = Tile(*self[:3])
        return self.beside == 2 and self.split * tile.lanes == 1 and not tile.overlaps


class Tile(NamedTuple):
    tokens: int
    rows: int
    groups: int

    @property
    def lanes(self) -> int:
        """Warpgroups that take turns at chunks of the same rows."""
        return max(self.groups * 64 // self.rows, 1)

    @property
    def overlaps(self) -> bool:
        """Whether two blocks hold the same 64 rows, at whose chunks they take turns."""
        return self.rows % 64 > 0

    @property
    def turns(self) -> int:
        return 2 if self.overlaps else self.lanes


SMALL = tuple(Tile(tokens, rows, 4) for tokens in (16, 32, 64) for rows in (64, 128, 256))
# Two blocks beside each other have 448 rows, and hold the middle 64 both: see `weight_mm_many.cu`.
PAIRED = tuple(Tile(tokens, 224, 4) for tokens in (16, 32))
BROAD = Tile(128, 128, 2)
MIDDLE = (*(Tile(tokens, 128, 2) for tokens in (16, 32, 64)), BROAD, Tile(64, 256, 2))
LARGE = (Tile(128, 256, 2), Tile(256, 128, 2))  # one set of sums


@functools.lru_cache(maxsize=4096)
def plan(
    m: int,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    multiprocessors: int,
    may_round: bool = False,
) -> Plan:
    """The division that takes fewest clocks by the estimate of `_clocks`.

    `group_size` 0 stands for one scale a row. `may_round`: scales may be multiplied into the weights, which are rounded
    to 8 bits as they are where weights are dequantized before a product: it is done for groups of multiples of 128 and
    at least 256 tokens, whose two sets of sums registers don't hold. Fewer would gain 3 to 5%, and lose exactness.
    """
    # Of those that are estimated alike, for memory is slower, the first are a little faster.
    tiles = []
    if group_size == 0 and m > 64:
        tiles = [(tile, False) for tile in (BROAD, *LARGE)]
    elif may_round and group_size % 128 == 0 and m >= 256:
        tiles = [(LARGE[1], True)]
    fitting = [t for t in (*PAIRED, *SMALL, *MIDDLE) if t.tokens < 2 * max(m, 16)]
    tiles += [(tile, False) for tile in fitting if not _spills(tile, group_size)]
    candidates = [
        Plan(*tile, beside, split, rounds, chunk, depth, clusters)
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
    """Whether a thread's registers don't hold the sums of groups, scales and all else."""
    if tile[:2] != (64, 256) or group_size == 0:
        return False
    return tile.groups == 4 or group_size % 128 > 0


def _clusters(m: int, n: int, tile: Tile, beside: int, split: int, multiprocessors: int) -> int:
    """As many as the GPU holds at a time, or as there are tiles. A larger cluster has to lie in one part of the GPU: an
    H200 of 132 multiprocessors holds 30 of 4 blocks and 15 of 8."""
    size = beside * split
    most = (multiprocessors if size <= 2 else multiprocessors * 10 // 11) // size
    return min(max(most, 1), -(-n // (tile.rows * beside)) * -(-m // tile.tokens))


def _clocks(plan: Plan, m: int, n: int, k: int, bits: int) -> float:
    """What a cluster needs from beginning to end, as an H200 was measured to: for each of its chunks the slowest of
    unpacking and products (with two warpgroups, latency), L2 cache (44 bytes a clock), memory (2,110 for all); and
    for the exchange of sums and the results."""
    chunks = -(-k // (plan.chunk * plan.split))
    columns = -(-m // plan.tokens)
    tiles = -(-n // (plan.rows * plan.beside)) * columns
    codes, tokens = plan.rows * plan.chunk * bits // 8, plan.tokens * plan.chunk * 2
    alone = plan.rows <= 64 * plan.groups  # a warpgroup's 64 rows, which hide less latency
    unpacking = 165 + 3.4 * plan.tokens
    if plan.groups == 2 and alone:
        unpacking = max(300, 200 + 3.15 * plan.tokens)
    if bits == 8 or plan.rounded:  # sums of groups are not scaled, as a rule
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
        rounds *= 1.03  # blocks that read the same tokens drift apart
    return rounds * (chunks * chunk + end)


def chunk_of(tile: Tile, bits: int, group_size: int, k: int) -> int:
    """For few tokens rows of 128 bytes: the TMA takes nearly as long for rows of 64. For many, smaller stages, of which
    more fit. Of a chunk's two groups the scales are read together, so there are evenly many in a row."""
    if tile.tokens == 256 and bits == 8:
        return 64
    paired = group_size % 128 == 0 and (group_size != 128 or -(-k // 128) % 2 == 0)
    few = tile.tokens <= 32 or tile == (64, 128, 2)
    return 256 if few and bits == 4 and paired else 128


def stages(tokens: int, rows: int, groups: int, split: int, bits: int, chunk: int) -> int:
    """Chunks that fit into shared memory, evenly many for each turn."""
    fixed = _fixed(tokens, rows, groups, split) + 16 * MAX_STAGES
    most = min((SHARED_LIMIT - fixed) // _stage(tokens, rows, bits, chunk), MAX_STAGES)
    return most - most % Tile(tokens, rows, groups).turns


def _stage(tokens: int, rows: int, bits: int, chunk: int) -> int:
    held = -(-rows // 64) * 64  # of 224 256, which overlap
    return held * chunk * bits // 8 + tokens * chunk * 2


def _fixed(tokens: int, rows: int, groups: int, split: int) -> int:
    """Bytes of shared memory beside the stages and their barriers."""
    tile = Tile(tokens, rows, groups)
    if split * tile.lanes > 1:
        return tokens * rows * 4 * tile.lanes + BOX + 16
    return (tokens * 128 if tile.overlaps else 1024) + 4 * groups * BOX + 16


def is_available(x: Tensor, codes: Tensor, scale: Tensor, *, bits: int, group_size: int) -> bool:
    """Whether `many_tokens_mm` takes these: on a GPU of compute capability 9.0, dtypes as it says, and codes that the
    TMA reads, whose rows begin at multiples of 16 bytes."""
    supported = {"bits": bits, "group_size": group_size}
    return nvrtc.runs_on_hopper(x.device) and _is_supported(x, codes, scale, **supported)


def _is_supported(x: Tensor, codes: Tensor, scale: Tensor, *, bits: int, group_size: int) -> bool:
    width = codes.shape[1] * 8 // bits
    pitch = codes.stride(0) if codes.shape[0] > 1 else codes.shape[1]
    return (
        bits in (4, 8)
        and (x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and codes.dtype != E4M3))
        and ((scale.shape[1] == 1 and x.shape[1] == width) or codes.dtype != E4M3)
        and scale.dtype in DTYPES
        and x.stride(1) == 1
        and codes.stride(1) == 1
        and codes.dtype in ((torch.uint8,) if bits == 4 else (torch.int8, E4M3))
        and takes_rows(pitch, codes.shape[1])
        and codes.data_ptr() % 16 == 0
        and width % 32 == 0
        and group_size % 32 == 0
        and scale.numel() < 2**32
        and min(*x.shape, *codes.shape) > 0
    )


def many_tokens_mm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    token_scale: Tensor | None,
    *,
    bits: int,
    group_size: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The product of the module's docstring, of operands for which `is_available` holds.

    Args:
        x: bfloat16 or float16 [M, K], M, K > 0, of any distance between rows.
        codes: 4 bits: uint8 [N, Kp / 2], even k in the low nibble, nibble = code + 8; 8 bits: int8 [N, Kp],
            or float8_e4m3fn [N, K] with one scale a row, for which x is float16.
        scale: float32, bfloat16 or float16 [N, Kp / group_size].
        zero_point: int8, as `scale`, on the codes' grid; or None for 0, as for float8.
        bias: [N], residual: [M, N], of `dtype`, or None.
        token_scale: float32 [M] or None.
        group_size: a multiple of 32; Kp for one scale a row.
        dtype: of the result, bfloat16 or float16; None: x's.

    Returns:
        [M, N] of `dtype`. Where x and scale are bfloat16 and there are 256 tokens or more, weights may be rounded to
        bfloat16, as they are if they are dequantized first; else only the result is rounded.
    """
    may_round = x.dtype == scale.dtype == torch.bfloat16
    group = 0 if scale.shape[1] == 1 else group_size
    processors = nvrtc.multiprocessors(x.device)
    chosen = plan(x.shape[0], codes.shape[0], x.shape[1], bits, group, processors, may_round)
    operands = (x, codes, scale, zero_point, bias, residual, token_scale)
    return _planned(chosen, *operands, bits=bits, group=group, dtype=dtype)


def _planned(
    plan: Plan,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    token_scale: Tensor | None,
    *,
    bits: int,
    group: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The product, divided as `plan` says; `group` 0: one scale a row."""
    (m, k), n = x.shape, codes.shape[0]
    x, scale = _readable(x), aligned(scale)  # two scales are read at a time
    optional = (zero_point, bias, residual, token_scale)
    others = [None if t is None else t.contiguous() for t in optional]
    address = [0 if t is None else t.data_ptr() for t in others]
    out = x.new_empty((m, n), dtype=dtype or x.dtype)
    wide = n % 8 == 0 and address[2] % 16 == 0
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream().cuda_stream
        dtypes = (x.dtype, out.dtype, scale.dtype, codes.dtype)
        macros = (*dtypes, zero_point is not None, group, plan[:8])
        product = _kernel(*macros, torch.cuda.current_device())
        pitch = codes.stride(0) if n > 1 else codes.shape[1]
        share, height = plan.tokens // plan.beside, 64 if plan.rows % 64 else min(plan.rows, 128)
        maps = (
            tensor_map(
                codes.data_ptr(), 1, n, codes.shape[1], pitch, height, plan.chunk * bits // 8
            ),
            tensor_map(x.data_ptr(), 2, m, k, x.stride(0) if m > 1 else -(-k // 8) * 8, share, 64),
        )
        product(
            stream,
            plan.clusters * plan.cluster,
            128 * (plan.groups + 1),
            *(one.getPtr() for one in maps),
            *(scale.data_ptr(), *address, out.data_ptr()),
            *(m, n, -(-k // plan.chunk), scale.shape[1]),
            *(-(-n // (plan.rows * plan.beside)), -(-m // plan.tokens), BAND, int(wide)),
        )
    return out


def _readable(x: Tensor) -> Tensor:
    """x, or a copy whose rows begin at multiples of 16 bytes and don't overlap, as the TMA reads them."""
    apart = x.shape[0] == 1 or takes_rows(2 * x.stride(0), 2 * x.shape[1])
    if x.data_ptr() % 16 == 0 and apart:
        return x
    copy = x.new_empty((x.shape[0], -(-x.shape[1] // 8) * 8))[:, : x.shape[1]]
    return copy.copy_(x)


def source(
    dtype: torch.dtype,
    out: torch.dtype,
    scale: torch.dtype,
    codes: torch.dtype,
    zero: bool,
    group: int,
    shape: tuple[int, int, int, int, int, bool, int, int],
) -> str:
    """The CUDA C++ to compile; `shape` is a Plan without its clusters."""
    folder = Path(__file__).parent
    ptx, hopper, mm = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("ptx.cuh", "sm90.cuh", "weight_mm_many.cu")
    )
    tokens, rows, groups, beside, split, rounded, chunk, stages = shape
    macros = {
        "DTYPE": DTYPES[dtype],
        "OUT": DTYPES[out],
        "CODES": CODES[codes],
        "GROUP": group,
        "SCALE": DTYPES[scale],
        "ZERO": int(zero),
        "ROUNDED": int(rounded),
        "TOKENS": tokens,
        "ROWS": rows,
        "GROUPS": groups,
        "BESIDE": beside,
        "SPLIT": split,
        "CHUNK": chunk,
        "STAGES": stages,
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    return "\n".join([defines, ptx, hopper, _multiply(tokens, dtype), mm])


def _multiply(tokens: int, dtype: torch.dtype) -> str:
    """The instruction that adds the product of 64 x 16 of `dtype` in registers and tokens x 16 in shared memory to a
    warpgroup's sums: too many operands to write by hand."""
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
