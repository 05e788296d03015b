"""The large-batch kernel: its operands, its source emulated on a CPU, and its results on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowbit_kernels.weight_only import weight_mm_large_batch_sm90
from lowbit_kernels.weight_only.one_launch import readable
from lowbit_kernels.weight_only.weight_lookup_sm90 import ROUNDED_FROM, Unpacking
from lowbit_kernels.weight_only.weight_mm_large_batch_sm90 import (
    LargeBatchDivision,
    LargeBatchProduct,
    _holds,
    _ring_holds_sums,
    _stage,
    chunk_of,
    is_readable,
    stages,
)
from lowbit_kernels.weight_only.weight_operands import WeightOperands, layout
from tests.kernels import sm90_emulator
from tests.kernels.compiled_on_cpu import COMPILER

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ERROR = {BF16: 2e-3, FP16: 4e-4}  # relative, of norms: the result's rounding


def integers(bits: int, group: int, **options) -> Unpacking:
    """Signed codes of 4 or 8 bits in groups, or with one scale a row (0)."""
    return Unpacking(f"INT{bits}", bits, group, **options)


# ---- source, operands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("bits", "shift"), [(4, 0), (4, 4), (8, 0), (1, 7), (3, 5), (5, 3), (5, 0), (6, 2), (7, 1)]
)
def test_unpacked_codes_are_exact(dtype: torch.dtype, bits: int, shift: int) -> None:
    """Each step of unpacking gives a number of the operand's dtype: the code's bits, read as a subnormal bfloat16 or in
    the mantissa of 1024 in float16; times a factor; minus the zero point. `shift`: of an upper nibble, and of
    the lower code of a stream."""
    grid = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    code, zero = (t.reshape(-1) for t in torch.meshgrid(grid, grid, indexing="ij"))
    read = (code + 2 ** (bits - 1) << shift) + (0x6400 if dtype == FP16 else 0)
    factor, unit = (2.0**-shift, 1.0) if dtype == FP16 else (2.0 ** (127 - shift), 1 / 64)
    offset = -unit * (zero + 2 ** (bits - 1)) - (1024 * factor if dtype == FP16 else 0.0)
    weight = read.to(torch.int16).view(dtype).double() * factor + offset
    assert torch.equal(weight, (code - zero) * unit)
    for step in (offset, weight, torch.tensor(factor, dtype=torch.double)):
        assert torch.equal(step.to(dtype).double(), step.double())


def test_source_has_the_macros() -> None:
    shape = (64, 128, 4, 1, 2, False, 128, 5)
    unpacking = integers(8, 64, zero=1, scale="FP32")
    code = weight_mm_large_batch_sm90.source(FP16, BF16, unpacking, shape)
    for macro in (
        "DTYPE FP16",
        "OUT BF16",
        "CODES INT8",
        "BITS 8",
        "UNSIGNED 0",
        "GROUP 64",
        "SCALE FP32",
        "ZERO 1",
        "ROUNDED 0",
    ):
        assert f"#define {macro}\n" in code
    for macro in (
        "TOKENS 64",
        "ROWS 128",
        "GROUPS 4",
        "BESIDE 1",
        "SPLIT 2",
        "CHUNK 128",
        "STAGES 5",
    ):
        assert f"#define {macro}\n" in code
    assert "m64n64k16.f32.f16.f16" in code


def test_codes_that_bulk_copies_cannot_read_are_not_taken() -> None:
    def takes(codes: torch.Tensor, group: int = 32, x: torch.Tensor | None = None) -> bool:
        k = codes.shape[1] * 2
        x = torch.zeros(3, k, dtype=BF16) if x is None else x
        scale = torch.zeros(len(codes), max(k // group, 1), dtype=BF16)
        operands = WeightOperands.of(x, codes, scale, group_size=group)
        return weight_mm_large_batch_sm90.takes(operands)

    codes = torch.zeros(8, 64, dtype=torch.uint8)
    assert takes(codes) and takes(codes, 128) and takes(codes[::2]) and takes(codes[:, :32])
    assert not takes(codes[:, 1:33]) and not takes(codes[:, :24]) and not takes(codes, 24)
    assert not takes(torch.zeros(8, 40, dtype=torch.uint8)[:, :32])
    assert not takes(codes, x=torch.zeros(3, 128))
    assert not takes(codes, x=torch.zeros(128, 3, dtype=BF16).T)
    assert not takes(codes[:1].expand(8, 64))
    for k, fits in ((112, True), (104, False)):  # bytes of a row
        x, int8 = torch.zeros(3, k, dtype=BF16), torch.zeros(8, k, dtype=torch.int8)
        operands = WeightOperands.of(x, int8, torch.ones(8, 1, dtype=BF16), group_size=k)
        assert weight_mm_large_batch_sm90.takes(operands) == fits


def test_tokens_that_the_tma_cannot_read_are_copied() -> None:
    x = torch.randn(6, 128).to(BF16)
    for fine in (x, x[::2], x[:, :40], x[:1], x[0].expand(1, 128)):
        assert is_readable(layout(fine))
    for other in (x[0].expand(6, 128), x.view(-1).unfold(0, 64, 8), x[:, 1:], x[:, :41].clone()):
        assert not is_readable(layout(other))
        copy = readable(other)
        assert torch.equal(copy, other) and is_readable(layout(copy))
        assert copy.stride(0) % 8 == 0 <= copy.stride(0) - other.shape[1]


# ---- products --------------------------------------------------------------------------------------------------------


class Operands:
    """Random operands; `exact` is their product in float64."""

    def __init__(
        self, m, n, k, bits, group, *, dtype=BF16, scale=BF16, zero=False, pitch=0, device="cuda"
    ):
        self.bits, self.group = bits, group or -(-k // 32) * 32
        width = -(-k // self.group) * self.group
        columns = width * bits // 8
        low, high = (0, 256) if bits == 4 else (-128, 128)
        kind = torch.uint8 if bits == 4 else torch.int8
        codes = torch.randint(low, high, (n, columns + pitch), device=device).to(kind)
        self.codes = codes[:, :columns]
        shape = (n, width // self.group)
        self.scale = (torch.rand(shape, device=device) * 0.02 + 0.001).to(scale)
        self.scale.flatten()[1::3] *= -1
        low, high = (-8, 8) if bits == 4 else (-128, 128)
        zeros = torch.randint(low, high, shape, device=device).to(torch.int8)
        zeros.view(-1)[::3], zeros.view(-1)[1::3] = low, high - 1
        self.zero = zeros if zero else None
        self.x = torch.randn(m, k, device=device).to(dtype)
        self.bias = self.residual = self.token_scale = None
        self.out = dtype

    def weight(self) -> torch.Tensor:
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).int() - 8
        weight = codes.double()
        scale, zero = self.scale.double(), self.zero
        if zero is not None:
            weight = weight - zero.double().repeat_interleave(self.group, 1)
        return (weight * scale.repeat_interleave(self.group, 1))[:, : self.x.shape[1]]

    def exact(self) -> torch.Tensor:
        out = self.x.double() @ self.weight().T
        if self.token_scale is not None:
            out = out * self.token_scale.double()[:, None]
        for more in (self.bias, self.residual):
            out = out if more is None else out + more.double()
        return out

    def more(self) -> Operands:
        (m, _), n, dtype = self.x.shape, len(self.codes), self.out
        device = self.x.device
        self.bias = torch.randn(n, device=device).to(dtype)
        self.residual = torch.randn(m, n, device=device).to(dtype)
        self.token_scale = torch.rand(m, device=device) + 0.5
        return self

    def arguments(self) -> tuple:
        extra = (self.bias, self.residual, self.token_scale, None)
        return (self.x, self.codes, self.scale, self.zero, *extra)

    def product(self, chosen: LargeBatchDivision | None = None) -> torch.Tensor:
        operands = WeightOperands.of(*self.arguments(), group_size=self.group, out=self.out)
        if chosen is not None:
            return LargeBatchProduct(operands, chosen)(self.arguments())
        product = weight_mm_large_batch_sm90.product(operands)
        if product is None:
            pytest.skip("needs a GPU of compute capability 9.0")
        return product(self.arguments())

    def check(self, chosen: LargeBatchDivision | None = None, factor: float = 1.0) -> None:
        out, exact = self.product(chosen), self.exact()
        assert out.shape == exact.shape and out.dtype == self.out and out.is_contiguous()
        # the mean rounding of few results may be larger
        limit = factor * ERROR[self.out] * (2 if exact.numel() < 1000 else 1)
        assert (out.double() - exact).norm() <= limit * exact.norm()


def planned(
    tokens: int, rows: int, groups: int, *rest: int, rounded: bool = False
) -> LargeBatchDivision:
    beside, split, clusters = rest
    depth = max(3, 2 * weight_mm_large_batch_sm90.Tile(tokens, rows, groups).turns)
    return LargeBatchDivision(tokens, rows, groups, beside, split, rounded, 128, depth, clusters)


def mixed(tokens: int, full_rows: int, of: LargeBatchDivision) -> LargeBatchDivision:
    return of._replace(last_tokens=tokens, full_rows=full_rows)


def joined(of: LargeBatchDivision, chunk: int = 128, stages: int = 2) -> LargeBatchDivision:
    """The same with chunks of so many stages."""
    return of._replace(chunk=chunk, joined=stages, stages=4)


EMULATED = [  # plan, m, n, k, bits, group: split-K, turns of warp groups, more chunks than stages, ragged shapes
    (planned(16, 128, 4, 1, 2, 1), 20, 200, 1000, 4, 128),
    (planned(16, 256, 4, 1, 4, 1), 17, 1, 1100, 4, 64),
    (planned(16, 128, 4, 1, 2, 1)._replace(chunk=256), 20, 130, 1200, 4, 128),
    (planned(32, 64, 4, 1, 1, 1)._replace(chunk=256), 20, 60, 600, 4, 0),
    (planned(32, 64, 4, 1, 2, 2), 20, 100, 1100, 4, 128),
    (planned(16, 128, 4, 2, 1, 1), 17, 270, 300, 4, 256),
    (planned(16, 128, 2, 1, 8, 1), 17, 17, 1100, 8, 0),
    (planned(16, 128, 4, 1, 1, 2), 10, 129, 352, 4, 96),
    (planned(16, 64, 4, 1, 1, 1), 18, 70, 112, 8, 112),
    (planned(32, 256, 2, 1, 1, 1), 30, 129, 96, 8, 32),
    (planned(64, 256, 4, 1, 1, 1), 40, 200, 400, 4, 128),
    (planned(32, 128, 2, 2, 1, 2), 30, 620, 900, 4, 128),  # the last tile is divided
    (planned(32, 256, 4, 2, 1, 2)._replace(chunk=64, stages=5), 30, 1100, 330, 8, 0),
    (
        planned(16, 224, 4, 2, 1, 1),
        20,
        700,
        600,
        4,
        128,
    ),  # overlapping rows of two blocks, more than one tile
    (planned(32, 224, 4, 2, 1, 2)._replace(chunk=256), 40, 1111, 900, 4, 64),
    (planned(32, 224, 4, 2, 1, 1), 40, 430, 100, 8, 32),
    (planned(128, 256, 2, 1, 1, 1), 100, 130, 270, 4, 0),
    (planned(128, 128, 2, 2, 2, 1), 100, 100, 300, 4, 128),
    (planned(256, 128, 2, 1, 1, 1, rounded=True), 100, 104, 200, 4, 128),
    (
        planned(256, 128, 2, 2, 1, 1, rounded=True)._replace(chunk=64, stages=4),
        60,
        104,
        290,
        8,
        128,
    ),
    (planned(256, 128, 2, 2, 1, 1, rounded=True), 60, 104, 290, 4, 32),
    (planned(80, 128, 2, 1, 2, 4), 100, 200, 600, 4, 128),  # sums in the ring's place
    (planned(80, 128, 2, 2, 2, 4), 100, 500, 700, 4, 128),
    (planned(112, 192, 3, 1, 1, 2), 200, 400, 500, 4, 128),
    (planned(96, 192, 3, 2, 1, 2), 200, 700, 500, 8, 0),
    (planned(160, 192, 3, 1, 4, 4, rounded=True), 200, 300, 1000, 4, 128),
    (planned(80, 128, 2, 1, 1, 2, rounded=True)._replace(chunk=256), 200, 400, 1024, 4, 128),
    (
        planned(112, 128, 2, 2, 1, 1, rounded=True),
        250,
        520,
        400,
        4,
        128,
    ),  # an odd number of squares, many tiles
    (planned(112, 128, 2, 2, 1, 2, rounded=True), 130, 520, 400, 4, 128),  # the same, divided
    (planned(208, 128, 2, 1, 2, 1, rounded=True), 208, 128, 400, 4, 128),
    (planned(176, 128, 2, 1, 2, 4, rounded=True), 180, 136, 600, 4, 128),  # both finish 16 tokens
    (planned(256, 128, 2, 1, 2, 1, rounded=True), 250, 128, 300, 4, 128),  # sums in two phases
    (planned(80, 64, 2, 1, 2, 2), 100, 136, 700, 4, 128),  # two warp groups in turns
    (planned(128, 64, 2, 1, 1, 2), 140, 130, 600, 8, 0),
    (planned(112, 64, 2, 1, 4, 1, rounded=True), 100, 72, 1100, 4, 128),
    # smaller tiles in the last rows
    (mixed(80, 2, planned(112, 128, 2, 1, 1, 3, rounded=True)), 200, 520, 400, 4, 128),
    (mixed(208, 1, planned(256, 128, 2, 1, 1, 2, rounded=True)), 250, 264, 260, 4, 128),
    (mixed(48, 1, planned(80, 128, 2, 2, 1, 2, rounded=True)), 130, 776, 400, 4, 128),
    (mixed(64, 1, planned(96, 192, 3, 1, 1, 2)), 150, 700, 500, 8, 0),
    (mixed(80, 1, planned(128, 256, 2, 1, 1, 3)), 200, 600, 270, 4, 0),
    (mixed(48, 1, planned(64, 128, 2, 1, 1, 2)), 100, 300, 400, 4, 64),
    # chunks of two and four stages
    (joined(planned(128, 128, 2, 1, 1, 1, rounded=True), 256), 100, 130, 1200, 4, 128),
    (joined(planned(256, 128, 2, 1, 1, 1, rounded=True), 256, 4), 60, 260, 1500, 4, 128),
    (joined(planned(256, 128, 2, 1, 1, 1, rounded=True)), 100, 260, 1000, 4, 128),
    (joined(planned(256, 128, 2, 2, 1, 1, rounded=True)), 60, 520, 700, 8, 64),  # divided, too
    (joined(planned(256, 128, 2, 1, 2, 1, rounded=True)), 250, 128, 650, 4, 128),
    (mixed(208, 1, joined(planned(256, 128, 2, 1, 1, 2, rounded=True))), 250, 264, 700, 4, 32),
    (joined(planned(192, 128, 2, 1, 1, 2, rounded=True), 256, 4), 200, 260, 1500, 4, 128),
    (joined(planned(160, 192, 3, 1, 2, 2, rounded=True), 256, 4), 150, 200, 1200, 4, 128),
    (joined(planned(96, 128, 2, 1, 1, 2), 256), 150, 300, 1100, 8, 0),
]


@pytest.mark.cover(
    "values",
    chosen=lambda chosen: (chosen.tokens, *chosen),
    **dict.fromkeys("mnk", lambda size: ()),
    bits=str,
    group=lambda group: (group == 0, group % 64 == 0),
    dtype=str,
)
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("chosen", "m", "n", "k", "bits", "group", "dtype"),
    [
        *((*case, FP16) for case in EMULATED),
        *((*case, BF16) for case in EMULATED[:13]),
    ],
    ids=str,
)
def test_emulated(
    chosen: LargeBatchDivision, m: int, n: int, k: int, bits: int, group: int, dtype: torch.dtype
) -> None:
    """The kernel's arithmetic, indices and barriers, run in fibers on the CPU."""
    with sm90_emulator.emulated():
        kinds = {"device": "cpu"}
        if not chosen.rounded:
            kinds |= {"dtype": dtype, "scale": FP32, "zero": True, "pitch": 16}
        operands = Operands(m, n, k, bits, group, **kinds)
        if chosen.rounded:  # without addends the kernel writes results by `finish_lines`
            operands.check(chosen, factor=1.3)
        operands.more().check(chosen, 1.3 if chosen.rounded else 1.0)


