"""Weights of 4 and 8 bits times few tokens: how a product is divided and its operands are ordered, on any machine; the
kernel against float64, on a GPU of compute capability 9.0."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit_kernels import weight_mm_few
from lowbit_kernels.weight_mm_few import CHUNK_BYTES, Variant, plan, source

KERNEL = Path(weight_mm_few.__file__).with_suffix(".cu").read_text(encoding="utf-8")
BOUND = {torch.bfloat16: 2e-3, torch.float16: 3e-4}  # of norms, against float64
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
VARIANT = Variant(4, 128, "BF16", "BF16", False, 8, 2, 1, 2)


# ---- how it is divided -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_layer_takes_nearly_all_multiprocessors(n: int, k: int, bits: int, m: int) -> None:
    chosen = plan(m, n, k, bits, 132, scale_bytes=k // 128 * 2)
    assert chosen is not None and chosen.grid >= 128
    assert chosen.stages >= 2


@given(
    st.integers(1, 16),
    st.integers(1, 40_000),
    st.integers(1, 1100),
    st.sampled_from([4, 8]),
    st.integers(16, 200),
    st.sampled_from([32, 64, 128, 1 << 20]),
    st.integers(1, 5),
)
def test_every_plan_fits_and_covers_all(m, n, k32, bits, processors, group, element) -> None:
    k = 32 * k32
    groups = -(-k // group)
    chosen = plan(m, n, k, bits, processors, scale_bytes=groups * element)
    if chosen is None:
        assert k > 16_384
        return
    chunks = -(-k * bits // (8 * CHUNK_BYTES))
    assert chosen.tokens >= m and chosen.grid % chosen.split == 0 and chosen.grid <= processors
    assert chosen.shared <= weight_mm_few.SHARED_LIMIT and chosen.stages <= weight_mm_few.MAX_STAGES
    assert chosen.chunks * chosen.tokens * 8 // bits <= weight_mm_few.X_REGISTERS
    slices = [chunks * rank // chosen.split for rank in range(chosen.split + 1)]
    for start, end in itertools.pairwise(slices):  # as the kernel divides them
        shares = [(end - start) * warp // 16 for warp in range(17)]
        assert shares[0] == 0 and shares[-1] == end - start > 0
        assert all(0 <= b - a <= chosen.chunks for a, b in itertools.pairwise(shares))
        # The ring: rows apart by what keeps banks apart, scales and zero points of whole rows.
        pitch = -(-chunks // chosen.split) * CHUNK_BYTES + 112
        assert chosen.stages * 16 * (pitch + groups * element) <= chosen.shared


def test_what_is_too_long_for_the_registers_has_no_plan() -> None:
    assert plan(1, 4096, 1 << 20, 4, 132) is None


# ---- the source --------------------------------------------------------------------------------------------------------


def test_source_defines_what_the_kernel_asks_for() -> None:
    for variant in (VARIANT, replace(VARIANT, bits=8, group=0, zero=True, scale="FP32", split=4)):
        text = source(variant)
        for name, value in vars(variant).items():
            written = value if isinstance(value, str) else int(value)
            assert f"#define {name.upper()} {written}\n" in text
            assert re.search(rf"\b{name.upper()}\b", KERNEL)
    head = KERNEL[: KERNEL.index("enum")]
    assert all(field.upper() in head for field in vars(VARIANT))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_STAGES", weight_mm_few.MAX_STAGES),
        ("ROWS", weight_mm_few.ROWS),
        ("WARPS", weight_mm_few.WARPS),
        ("CHUNK_BYTES", weight_mm_few.CHUNK_BYTES),
    ],
)
def test_launcher_and_kernel_agree(name: str, value: int) -> None:
    assert re.search(rf"constexpr int (?:\w+ = [^;]*, )?{name} = {value}\b", KERNEL)


def test_launcher_passes_every_argument() -> None:
    signature = re.search(r"few_tokens_mm\((const unsigned short \*x.*?)\)", KERNEL, re.DOTALL)
    assert signature is not None
    assert len(signature[1].split(",")) == 16


# ---- the order of k ----------------------------------------------------------------------------------------------------


def word_at(word: int, t: int, vector: int) -> int:
    """As in the kernel: bytes from a chunk's start."""
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
    """The pairs (low half, high half) that the kernel's `unpack` makes, without its arithmetic's dtype."""
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
    """The pairs of x that `load_x` makes of a word's neighbours."""
    pairs, count = [], 16 // bits
    two = [(x[2 * i], x[2 * i + 1]) for i in range(count)]
    for i in range(count // 2):
        pairs.append((two[i][0], two[i + count // 2][0]))
        pairs.append((two[i][1], two[i + count // 2][1]))
    return pairs


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_mma_meets_the_same_k_on_both_sides(bits: int, vector: int) -> None:
    """A chunk by the fragments of mma.m16n8k16, lane by lane, is the product."""
    generator = torch.Generator().manual_seed(1)
    chunk = CHUNK_BYTES * 8 // bits
    x = torch.randint(-9, 10, (8, chunk), generator=generator)
    memory = torch.randint(0, 256, (16, CHUNK_BYTES), dtype=torch.uint8, generator=generator)
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


# ---- on a GPU ----------------------------------------------------------------------------------------------------------


def operands(
    m: int,
    n: int,
    k: int,
    bits: int = 4,
    group: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype | None = None,
    zero: bool = False,
    extras: bool = False,
) -> dict:
    """For `few_tokens_mm`; group 0: one scale a row. What lies beyond k, up to a whole group, is anything."""
    generator = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    step = group or 32
    padded = -(-k // step) * step
    group = group or padded
    width, groups = padded * bits // 8, padded // group

    def randint(low: int, high: int, shape: tuple, to: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, dtype=to, generator=generator).cuda()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).cuda()

    codes = randint(0, 256, (n, width), torch.uint8)
    half = 1 << (bits - 1)
    return {
        "x": normal(m, k),
        "codes": codes if bits == 4 else codes.view(torch.int8),
        "scale": (torch.rand(n, groups, generator=generator) + 0.5)
        .mul(0.02)
        .to(scale_dtype or dtype)
        .cuda(),
        "zero_point": randint(-half, half, (n, groups), torch.int8) if zero else None,
        "bias": normal(n) if extras else None,
        "residual": normal(m, n) if extras else None,
        "token_scale": torch.rand(m, generator=generator).cuda() + 0.5 if extras else None,
        "bits": bits,
        "group_size": group,
    }


def exact(x, codes, scale, zero_point, bias, residual, token_scale, *, bits, group_size) -> Tensor:
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).double() - 8
    codes = codes.double().unflatten(1, (-1, group_size))
    if zero_point is not None:
        codes = codes - zero_point.double()[..., None]
    weight = (codes * scale.double()[..., None]).flatten(1)[:, : x.shape[1]]
    out = x.double() @ weight.T
    if token_scale is not None:
        out = out * token_scale.double()[:, None]
    for one in (bias, residual):
        out = out if one is None else out + one.double()
    return out


def run(case: dict) -> Tensor:
    available = {name: case[name] for name in ("x", "codes", "scale", "bits", "group_size")}
    if torch.cuda.get_device_capability() != (9, 0):
        assert not weight_mm_few.is_available(**available)
        pytest.skip(f"compute capability 9.0, got {torch.cuda.get_device_capability()}")
    assert weight_mm_few.is_available(**available)
    return weight_mm_few.few_tokens_mm(**case)


def check(case: dict) -> None:
    out, expected = run(case), exact(**case)
    assert out.dtype == case["x"].dtype and out.is_contiguous() and out.shape == expected.shape
    assert torch.isfinite(out).all()
    error = (out.double() - expected).norm() / expected.norm()
    assert error <= BOUND[out.dtype], f"relative error {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 0])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups(bits: int, group: int, dtype: torch.dtype, zero: bool) -> None:
    check(operands(5, 272, 1536, bits, group, dtype, zero=zero, extras=zero))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [32, 96, 100, 128, 160, 4096, 4224, 14336])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, 0])
@pytest.mark.parametrize("m", [3, 16])
def test_lengths(m: int, group: int, bits: int, k: int) -> None:
    check(operands(m, 65, k, bits, group, zero=True))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 17, 1000, 4097])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16])
