"""The shared memory of a block of the decode kernel: sums, x, and the ring of stages with codes and scales."""

from __future__ import annotations

import itertools

from lowbit_kernels.runtime.nvrtc import SHARED_LIMIT

ROWS, MAX_STAGES = 16, 6  # of a tile, a height of 1; of the ring
CHUNK = 128  # codes of fewer than 8 bits in a chunk; 64 others
BOX_BYTES = 2048  # most bytes of a row that one copy loads
X_BYTES = 1024  # most bytes of a token's x that one copy loads
# Bytes of tiles that a block loads at once. With more in flight they arrive later, and out of order.
IN_FLIGHT = 112 * 1024
# Bytes of a block that leave room for one of another launch on the multiprocessor, but not for a second one like it.
ALONE = 116 * 1024
LOOK_UP_BYTES = 64 * 1024  # all pairs of two numbers of E2M1, once a lane
FEW_STAGES = 3  # with fewer than these, blocks copy the scales of their parts of rows alone


def sums_and_x(
    m: int, tokens: int, pieces: int, warps: int, rounds: int, split: int, x: int
) -> int:
    """Bytes for the warps' sums, those of the blocks of a cluster, and m tokens of `x` bytes (0: x is not copied)."""
    kept = -(-rounds // split) * split * pieces * 512 if split > 1 else 0
    copied = m * (-(-x // 128) * 128 + 32) if x else 0
    return kept + copied + 2 * warps * pieces * (256 if tokens == 1 else 512)


def stage_bytes(height: int, row: int) -> int:
    """Bytes of a stage, whose rows have `row` bytes of codes and scales."""
    return -(-ROWS * height * row // 128) * 128


def scale_pitch_of(chunks: int, split: int, parts: int, size: int, step: int) -> int:
    """Bytes from row to row of a part's scales in shared memory, an odd multiple of `step`; 0 where those of whole
    rows are copied. `size`: bytes of a chunk's. A copy begins at a multiple of 16 bytes of a row."""
    most = 0
    for first, end in itertools.pairwise(chunks * rank // split for rank in range(split + 1)):
        edges = (first + (end - first) * part // parts for part in range(parts + 1))
        for start, stop in itertools.pairwise(edges):
            most = max(most, stop * size - start * size // 16 * 16)
    pitch = (-(-most // step) | 1) * step
    return pitch if size and pitch <= BOX_BYTES else 0


def stages_of(rounds: int, parts: int, stage: int, teams: int, resident: int) -> int:
    """The stages that keep memory busy: at least two, and with up to 4 parts at most 4, or for two teams 6. A block
    beside one of the next launch copies everything at once."""
    if resident == 2:
        return rounds * parts
    if teams == 2:
        return min(MAX_STAGES if parts > 1 else 4, 2 * -(-rounds // 2) * parts)
    wanted = min(MAX_STAGES if parts > 4 else 4, rounds * parts)
    return min(wanted, max(IN_FLIGHT // stage, 2))


def with_boxes(
    fixed: int, stage: int, stages: int, slice_: int, tokens: int
) -> tuple[int, int, int]:
    """Bytes of all, chunks of a box of x, and stages that share no memory with x, which has `slice_` chunks. The boxes
    are equal; there are none where they don't fit behind a stage."""
    count = -(-slice_ * CHUNK * 2 // X_BYTES)
    box = -(-slice_ // count)
    x = -(-slice_ // box) * box * CHUNK * 2 * tokens
    most = fixed + stages * stage
    if fixed + x + stage > SHARED_LIMIT:
        return most, 0, stages
    apart = min((SHARED_LIMIT - fixed - x) // stage, stages)
    return max(most, fixed + apart * stage + x), box, apart


def chunk_bytes(bits: int) -> int:
    """Bytes of a chunk of a row's codes."""
    return 64 if bits == 8 else CHUNK * bits // 8


def bank_step(bits: int, vector: int) -> int:
    """The distance of rows in shared memory modulo 128 bytes at which lanes read from different banks; 0: any. With
    reads of 16 bytes two rows share a bank, which costs little."""
    if bits in (4, 8):
        return 16 * vector if vector < 4 else 0
    return 16 * bits


def neighbours(bits: int, group: int) -> int:
    """Words of a row that a lane reads at once, 8 codes or 4 of 8 bits: 4, or fewer where groups begin within a chunk
    (group 0: one a row)."""
    words = group // 4 if bits == 8 else group // 8
    return 4 if words % 16 == 0 else 2 if words % 8 == 0 else 1