def keeps_the_bits(operands: Operands, last_tokens: int, of: LargeBatchDivision) -> None:
    """Tiles of two sizes give the results of equal tiles, also beside a token that is NaN."""
    operands.x[3] = float("nan")
    out, equal = (operands.product(one) for one in (mixed(last_tokens, 1, of), of))
    torch.testing.assert_close(out, equal, rtol=0, atol=0, equal_nan=True)
    assert out[3].isnan().all() and out.isnan().sum() == out.shape[1]


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("beside", [1, 2])
def test_smaller_tiles_in_the_last_rows_keep_the_bits(beside: int) -> None:
    with sm90_emulator.emulated():
        operands = Operands(90, 776 if beside == 2 else 260, 300, 4, 128, device="cpu")
        keeps_the_bits(operands, 48, planned(80, 128, 2, beside, 1, 2, rounded=True))


LATE = [  # rings that warp groups share, with more chunks than slots, in even and odd numbers
    (
        weight_mm_large_batch_sm90.plan(16, 28672, 8192, integers(8, 0), 132)._replace(clusters=1),
        448,
        1792,
        8,
        0,
    ),
    (
        weight_mm_large_batch_sm90.plan(16, 28672, 8192, integers(4, 128), 132)._replace(
            clusters=1
        ),
        448,
        3584,
        4,
        128,
    ),
    (planned(16, 224, 4, 2, 1, 1), 900, 640, 4, 128),
    (planned(32, 128, 2, 2, 1, 2), 620, 900, 4, 128),
    (planned(80, 64, 2, 1, 2, 1), 130, 1400, 4, 64),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            (planned(16, 128, 4, 1, 1, 1), 300, 640, 4, 128),
            (planned(32, 64, 4, 1, 1, 1), 150, 1400, 4, 64),
            (planned(16, 128, 4, 1, 2, 1), 260, 1400, 8, 0),
        )
    ),
]


