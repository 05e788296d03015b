"""The large-batch kernel on every format: which it takes, its tables, emulated on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.formats import FORMATS, Format
from lowbit.numerics.lookup_table import E2M1, NF4
from lowbit_kernels.weight_only import weight_mm_large_batch_sm90
from lowbit_kernels.weight_only.codes_format import dequantized
from lowbit_kernels.weight_only.weight_lookup_sm90 import ROUNDED_FROM, table_of, unpacking_of
from lowbit_kernels.weight_only.weight_mm_large_batch_sm90 import (
    PAIRED,
    SMALL,
    WIDE,
    LargeBatchDivision,
    LargeBatchProduct,
    Tile,
    _chunks,
    stages,
    takes,
)
from lowbit_kernels.weight_only.weight_operands import WeightOperands
from tests.kernels import sm90_emulator
from tests.kernels.compiled_on_cpu import COMPILER

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUPED = Format("float8-grouped", 64, codes=torch.float8_e4m3fn)
BY_NAME = {format.name: format for format in (*FORMATS, GROUPED)}
DECLINED = ("float8_e5m2",)


class Product:
    """Random operands of a format."""

    def __init__(self, format: Format, m: int, n: int, k: int, *, dtype=BF16, device="cuda"):
        self.weight = format.weight(n, k, device=device)
        self.x = torch.randn(m, k, device=device).to(dtype)
        self.bias: torch.Tensor | None = None

    def operands(self) -> WeightOperands:
        kinds = {name: self.weight[name] for name in ("group_size", "bits", "table")}
        return WeightOperands.of(*self.arguments(), **kinds)

    def arguments(self) -> tuple:
        codes, scale, zero, global_scale = (
            self.weight[name] for name in ("codes", "scale", "zero_point", "global_scale")
        )
        return (self.x, codes, scale, zero, self.bias, None, None, global_scale)

    def exact(self) -> torch.Tensor:
        own = dict(self.weight)
        group, global_scale = own.pop("group_size"), own.pop("global_scale")
        parts = (own["codes"], own["scale"], own["zero_point"], group, self.x.shape[1])
        weight = dequantized(*parts, torch.float64, global_scale, own["bits"], own["table"])
        out = self.x.double() @ weight.T
        return out if self.bias is None else out + self.bias.double()

    def run(self, chosen: LargeBatchDivision | None = None) -> torch.Tensor:
        if chosen is not None:
            return LargeBatchProduct(self.operands(), chosen)(self.arguments())
        product = weight_mm_large_batch_sm90.product(self.operands())
        assert product is not None
        return product(self.arguments())

    def error(self, chosen: LargeBatchDivision | None = None) -> float:
        out, exact = self.run(chosen).double(), self.exact()
        assert out.shape == exact.shape
        return float((out - exact).norm() / exact.norm())


def divided(
    product: Product, *tile: int, beside=1, split=1, clusters=1, rounded=None
) -> LargeBatchDivision:
    own = unpacking_of(product.operands())
    assert own is not None
    shape = Tile(*tile)
    rounded = own.rounds(0) if rounded is None else rounded
    ((chunk, joined), *_) = _chunks(shape, own, product.x.shape[1], rounded)
    depth = stages(*tile, split, own, chunk // joined) // joined * joined
    if shape.tokens < 128:  # more chunks than stages
        depth = min(depth, 2 * max(shape.turns, joined) + (shape.turns == joined == 1))
    plan = (*tile, beside, split, rounded, chunk, depth, clusters)
    return LargeBatchDivision(*plan, joined=joined)


# ---- formats and tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_formats_that_are_taken(format: Format) -> None:
    def fits(k: int = 256, dtype: torch.dtype = BF16) -> bool:
        return takes(Product(format, 20, 16, k, dtype=dtype, device="cpu").operands())

    assert fits() == (format.name not in DECLINED)
    needs_bf16 = format.name in ("mxfp4", "mxfp8", "nvfp4") or format.name.endswith("value")
    assert fits(dtype=FP16) == (format.name not in DECLINED and not needs_bf16)


@pytest.mark.parametrize(
    ("format", "rounding"),
    [
        (Format("", 32, 3), "free"),
        (Format("", 32, 2, zero_point=torch.int8), "free"),
        (Format("", 32, 3, zero_point=torch.int8), "large"),
        (Format("", 32, 2, (-1.5, -0.5, 0.5, 1.5)), "free"),
        (Format("", 32, 4, E2M1.values), "free"),
        (Format("", 32, 3, scale=FP32), "large"),
        (Format("", 32, 4, NF4.values), "large"),
        (Format("", 32, 4, E2M1.values, scale=torch.uint8), "always"),
        (Format("", 32, 2, zero_point=BF16), "always"),
        (GROUPED, "large"),
        (Format("", 32, codes=torch.float8_e4m3fn, scale=torch.uint8), "always"),
    ],
    ids=str,
)
def test_weights_are_rounded_where_that_costs_little(format: Format, rounding: str) -> None:
    own = unpacking_of(Product(format, 20, 16, 256, device="cpu").operands())
    assert own is not None and own.rounding == rounding


@pytest.mark.parametrize(
    ("format", "codes"),
    [
        (Format("", 128, 3), "STREAM"),
        (Format("", 128, 2, zero_point=torch.uint8), "STREAM"),
        (Format("", 64, 3), "LOOKUP"),
        (Format("", 128, 3, scale=FP32), "LOOKUP"),
        (Format("", 32, 3, zero_point=BF16), "STREAM"),
        (Format("", 128, 4, zero_point=BF16), "LOOKUP"),
    ],
    ids=str,
)
def test_few_bits_are_unpacked_by_arithmetic(format: Format, codes: str) -> None:
    """Those whose scales fold into a factor once for many codes, and those with zero points that are values; others are
    looked up."""
    own = unpacking_of(Product(format, 20, 16, 256, device="cpu").operands())
    assert own is not None and (own.codes, bool(own.table)) == (codes, codes == "LOOKUP")


def test_values_that_the_dtype_holds_keep_their_bits() -> None:
    for dtype in (BF16, FP16):
        bits, unit = table_of(E2M1.values, dtype, True)
        held = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype)
        assert torch.equal(held.double() / unit, torch.tensor(E2M1.values, dtype=torch.double))


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_numbers_without_a_factor_stay(value: float) -> None:
    bits, unit = table_of((value,) * 4, torch.float16, True)
    held = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert unit == 1.0 and torch.equal(
        held.nan_to_num(7), torch.full((4,), value).half().nan_to_num(7)
    )


def test_a_factor_brings_a_table_close_to_bfloat16() -> None:
    bits, unit = table_of(NF4.values, BF16, True)
    held = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(BF16).double() / unit
    exact = torch.tensor(NF4.values, dtype=torch.double)
    plain = (exact.to(BF16).double() - exact).norm() / exact.norm()
    assert (held - exact).norm() / exact.norm() < 0.6 * plain


# ---- emulated --------------------------------------------------------------------------------------------------------

EMULATED = [
    ("int1", (32, 64, 4), {}),
    ("int2", (16, 128, 4), {"split": 2}),
    ("int3", (32, 128, 2), {"beside": 2, "clusters": 2}),
    ("int3", (16, 64, 4), {"rounded": False}),
    ("int3-zero", (16, 128, 2), {}),
    ("uint2", (32, 64, 4), {}),
    ("uint3", (16, 64, 4), {"rounded": False}),
    ("uint4", (16, 64, 4), {"rounded": False}),
    ("int1-value", (16, 64, 4), {}),
    ("int2-value", (32, 128, 2), {}),
    ("int4-value", (16, 256, 4), {}),
    ("uint8", (16, 64, 4), {"rounded": False}),
    ("int5", (16, 128, 4), {"rounded": False}),
    ("int6-zero", (32, 64, 4), {"rounded": False, "split": 2}),
    ("int7", (64, 128, 2), {"rounded": False, "beside": 2}),
    ("uint5", (128, 128, 2), {"rounded": True}),
    ("float8_e4m3fn", (16, 128, 4), {"rounded": False}),
    ("nf4", (16, 128, 4), {"rounded": False}),
    ("nf4", (16, 128, 2), {"rounded": True}),
    ("mxfp4", (32, 64, 4), {}),
    ("mxfp4", (16, 224, 4), {"beside": 2}),
    ("mxfp4", (256, 128, 2), {"beside": 2, "clusters": 2}),  # two blocks share a tile
    ("int3", (64, 256, 2), {}),
    ("nvfp4", (128, 128, 2), {"beside": 2, "clusters": 2}),
    ("nf4", (64, 128, 2), {"rounded": False, "beside": 2}),
    ("int3", (128, 128, 2), {}),
    ("nvfp4", (16, 128, 2), {}),
    ("nvfp4", (16, 256, 4), {"split": 2}),
    ("table3", (16, 128, 2), {"rounded": False}),
    ("mxfp8", (16, 64, 4), {"split": 2}),
    ("mxfp8", (256, 128, 2), {"beside": 2, "clusters": 2}),
    ("mxfp8", (64, 128, 2), {}),
    ("float8-grouped", (32, 128, 2), {}),
    ("float8-grouped", (16, 128, 4), {"rounded": False}),
    ("int3", (16, 64, 4), {"split": 2}),
    ("int2", (64, 128, 2), {"rounded": False}),
    ("uint3", (128, 128, 2), {}),
    # rows of a chunk that end within 16 bytes
    ("int5", (256, 128, 2), {"rounded": True, "split": 2}),
    ("int7", (256, 128, 2), {"rounded": True, "beside": 2}),
    ("int3-value", (256, 128, 2), {}),
    # chunks of four stages
    ("nf4", (256, 128, 2), {"rounded": True}),
    ("uint8", (256, 128, 2), {"rounded": True}),
    ("mxfp4", (192, 128, 2), {}),
    ("int5", (160, 192, 3), {"rounded": True}),
    # of two stages
    ("nvfp4", (256, 128, 2), {"split": 2, "clusters": 2}),
]


@pytest.mark.cover(
    "values",
    name=lambda name: BY_NAME[name].axes,
    tile=lambda tile: tile,
    options=lambda o: tuple(o.get(name) for name in ("rounded", "beside", "split", "clusters")),
)
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(("name", "tile", "options"), EMULATED, ids=str)
def test_emulated(name: str, tile: tuple[int, int, int], options: dict) -> None:
    """The kernel's arithmetic, indices and barriers, run in fibers on the CPU."""
    with sm90_emulator.emulated():
        product = Product(BY_NAME[name], 20, 150, 768, device="cpu")
        product.bias = torch.randn(150).to(BF16)
        assert product.error(divided(product, *tile, **options)) < 3e-3


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("group", [256, 384])
def test_emulated_with_groups_of_several_chunks(group: int) -> None:
    """Scales of 256 K are read together where that divides the group."""
    with sm90_emulator.emulated():
        product = Product(Format("", group, 4, NF4.values), 20, 150, 768, device="cpu")
        assert product.error(divided(product, 256, 128, 2, rounded=True)) < 3e-3


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["int3-zero", "int5", "int6-zero", "int7"])
def test_emulated_in_float16(name: str) -> None:
    with sm90_emulator.emulated():
        product = Product(BY_NAME[name], 20, 70, 384, dtype=FP16, device="cpu")
        assert product.error(divided(product, 16, 64, 4, rounded=False)) < 5e-4


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("name", "part", "rounded"),
    [
        ("mxfp4", "scale", True),
        ("nvfp4", "scale", True),
        ("float8_e4m3fn", "codes", False),
        ("mxfp8", "codes", True),
        ("mxfp8", "scale", True),
        ("float8-grouped", "codes", True),
        ("float8-grouped", "codes", False),
        ("float8-grouped", "scale", False),
    ],
)
def test_emulated_nan(name: str, part: str, rounded: bool) -> None:
    """A scale or a code that is NaN makes its row's results NaN, and no others."""
    with sm90_emulator.emulated():
        product = Product(BY_NAME[name], 20, 70, 384, device="cpu")
        chosen = divided(product, 16, 64, 4, rounded=rounded)
        clean = product.run(chosen)
        plant_nan(product.weight[part])
        found = product.run(chosen)
    assert found[:, 9].isnan().all()
    found[:, 9] = clean[:, 9]
    assert torch.equal(found, clean)


