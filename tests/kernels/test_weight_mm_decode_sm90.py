"""The decode kernel: how a product is divided, and the order of its operands."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lowbit_kernels.weight_only import (
    constant_weights,
    weight_mm_decode_memory,
    weight_mm_decode_sm90,
)
from lowbit_kernels.weight_only.weight_mm_decode_sm90 import (
    DecodeVariant,
    chunk_bytes,
    neighbours,
    plan,
    source,
    takes,
)
from lowbit_kernels.weight_only.weight_operands import WeightOperands

_FOLDER = Path(weight_mm_decode_sm90.__file__).parent
KERNEL = (_FOLDER / "weight_mm_decode_sm90.cu").read_text(encoding="utf-8")
SOURCE = "\n".join(
    (_FOLDER.parent / part).read_text(encoding="utf-8") for part in weight_mm_decode_sm90.PARTS
)
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
VARIANT = DecodeVariant(
    *("INT", 4, 128, "BY_UNIT", "BF16", "BF16", "BF16", "NONE"),
    *(8, 2, 1, 1, 1, True, True, 4, False, 1, 1, True, True, False, 0),
    values="0x3f80",
    unit_value="0.5f",
)


# ---- division of the work ------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_layer_takes_nearly_all_multiprocessors(n: int, k: int, bits: int, m: int) -> None:
    chosen = plan(m, n, k, bits, 132, scale_bytes=k // 128 * 2)
    assert chosen is not None and chosen.grid >= 120
    assert chosen.stages >= 2


@example(
    1, 1, 361, 8, 16, 32, 1, False
)  # parts of 31 chunks, whose rows are further apart than a box
@given(
    st.integers(1, 16),
    st.integers(1, 40_000),
    st.integers(1, 1100),
    st.integers(1, 8),
    st.integers(16, 200),
    st.sampled_from([32, 64, 128, 1 << 20]),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_plan_fits_and_covers_all(
    m, n, k32, bits, processors, group, element, is_e2m1
) -> None:
    k = 128 * -(-k32 // 4) if bits % 4 else 32 * k32
    groups, vector = -(-k // group), neighbours(bits, 0 if group >= k else group)
    is_e2m1 &= bits == 4
    of_chunk = 128 // group * element if bits < 8 and groups * element % 16 == 0 else 0
    more = {"scale_box": (of_chunk, 16 * element), "is_e2m1": is_e2m1}
    chosen = plan(m, n, k, bits, processors, scale_bytes=groups * element, vector=vector, **more)
    if chosen is None:
        assert k > 16_384
        return
    size = chunk_bytes(bits)
    chunks = -(-k * bits // (8 * size))
    assert chosen.tokens >= m and chosen.grid % chosen.split == 0
    assert chosen.grid <= processors or chosen.split > 1
    limit, registers = weight_mm_decode_sm90.RESIDENT[chosen.resident]
    assert chosen.shared <= limit and chosen.stages <= weight_mm_decode_sm90.MAX_STAGES
    assert chosen.stages % chosen.teams == 0 and 16 % chosen.teams == 0
    assert chosen.teams == chosen.resident == 1 or (chosen.tokens == chosen.split == 1 and bits < 8)
    warps = 16 // chosen.teams
    for start, end in itertools.pairwise(
        chunks * r // chosen.split for r in range(chosen.split + 1)
    ):
        parts = [(end - start) * part // chosen.parts for part in range(chosen.parts + 1)]
        # As the kernel divides them.
        for part, (first, last) in enumerate(itertools.pairwise(parts)):
            assert (last - first) * size <= chosen.pitch <= weight_mm_decode_sm90.BOX_BYTES
            if chosen.scale_pitch:
                begins = (start + first) * of_chunk // 16 * 16
                assert begins + chosen.scale_pitch >= (start + last) * of_chunk
                assert chosen.scale_pitch // (16 * element) % 2 == 1
            more = part * warps // chosen.parts
            shares = [((last - first) * w + more) // warps for w in range(warps + 1)]
            assert shares[0] == 0 and shares[-1] == last - first
            counts = [b - a for a, b in itertools.pairwise(shares)]
            assert all(0 <= count <= chosen.chunks for count in counts)
    # The kernel's memory: x in registers; two sets of the warps' sums, the ring, a cluster's sums, and x.
    sets = -(-chosen.parts * chosen.chunks // max(8 // chosen.tokens, 1))
    assert sets * max(chosen.tokens // 8, 1) * (8 if bits == 8 else 16) <= registers
    rows, pieces = 16 * chosen.height, chosen.height * -(-chosen.tokens // 8)
    rounds = math.ceil(-(-n // rows) / (chosen.grid // chosen.split))
    kept = -(-rounds // chosen.split) * chosen.split * pieces * 512 if chosen.split > 1 else 0
    scales = chosen.scale_pitch or groups * element
    stage = -(-rows * (chosen.pitch + scales) // 128) * 128
    table = 65536 if chosen.looks_up else 0
    assert is_e2m1 or not table
    slice_ = -(-chunks // chosen.split)
    copied = chosen.resident == 1 and chosen.tokens < 8 and (chosen.tokens == 1 or chosen.parts > 2)
    copy = m * (-(-slice_ * size * 16 // bits // 128) * 128 + 32) if copied else 0
    sums = 2 * warps * pieces * (256 if chosen.tokens == 1 else 512)
    assert 512 + table + sums + chosen.stages * stage + 128 + kept + copy <= chosen.shared
    if chosen.box > 0:
        assert bits < 8 and chosen.tokens >= 8 and 1 <= chosen.apart <= chosen.stages
        boxes = -(-slice_ // chosen.box)
        assert boxes <= 16 and chosen.box * 256 <= weight_mm_decode_memory.X_BYTES
        x = boxes * chosen.box * 256 * chosen.tokens
        assert 512 + 2 * 16 * pieces * 512 + chosen.apart * stage + kept + x <= chosen.shared
    assert chosen.stages >= min(2, rounds * chosen.parts)
    assert chosen.resident == 1 or chosen.stages == rounds * chosen.parts


def test_x_comes_in_boxes() -> None:
    """Boxes are equal and hold at most 1 KB a token. There are none at 8 bits or with fewer than 8 tokens. With 128 KB
    of x, two of three stages reuse its memory later."""
    for m, k, bits, split, box, apart in (
        *(
            (8, 4096, 4, 1, 4, 3),
            (5, 1280, 4, 1, 4, 4),
            (8, 14336, 4, 4, 4, 3),
            (8, 256, 4, 1, 2, 4),
        ),
        *((4, 4096, 4, 1, 0, 3), (8, 4096, 8, 1, 0, 4), (16, 8192, 4, 2, 4, 1)),
    ):
        chosen = plan(m, 28672, k, bits, 132, scale_bytes=k // 64, splits=(split,), heights=(1,))
        assert chosen is not None and (chosen.box, chosen.apart) == (box, apart)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [8, 16])
def test_a_vocabulary_has_a_plan(m: int, bits: int) -> None:
    """A vocabulary has more tiles than the clusters can keep sums of."""
    for k in (8192, 16384):
        chosen = plan(m, 262_144, k, bits, 132, scale_bytes=k // 32 * 4)
        assert chosen is not None and (chosen.split == 1 or chosen.grid > 132)


@pytest.mark.parametrize(
    ("bits", "m", "n", "k", "division"),
    [
        *(
            (4, 1, 4096, 4096, (1, 1, 2)),
            (4, 8, 4096, 4096, (1, 1, 1)),
            (4, 16, 4096, 4096, (2, 1, 1)),
        ),
        *((4, 8, 14336, 4096, (1, 1, 1)), (4, 16, 14336, 4096, (2, 1, 1))),
        *(
            (4, 1, 4096, 14336, (1, 1, 7)),
            (4, 8, 4096, 14336, (4, 1, 1)),
            (4, 16, 4096, 14336, (4, 1, 1)),
        ),
        *(
            (4, 1, 28672, 8192, (1, 1, 2)),
            (4, 8, 28672, 8192, (2, 1, 1)),
            (4, 16, 28672, 8192, (2, 1, 1)),
        ),
        *(
            (8, 1, 4096, 4096, (1, 1, 4)),
            (8, 8, 4096, 4096, (1, 1, 4)),
            (8, 16, 14336, 4096, (2, 1, 2)),
        ),
        *((8, 1, 4096, 14336, (1, 1, 7)), (8, 8, 4096, 14336, (4, 1, 2))),
    ],
)
def test_the_fastest_division_is_chosen(bits: int, m: int, n: int, k: int, division: tuple) -> None:
    """split, height and parts, as measured on an H200 for int4 in groups of 128 and int8 with one scale a row;
    benchmarks/LOG.md has the figures."""
    chosen = plan(m, n, k, bits, 132, scale_bytes=k // 64 if bits == 4 else 2)
    assert chosen is not None and (chosen.split, chosen.height, chosen.parts) == division


@pytest.mark.parametrize(
    ("bits", "m", "k", "tokens"),
    [(8, 1, 4096, 1), (8, 4, 4096, 8), (8, 2, 131072, 2), (4, 4, 4096, 4), (8, 12, 4096, 16)],
)
def test_fewer_than_eight_tokens_at_8_bits_are_computed_as_eight_where_they_fit(
    bits: int, m: int, k: int, tokens: int
) -> None:
    chosen = plan(m, 4096, k, bits, 132)
    assert chosen is not None and chosen.tokens == tokens


def test_k_too_long_for_the_registers_has_no_plan() -> None:
    assert plan(1, 4096, 1 << 20, 4, 132) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 32, 64, 96, 128, 160, 256])
def test_rows_that_lanes_read_at_once_lie_in_different_banks(bits: int, group: int) -> None:
    """With reads of 16 bytes two rows may share banks, since one access serves only 8 lanes."""
    vector = neighbours(bits, group)
    for k32 in range(1, 200):
        chosen = plan(4, 512, 32 * k32, bits, 16, scale_bytes=k32, vector=vector)
        assert chosen is not None and chosen.pitch % 16 == 0
        lanes = 8 * 4 // vector  # served by one access
        words = [
            (lane // 4 * chosen.pitch + lane % 4 * vector * 4 + 4 * i) // 4 % 32
            for lane in range(lanes)
            for i in range(vector)
        ]
        assert max(words.count(bank) for bank in words) <= (2 if vector == 4 else 1)


# ---- the source ----------------------------------------------------------------------------------


def test_source_defines_every_macro_of_the_kernel() -> None:
    for variant in (
        VARIANT,
        replace(VARIANT, codes="INT8", bits=8, group=0, zero="CODE", scale="FP32", split=4, box=0),
        replace(VARIANT, codes="E4M3", bits=8, group=0, x="FP16", box=0),
    ):
        text = source(variant)
        for name, value in vars(variant).items():
            written = value if isinstance(value, str) else int(value)
            assert f"#define {name.upper()} {written}\n" in text
            assert re.search(rf"\b{name.upper()}\b", SOURCE)
    head = KERNEL[: KERNEL.index("\nDEVICE")]
    assert all(field.upper() in head for field in vars(VARIANT))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_STAGES", weight_mm_decode_sm90.MAX_STAGES),
        ("ROWS", weight_mm_decode_sm90.ROWS),
        ("WARPS", weight_mm_decode_sm90.WARPS),
    ],
)
def test_launcher_and_kernel_agree(name: str, value: int) -> None:
    assert re.search(rf"constexpr int (?:\w+ = [^;]*, )?{name} = {value}\b", SOURCE)


def test_launcher_passes_every_argument() -> None:
    signature = re.search(r"decode_mm\((const __grid_constant__.*?)\)", KERNEL, re.DOTALL)
    assert signature is not None
    names = [re.split(r"[\s*]+", argument.strip())[-1] for argument in signature[1].split(",")]
    assert len(names) == weight_mm_decode_sm90.ARGUMENTS and names[-1] == "constant"
    assert names[constant_weights.WEIGHT] == ["codes", "scale", "zero_point"]


# ---- the order of k ------------------------------------------------------------------------------


def word_at(word: int, t: int, vector: int) -> int:
    """The kernel's `word_at`: bytes from the start of a chunk."""
    return word // vector * (16 * vector) + (t * vector + word % vector) * 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_lanes_take_each_code_of_a_chunk_once_and_units_are_neighbours(bits, vector) -> None:
    for unit in range(4 // vector):
        words = range(unit * vector, (unit + 1) * vector)
        taken = sorted(word_at(word, t, vector) for word in words for t in range(4))
        size = 16 * vector
        assert taken == list(range(unit * size, (unit + 1) * size, 4))


def unpacked(word: int, bits: int) -> list[tuple[int, int]]:
    """The pairs (low half, high half) that the kernel's `unpack` makes, as integers."""
    pairs = []
    for i in range(16 // bits):
        own = word >> (i * bits)
        low, high = own & (15 if bits == 4 else 255), own >> 16 & (15 if bits == 4 else 255)
        if bits == 4:
            pairs.append((low - 8, high - 8))
        else:
            pairs.append(tuple((x & 127) - (x & 128) for x in (low, high)))
    return pairs


def paired(x: list[float], bits: int) -> list[tuple[float, float]]:
    """The pairs of a word's x that the kernel's `order_x` makes."""
    pairs, count = [], 16 // bits
    two = [(x[2 * i], x[2 * i + 1]) for i in range(count)]
    for i in range(count // 2):
        pairs.append((two[i][0], two[i + count // 2][0]))
        pairs.append((two[i][1], two[i + count // 2][1]))
    return pairs


def test_float8_takes_no_padding() -> None:
    """float8 needs rows that end at k, since the padding may hold NaN."""
    codes = torch.zeros(16, 64, dtype=torch.float8_e4m3fn)
    scale = torch.ones(16, 1)
    for dtype, k, fits in (
        (torch.float16, 64, True),
        (torch.bfloat16, 64, True),
        (torch.float16, 60, False),
    ):
        x = torch.zeros(2, k, dtype=dtype)
        int8 = codes.view(torch.int8)
        assert takes(WeightOperands.of(x, codes, scale, group_size=64)) == fits
        assert takes(WeightOperands.of(x, int8, scale, group_size=64))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_both_operands_of_mma_have_the_same_k(bits: int, vector: int) -> None:
    """The fragments of mma.m16n8k16, lane by lane, give the product of a chunk."""
    generator = torch.Generator().manual_seed(1)
    chunk = chunk_bytes(bits) * 8 // bits
    x = torch.randint(-9, 10, (8, chunk), generator=generator)
    memory = torch.randint(0, 256, (16, chunk_bytes(bits)), dtype=torch.uint8, generator=generator)
    if bits == 4:
        codes = torch.stack([memory & 15, memory >> 4], -1).view(16, chunk).long() - 8
    else:
        codes = memory.view(torch.int8).long()
    sums = torch.zeros(16, 8, dtype=torch.long)
    for word in range(4):
        for step in range(8 // bits):
            a = torch.zeros(16, 16, dtype=torch.long)
            b = torch.zeros(16, 8, dtype=torch.long)
            for g, t in itertools.product(range(8), range(4)):
                at = word_at(word, t, vector)
                k = at * 8 // bits
                of_x = paired(x[g, k : k + 32 // bits].tolist(), bits)
                for half in range(2):  # a0/a1/b0, a2/a3/b1
                    place = slice(2 * t + 8 * half, 2 * t + 8 * half + 2)
                    for row in (g, g + 8):
                        value = int.from_bytes(bytes(memory[row, at : at + 4].tolist()), "little")
                        pair = unpacked(value, bits)[2 * step + half]
                        a[row, place] = torch.tensor(pair)
                    b[place, g] = torch.tensor(of_x[2 * step + half])
            sums += a @ b
    assert torch.equal(sums, codes @ x.T)


def to_bf16(bits: int) -> float:
    signed = bits - 65536 if bits >= 32768 else bits
    return torch.tensor([signed], dtype=torch.int16).view(torch.bfloat16).item()


def to_fp16(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int16).view(torch.float16).item()


def test_codes_become_floats_exactly() -> None:
    for nibble in range(16):
        assert (
            to_bf16(0x4300 | nibble) == 128 + nibble and to_fp16(0x6400 | nibble) == 1024 + nibble
        )
    for zero_point in range(-8, 8):
        assert to_bf16(0x4308 + zero_point) == 136 + zero_point
        assert to_fp16(0x6408 + zero_point) == 1032 + zero_point
    for code in range(-128, 128):
        byte = code & 255
        low, sign = to_bf16(0x4300 | byte & 0x7F), to_bf16(0x4300 | byte & 0x80)
        assert low - sign == code
        assert to_fp16(byte ^ 0x6480) - to_fp16(0x6480) == code
    differences = torch.arange(-255, 256)
    assert torch.equal(differences.bfloat16().long(), differences)