@pytest.mark.cover("values")
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("chosen", "n", "k", "bits", "group"), LATE, ids=str)
def test_copies_may_come_late(
    chosen: LargeBatchDivision,
    n: int,
    k: int,
    bits: int,
    group: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EMULATED_DELAY", f"400,{seed}")
    with sm90_emulator.emulated():
        Operands(16, n, k, bits, group, dtype=FP16, device="cpu").check(chosen)


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_the_last_groups_scale_may_be_infinite() -> None:
    """A chunk may continue beyond the last group, where x is 0."""
    with sm90_emulator.emulated():
        operands = Operands(10, 129, 352, 4, 32, dtype=FP16, device="cpu")
        operands.scale[5, -1], operands.codes[5], operands.x = float("inf"), 0xCC, operands.x.abs()
        out = operands.product(planned(16, 128, 4, 1, 1, 2))
    assert torch.equal(out[:, 5].double(), operands.exact()[:, 5])
    assert out.isfinite().sum() == 10 * 128


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 17, 31, 32, 64, 100, 128, 255, 256, 257, 1000])
@pytest.mark.parametrize("bits", [4, 8])
def test_tokens(m: int, bits: int) -> None:
    Operands(m, 272, 4096, bits, 128, scale=FP32).check()


@pytest.mark.gpu
@pytest.mark.parametrize("k", [32, 96, 128, 160, 4096, 4224])
@pytest.mark.parametrize("n", [1, 17, 64, 4097])
def test_ragged_shapes(n: int, k: int) -> None:
    for m, bits in itertools.product((17, 100), (4, 8)):
        Operands(m, n, k, bits, 32).more().check()
        Operands(m, n, k, bits, 0, zero=True).more().check()