def plant_nan(part: torch.Tensor) -> None:
    """Makes one code or scale of row 9 NaN."""
    if part.dtype.itemsize == 1:
        part.view(torch.uint8)[9, 3] = 255 if part.dtype == torch.uint8 else 127
    else:
        part[9, 3] = float("nan")


def each_code_and_scale(device: str) -> None:
    """The product of MXFP8 with the identity is the weight, for each code and for scales of 2^-127 to 2^118. On a GPU
    results below bfloat16's smallest normal number are 0."""
    product = Product(BY_NAME["mxfp8"], 256, 246, 512, device=device)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes[codes & 127 == 127] = 0
    product.weight["codes"] = codes.view(torch.float8_e4m3fn).repeat(246, 2)
    scales = torch.arange(246, dtype=torch.uint8, device=device)
    product.weight["scale"] = scales[:, None].repeat(1, 16)
    product.x = torch.eye(256, 512, device=device).to(BF16)
    own = unpacking_of(product.operands())
    assert own is not None and own.codes == "E4M3"
    found = product.run(divided(product, 16, 64, 4) if device == "cpu" else None)
    expected = product.exact().float().to(BF16)
    if device == "cuda":
        expected[expected.abs() < torch.finfo(BF16).smallest_normal] = 0
        found[found.abs() < torch.finfo(BF16).smallest_normal] = 0
    wrong = (found != expected).nonzero()
    assert len(wrong) == 0, [(int(s), int(c), found[c, s], expected[c, s]) for c, s in wrong[:5]]


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_emulated_codes_and_scales_of_mxfp8() -> None:
    with sm90_emulator.emulated():
        each_code_and_scale("cpu")


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def limit(format: Format, m: int) -> float:
    """The bound of the error. The module says where weights are rounded."""
    if format.name in ("mxfp4", "mxfp8", "nvfp4"):
        return 2e-3
    return 2.9e-3 if format.name.endswith("value") or m >= ROUNDED_FROM else 2.1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("m", [50, 300])