def test_tokens_and_rows(m: int, n: int) -> None:
    check(operands(m, n, 1024, extras=True))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_layers(n: int, k: int, m: int, bits: int) -> None:
    check(operands(m, n, k, bits))


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_scales(scale_dtype: torch.dtype) -> None:
    check(operands(4, 130, 640, 4, 64, torch.float16, scale_dtype))
    check(operands(12, 130, 640, 8, 64, torch.bfloat16, scale_dtype, zero=True))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_divisions(bits: int, parts: int, split: int) -> None:
    """More tiles than clusters and stages, so that every barrier turns over."""
    case = operands(11, 12_000, 2048 + 128, bits, extras=True)
    run(case)
    chosen = plan(11, 12_000, 2176, bits, 64, scale_bytes=34, splits=(split,), parts=parts)
    assert chosen is not None
    arguments = [value for name, value in case.items() if name not in ("bits", "group_size")]
    out = weight_mm_few._launch(tuple(arguments), bits, 128, chosen)
    expected = exact(**case)
    assert (out.double() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.gpu
def test_strided_rows() -> None:
    case = operands(6, 80, 512)
    wide = torch.zeros(80, 512, dtype=torch.uint8, device="cuda")
    wide[:, 32:288] = case["codes"]
    x = torch.zeros(6, 519, dtype=torch.bfloat16, device="cuda")
    x[:, 3:515] = case["x"]
    expected = run(case)
    assert torch.equal(run({**case, "codes": wide[:, 32:288]}), expected)
    assert torch.equal(run({**case, "x": x[:, 3:515]}), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [-90, -30, 30, 100])
def test_magnitudes(exponent: int) -> None:
    case = operands(4, 64, 512, scale_dtype=torch.float32)
    case["scale"] *= 2.0**exponent
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [1.0, -1e30])
def test_equal_tokens_lose_nothing_to_the_codes_offset(bits: int, value: float) -> None:
    case = operands(8, 256, 4096, bits)
    case["x"].fill_(value)
    check(case)