@pytest.mark.cover("pairs")
@pytest.mark.gpu
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("scale", [BF16, FP16, FP32])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 32, 64, 96, 128, 256])
def test_groups_and_dtypes(group: int, bits: int, dtype, scale, zero: bool) -> None:
    kinds = {"dtype": dtype, "scale": scale, "zero": zero}
    Operands(40, 200, 1056, bits, group, **kinds).more().check()


def planned_deep(tokens, rows, groups, *rest, group=128, rounded=False) -> LargeBatchDivision:
    beside, split, clusters = rest
    unpacking = integers(4, group)
    chunk = chunk_of(weight_mm_large_batch_sm90.Tile(tokens, rows, groups), unpacking, 2048)
    depth = stages(tokens, rows, groups, split, unpacking, chunk)
    return LargeBatchDivision(tokens, rows, groups, beside, split, rounded, chunk, depth, clusters)


SOME = [tile for tile in weight_mm_large_batch_sm90.WIDE if tile.tokens in (48, 80, 144, 192, 256)]


def forced() -> list[tuple[int, LargeBatchDivision]]:
    """Groups and plans: every shape of tile and cluster, with many tiles a cluster and with one."""
    found = []
    for tile, groups in [
        *((t, (0, 32, 64, 128)) for t in weight_mm_large_batch_sm90.SMALL),
        *((t, (0, 32, 64, 128)) for t in weight_mm_large_batch_sm90.PAIRED),
        *((t, (0, 128)) for t in SOME),
    ]:
        for beside, split, clusters in (
            (1, 1, 2),
            (1, 2, 50),
            (1, 4, 1),
            (2, 1, 4),  # the last round may divide tiles
            (2, 4, 3),
            (1, 8, 16),
        ):
            for group in groups:
                if tile.is_once(split):
                    clusters = tile.clusters(300, 520, beside)
                chosen = planned_deep(*tile, beside, split, clusters, group=group)
                paired = not tile.overlaps or (beside, split) == (2, 1)
                held = _holds(tile, integers(4, group), group > 0)
                ring = chosen.stages * _stage(tile, integers(4, group), chosen.chunk)
                fits = held and _ring_holds_sums(tile, beside, split, ring)
                if chosen.stages > tile.turns and tile.rows // 16 % split == 0 and paired and fits:
                    found.append((group, chosen))
    return found