@pytest.mark.parametrize("format", [f for f in FORMATS if f.name not in DECLINED], ids=str)
def test_every_format(format: Format, m: int) -> None:
    product = Product(format, m, 272, 1408)
    product.bias = torch.randn(272, device="cuda").to(BF16)
    assert product.error() < limit(format, m)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nf4", "int3-zero", "table3", "int5", "int6-zero", "int7"])
def test_float16(name: str) -> None:
    assert Product(BY_NAME[name], 100, 300, 1024, dtype=FP16).error() < 5e-4


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*SMALL, *PAIRED, *WIDE[::3]], ids=str)
@pytest.mark.parametrize("name", ["int3", "nvfp4"])
def test_every_tile(name: str, tile: Tile) -> None:
    """Tiles that clusters share or split, with more tiles than clusters."""
    product = Product(BY_NAME[name], 300, 520, 2048)
    own = unpacking_of(product.operands())
    if own is None or not weight_mm_large_batch_sm90._holds(tile, own, False):
        pytest.skip("registers don't hold its sums")
    beside = 1 if tile.lanes > 1 else 2
    split = 2 if tile.lanes > 1 else 1
    chosen = divided(product, *tile, beside=beside, split=split, clusters=4)
    assert product.error(chosen) < 2.1e-3
    assert torch.equal(product.run(chosen), product.run(chosen))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [320, 2368])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4"])
def test_rows_that_end_within_128(name: str, k: int) -> None:
    assert Product(BY_NAME[name], 100, 300, k).error() < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("m", [100, 300])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, "scale") for name in ("mxfp4", "mxfp8", "nvfp4", "int3", "float8-grouped")),
        *((name, "codes") for name in ("float8_e4m3fn", "mxfp8", "float8-grouped")),
    ],
)
def test_nan(name: str, part: str, m: int) -> None:
    product = Product(BY_NAME[name], m, 300, 1024)
    plant_nan(product.weight[part])
    out = product.run()
    assert out[:, 9].isnan().all() and out.isnan().sum() == m


@pytest.mark.gpu
def test_codes_and_scales_of_mxfp8() -> None:
    each_code_and_scale("cuda")