@pytest.mark.gpu
def test_what_is_not_finite_stays_where_it_is() -> None:
    case = operands(9, 40, 288, 4, 32)
    clean = run(case)
    case["x"][2, 5], case["x"][8, 287] = float("nan"), float("inf")
    case["scale"][7, 1], case["scale"][33, 8] = float("nan"), float("nan")
    out = run(case)
    assert out[2].isnan().all() and not out[8].isfinite().any()
    assert out[:, 7].isnan().all() and out[:, 33].isnan().all()
    rows, columns = [0, 1, 3, 4, 5, 6, 7], [i for i in range(40) if i not in (7, 33)]
    assert torch.equal(out[rows][:, columns], clean[rows][:, columns])


@pytest.mark.gpu
def test_an_infinite_scale_of_the_last_group_is_infinite() -> None:
    case = operands(2, 16, 96, 4, 32)
    case["scale"][3, 2] = float("inf")
    assert run(case)[:, 3].isinf().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_two_runs_are_equal(n: int, k: int) -> None:
    case = operands(13, n, k)
    first = run(case)
    for _ in range(5):
        assert torch.equal(run(case), first)


@pytest.mark.gpu
def test_in_a_graph_after_what_writes_its_operands() -> None:
    case = operands(3, 512, 4096)
    run(case)
    source_codes, source_x = case["codes"].clone(), case["x"].clone()
    case["codes"].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case["codes"].copy_(source_codes)
        case["x"].copy_(source_x)
        outs = [run(case)]
        case["codes"].bitwise_not_()
        outs.append(run(case))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    inverted = exact(**case)
    assert (outs[1].double() - inverted).norm() <= 2e-3 * inverted.norm()
    case["codes"].copy_(source_codes)
    expected = exact(**case)
    assert (outs[0].double() - expected).norm() <= 2e-3 * expected.norm()