@pytest.mark.cover(
    "pairs", group=str, chosen=lambda plan: (plan[:3], (plan.beside, plan.split, plan.clusters))
)
@pytest.mark.gpu
@pytest.mark.parametrize(("group", "chosen"), forced(), ids=str)
def test_every_division(group: int, chosen: LargeBatchDivision) -> None:
    operands = Operands(300, 520, 2048, 4, group, zero=True).more()
    operands.check(chosen)
    assert torch.equal(operands.product(chosen), operands.product(chosen))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("beside", [1, 2])
@pytest.mark.parametrize("last_tokens", [64, 112, 208])
def test_smaller_tiles_keep_the_bits(last_tokens: int, beside: int, bits: int) -> None:
    of = planned_deep(256, 128, 2, beside, 1, 5, rounded=True)
    if bits == 8:
        of = of._replace(chunk=64, stages=5)
    keeps_the_bits(Operands(700, 1032, 2048, bits, 128), last_tokens, of)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("beside", [1, 2])
@pytest.mark.parametrize("tile", SOME, ids=str)
def test_rounded_weights(tile: weight_mm_large_batch_sm90.Tile, beside: int, group: int) -> None:
    """Against the product of weights rounded once to bfloat16, only the result is rounded."""
    chosen = planned_deep(*tile, beside, 1, 4, rounded=True)
    operands = Operands(700, 520, 2048, 4, group, zero=group != 128)
    out, rounded = operands.product(chosen), operands.weight().to(BF16).double()
    exact = operands.x.double() @ rounded.T
    assert (out.double() - exact).norm() <= 2e-3 * exact.norm()
    operands.check(chosen, factor=1.3)


