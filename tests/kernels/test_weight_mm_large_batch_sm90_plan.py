"""The large-batch kernel: how the work is divided among blocks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.weight_only import weight_mm_large_batch_sm90
from lowbit_kernels.weight_only.weight_lookup_sm90 import Unpacking
from lowbit_kernels.weight_only.weight_mm_large_batch_sm90 import (
    BAND,
    TOKENS,
    LargeBatchDivision,
    Tile,
    divisions,
    plan,
    stages,
)
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.sm90_emulator import schedule_of

INT4 = Unpacking("INT4", 4, 128, rounding="large")
NF4 = Unpacking("LOOKUP", 4, 64, scale="FP32", rounding="large", table=tuple(range(16)))


def work(plan: LargeBatchDivision, m: int, n: int, k: int) -> list[tuple[int, int, int, int]]:
    """Row, token, first chunk and end of every block's tiles, as the kernel's `Schedule` has them."""
    chunks, rows, columns = (
        -(-k // plan.chunk),
        -(-n // (plan.rows * plan.beside)),
        -(-m // plan.tokens),
    )
    tiles = rows * columns
    left = tiles % plan.clusters
    divided = left if plan.divides and left * 2 <= plan.clusters else 0
    found = []
    for tile in range(tiles + divided):
        more = tile - (tiles - left) if divided else -1
        own = tile if more < 0 else tiles - left + more // 2
        above = own // (BAND * rows) * BAND
        within, width = own - above * rows, min(BAND, columns - above)
        for rank in range(plan.cluster):
            beside, part, parts = rank % plan.beside, rank // plan.beside, plan.split
            if more >= 0:
                beside, part, parts = more % 2, rank, 2
            row = (within // width * plan.beside + beside) * plan.rows
            share = (chunks * part // parts, chunks * (part + 1) // parts)
            token = (above + within % width) * plan.tokens
            if not Tile(*plan[:3]).overlaps:
                found.append((row, token, *share))
                continue
            first = row - 32 * beside  # of the block's 256 rows
            shared = first + 192 * (
                1 - beside
            )  # 64 rows of both blocks, which take turns at their chunks
            alone = [r for r in range(first, first + 256, 64) if r != shared]
            found += [(r, token, *share) for r in alone]
            found += [(shared, token, c, c + 1) for c in range(beside, chunks, 2)]
    return found


SHAPES = (st.integers(1, 3000), st.integers(1, 40000), st.integers(1, 400))


@settings(max_examples=200)
@given(
    *SHAPES,
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([0, 16, 32, 64, 96, 128, 160, 256]),
    st.sampled_from([16, 78, 114, 132]),
    st.sampled_from(["never", "large", "free", "always"]),
)
def test_plan_fits_the_gpu_and_covers_all(
    m, n, k32, bits, looked_up, group, processors, rounding
) -> None:
    looked_up &= bits <= 4
    if bits > 3 and not looked_up and rounding in ("free", "always"):
        rounding = "large"
    if not looked_up and rounding == "always":
        rounding = "free"
    k = (128 if looked_up and rounding != "never" else 32) * k32
    table = tuple(range(2**bits)) if looked_up else ()
    codes = "LOOKUP" if looked_up else f"INT{bits}" if bits in (4, 8) else "STREAM"
    unpacking = Unpacking(codes, bits, group, rounding=rounding, table=table)
    chosen = plan(m, n, k, unpacking, processors)
    assert chosen.tokens in TOKENS and chosen.rows in (64, 128, 192, 224, 256)
    assert 1 <= chosen.clusters * chosen.cluster <= processors and chosen.cluster <= 8
    assert chosen.tokens % (8 * chosen.beside) == 0 and chosen.rows // 16 % chosen.split == 0
    assert chosen.rounded <= unpacking.rounds(m)
    is_free = rounding in ("free", "always")
    assert looked_up or chosen.rounded <= (group in (128, 256) or (bits == 4 and group) or is_free)
    assert chosen.rounded or not (group and is_free)
    if chosen.rounded and looked_up:
        assert k % chosen.chunk == 0
    summed_twice = group > 0 and not chosen.rounded
    registers = chosen.tokens // 2 * max(chosen.rows // 64 // chosen.groups, 1)
    assert registers * (2 if summed_twice else 1) <= {2: 128, 3: 96, 4: 64}[chosen.groups]
    most = stages(*chosen[:3], chosen.split, unpacking, chosen.stage)
    assert chosen.chunk == chosen.joined * chosen.stage
    assert max(2, chosen.joined) <= chosen.stages == most // chosen.joined * chosen.joined
    tile = Tile(*chosen[:3])
    turns = tile.turns
    assert chosen.stages % turns == 0 and chosen.stages > turns
    stage = weight_mm_large_batch_sm90._stage(tile, unpacking, chosen.stage)
    fixed = weight_mm_large_batch_sm90._fixed(*chosen[:3], chosen.split, unpacking)
    assert chosen.stages * (stage + 16) + fixed <= nvrtc.SHARED_LIMIT
    if tile.is_once(chosen.split):
        assert chosen.clusters == tile.clusters(m, n, chosen.beside)
    if tile.is_once(chosen.split) or chosen.divides:
        assert chosen.tokens * chosen.rows * 4 <= chosen.stages * stage
    if chosen.last_tokens:
        assert 64 <= chosen.last_tokens < chosen.tokens and chosen.last_tokens % 16 == 0
        assert 0 < chosen.full_rows < -(-n // (chosen.rows * chosen.beside))
        assert chosen.split == tile.lanes == 1
        return  # `test_blocks_compute_each_part_of_a_tile_once`
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, token, first, last in work(chosen, m, n, k):
        assert first < last or k <= chosen.chunk, "no block is idle"
        parts.setdefault((row, token), []).append((first, last))
    height = 64 if chosen.rows == 224 else chosen.rows
    covered = {(r, t) for r in range(0, n, height) for t in range(0, m, chosen.tokens)}
    assert covered <= set(parts)
    for shares in map(sorted, parts.values()):
        assert shares[0][0] == 0 and shares[-1][1] == -(-k // chosen.chunk)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))


def test_plan_of_the_shapes_that_matter() -> None:
    exact, rounded = (Unpacking("INT4", 4, 128, rounding=r) for r in ("never", "large"))
    assert plan(1024, 28672, 8192, rounded, 132).rounded
    assert not plan(1024, 28672, 8192, exact, 132).rounded
    assert plan(256, 14336, 4096, rounded, 132)[:3] == (256, 128, 2)
    for m in (16, 32):  # all blocks that the GPU holds but four
        small = plan(m, 4096, 4096, exact, 132)
        assert small[:5] == (m, 64, 4, 1, 2) and small.clusters == 64
        large = plan(m, 28672, 8192, exact, 132)
        assert large[:5] == (m, 224, 4, 2, 1) and large.clusters == 64


@pytest.mark.parametrize(
    ("m", "unpacking", "last_tokens", "full_rows"),
    [(1024, INT4, 208, 33), (1024, Unpacking("INT8", 8, 0), 208, 33), (768, NF4, 160, 88)],
    ids=["int4", "int8", "nf4"],
)
def test_shapes_that_divide_badly_take_tiles_of_two_sizes(
    m: int, unpacking: Unpacking, last_tokens: int, full_rows: int
) -> None:
    """1,024 tokens of 14336 x 4096 are 3.4 rounds of tiles of 256 x 128: one round of them, and three of 208 x 128."""
    chosen = plan(m, 14336, 4096, unpacking, 132)
    assert chosen[:3] == (256, 128, 2)
    assert (chosen.last_tokens, chosen.full_rows) == (last_tokens, full_rows)
    once = plan(1024, 4096, 4096, unpacking, 132)  # 128 tiles: no round is left
    assert not once.last_tokens


@pytest.mark.parametrize(
    ("unpacking", "k", "joined"),
    [
        (NF4, 4096, 4),
        (NF4, 33 * 128, 2),
        (NF4, 65 * 64, 1),  # scales of two stages would not be aligned
        (INT4, 65 * 64, 2),
        (INT4._replace(group=32), 4096, 2),
        (INT4._replace(group=384), 6144, 4),
        (NF4._replace(group=384), 6144, 2),  # a chunk of 256 would end within a group
        (Unpacking("E4M3", 8, 32, scale="E8M0", rounding="always"), 4096, 2),
        (Unpacking("INT8", 8, 0), 4096, 1),
    ],
    ids=str,
)
def test_stages_whose_scales_are_read_together(unpacking: Unpacking, k: int, joined: int) -> None:
    """By the number of groups that registers hold, and by K, since the scales of a chunk are one load."""
    found = [p for p in divisions(1024, 14336, k, unpacking, 132) if p.tokens == 256]
    assert {p.joined for p in found} == {4: {2, 4}, 2: {2}, 1: {1}}[joined]
    assert all(p.stages % p.joined == 0 and p.chunk == 64 * p.joined for p in found)
    assert plan(1024, 4096, k, unpacking, 132)[0::11] == (256, joined)


SCHEDULED = [  # rows of the weight that clusters share, and the plan
    (1, LargeBatchDivision(256, 128, 2, 1, 1, True, 128, 3, 132, last_tokens=208)),
    (1, LargeBatchDivision(176, 192, 3, 1, 1, True, 128, 3, 132, last_tokens=64)),
    (1, LargeBatchDivision(112, 128, 2, 1, 1, True, 128, 4, 20, last_tokens=80)),
    (256, LargeBatchDivision(256, 128, 2, 2, 1, True, 128, 3, 66, last_tokens=208)),
    (1, LargeBatchDivision(256, 128, 2, 1, 1, True, 128, 3, 132)),
    (256, LargeBatchDivision(256, 128, 2, 2, 1, True, 128, 3, 66)),  # with divided tiles
    (128, LargeBatchDivision(128, 128, 2, 1, 2, True, 128, 5, 66)),
]


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(("step", "division"), SCHEDULED, ids=str)
def test_blocks_compute_each_part_of_a_tile_once(step: int, division: LargeBatchDivision) -> None:
    """By the kernel's own `Schedule`, at hundreds of shapes. step: N is a multiple of it."""
    tiles_of, chance = schedule_of(division), random.Random(0)
    for _ in range(300):
        m, n = chance.randint(1, 3000), step * -(-chance.randint(130, 20000) // step)
        k = chance.randint(2, 40) * division.chunk
        height = -(-n // (division.rows * division.beside))
        rows = chance.randint(1, height - 1) if height > 1 else 1
        own = division._replace(full_rows=rows if division.last_tokens else 0)
        parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        area: dict[tuple[int, int], int] = {}
        for row, token, tokens, first, end, *corner in tiles_of(own, m, n, k).tolist():
            across = min(row + division.rows, n) - corner[0]
            area[*corner] = across * (min(token + tokens, m) - corner[1])
            parts.setdefault((corner[0], corner[1]), []).append((first, end))
        assert sum(area.values()) == m * n and min(area.values()) > 0
        for shares in map(sorted, parts.values()):
            assert [0, *(end for _, end in shares)] == [
                *(first for first, _ in shares),
                k // division.chunk,
            ]