@pytest.mark.gpu
def test_strided_operands() -> None:
    operands = Operands(100, 300, 1024, 4, 128, pitch=64)
    operands.check()
    wide = torch.randn(100, 1031, device="cuda").to(BF16)
    for first in (0, 1, 7):
        operands.x = wide[:, first : first + 1024]
        operands.check()
    between = torch.zeros(operands.scale.numel() + 1, dtype=BF16, device="cuda")[1:]
    # does not begin at a multiple of 4 bytes
    operands.scale = between.view_as(operands.scale).copy_(operands.scale)
    for m in (16, 100):
        operands.x = torch.randn(m, 1024, device="cuda").to(BF16)
        operands.check()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_scales_of_any_size(size: float) -> None:
    operands = Operands(50, 300, 512, 4, 128, scale=FP32)
    operands.scale *= size
    operands.check()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [40, 600])
def test_nan_and_infinity_stay_where_they_are(m: int) -> None:
    operands = Operands(m, 300, 500, 4, 128)
    operands.x[3, 77], operands.x[5, 499] = float("nan"), float("inf")
    operands.scale[17, 1], operands.scale[200, 3] = float("nan"), float("inf")
    finite = operands.product().isfinite()
    expected = torch.ones(m, 300, dtype=torch.bool, device="cuda")
    expected[[3, 5]] = False
    expected[:, [17, 200]] = False
    assert torch.equal(finite, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(32, 4096, 4096), (200, 4096, 4096), (1024, 1000, 4096)])
def test_cuda_graph(m: int, n: int, k: int) -> None:
    operands = Operands(m, n, k, 4, 128)
    operands.product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = operands.product(), operands.product()
    operands.x.neg_()
    operands.codes.bitwise_xor_(0x35)
    graph.replay()
    out = operands.product()
    assert torch.equal(first, out) and torch.equal(second, out)
    operands.check(factor=1.3 if m >= ROUNDED_FROM else 1.0)
