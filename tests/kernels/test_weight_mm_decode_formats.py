"""The decode kernel on weights of every format that it takes, in an emulator and on a GPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.cases.formats import FORMATS, Format
from lowbit_kernels.quantize import quantize_rowcol
from lowbit_kernels.runtime import launches
from lowbit_kernels.weight_only import weight_mm_decode_sm90
from lowbit_kernels.weight_only.codes_format import dequantized
from lowbit_kernels.weight_only.weight_lookup_sm90 import table_of
from lowbit_kernels.weight_only.weight_mm_decode_sm90 import (
    DecodeProduct,
    planned,
    scaling_of,
    takes,
)
from lowbit_kernels.weight_only.weight_operands import WeightOperands
from tests.kernels import decode_emulator
from tests.kernels.compiled_on_cpu import COMPILER

NAMED = {format.name: format for format in FORMATS}
PRESETS = ["int2-value", "int3", "float8_e4m3fn", "nf4", "mxfp4", "nvfp4"]
TAKEN = [format for format in FORMATS if format.name != "float8_e5m2"]
NUMBERS = {torch.bfloat16: 8e-4, torch.float16: 3e-4}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
on_cpu = pytest.mark.skipif(not COMPILER, reason="no g++")


class Product:
    """A random product with bias and residual, and its value in float64."""

    def __init__(
        self,
        format: Format,
        m: int,
        n: int,
        k: int,
        group: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        rounds: torch.dtype | None = None,
    ) -> None:
        self.rounds = rounds
        torch.manual_seed(m * 7 + n * 3 + k)
        weight = format.weight(n, k, group)
        self.group_size, self.bits = weight.pop("group_size"), weight.pop("bits")
        self.table = tuple(weight.pop("table"))
        self.weight = {name: None if t is None else t.to(device) for name, t in weight.items()}
        self.x = torch.randn(m, k).to(device, dtype)
        self.ends: tuple[Tensor | None, Tensor | None]
        self.ends = torch.randn(n).to(device, dtype), torch.randn(m, n).to(device, dtype)

    @property
    def tensors(self) -> tuple:
        parts = (self.weight[name] for name in ("codes", "scale", "zero_point"))
        return self.x, *parts, *self.ends, None, self.weight["global_scale"]

    @property
    def operands(self) -> WeightOperands:
        format = {"bits": self.bits, "table": self.table}
        sizes = {"group_size": self.group_size, "rounds": self.rounds}
        return WeightOperands.of(*self.tensors, **sizes, **format)

    def exact(self) -> Tensor:
        codes, scale, zero_point, global_scale = self.weight.values()
        parts = (codes, scale, zero_point, self.group_size, self.x.shape[1], torch.float64)
        values = dequantized(*parts, global_scale, self.bits, self.table)
        bias, residual = self.ends
        x = self.x.double()
        if self.rounds is not None:
            q, scale, _, _ = quantize_rowcol.reference(self.x, "e4m3", True, False)
            x = q[:, : x.shape[1]].double() * scale.double()[:, None]
        return x @ values.T + bias.double() + residual.double()

    def check(self, out: Tensor) -> None:
        exact = self.exact()
        assert out.dtype == self.x.dtype and out.shape == exact.shape
        rounding = (exact.to(out.dtype).double() - exact).norm()
        error = (out.double() - exact).norm()
        # the rounding of the result, and that of the numbers of a table
        bound = math.hypot(rounding, NUMBERS[out.dtype] * exact.norm())
        assert error <= bound, f"{error / exact.norm():.2e}, rounding {rounding / exact.norm():.2e}"

    def emulated(self, blocks: int = 2, split: int = 1) -> Tensor:
        assert takes(self.operands)
        chosen = planned(self.operands, blocks, splits=(split,))
        assert chosen is not None
        with decode_emulator.emulated():
            return DecodeProduct(self.operands, chosen)(self.tensors)


ROUNDED = [(1, 1), (1, 2), (3, 2), (16, 1)]


@on_cpu
@pytest.mark.cover("values")
@HALVES
@pytest.mark.parametrize(("m", "split"), ROUNDED)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_tokens_are_rounded_to_float8(format: str, m: int, split: int, dtype: torch.dtype) -> None:
    own = Product(NAMED[format], m, 40, 1056, dtype=dtype, rounds=torch.float8_e4m3fn)
    own.check(own.emulated(split=split))


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (3, 1001, 4096), (16, 300, 14336)])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_cuda_tokens_are_rounded_to_float8(
    format: str, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    own = Product(NAMED[format], m, n, k, None, dtype, "cuda", torch.float8_e4m3fn)
    product = weight_mm_decode_sm90.product(own.operands)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    assert product is not None
    own.check(product(own.tensors))


@on_cpu
@pytest.mark.parametrize("m", [2, 5])
@pytest.mark.parametrize("format", ["int2", "int4-value", "uint8", "mxfp4", "float8_e4m3fn"])
def test_tokens_of_very_different_sizes(format: str, m: int) -> None:
    """Each token is scaled by its own power of two; zeros stay zeros, and infinity stays with its token."""
    product = Product(NAMED[format], m, 136, 640)
    product.ends = torch.zeros(136).bfloat16(), torch.zeros(m, 136).bfloat16()
    product.x *= torch.tensor([2.0**-100, 2.0**100, 1, 1, 1])[:m, None]
    product.x[3:4], product.x[4:5, 7] = 0, float("inf")
    out, exact = product.emulated(), product.exact()
    error = (out.double() - exact)[:3].norm(dim=1)
    assert (error <= 2.5e-3 * exact[:3].norm(dim=1)).all()
    assert (out[3:4] == 0).all() and not out[4:5].isfinite().any()


@pytest.mark.cover("values", format=lambda f: f.axes)
@on_cpu
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("format", TAKEN, ids=lambda f: f.name)
def test_emulated(format: Format, m: int) -> None:
    """Five chunks a row, and rows that end within a tile."""
    product = Product(format, m, 40, 640)
    product.check(product.emulated())


@on_cpu
@pytest.mark.parametrize(
    ("name", "n", "teams", "resident"),
    [
        *(("int4", 56, 1, 2), ("int2", 60, 1, 2), ("int3", 200, 2, 1), ("nf4", 60, 2, 1)),
        *(("mxfp4", 60, 2, 1), ("nvfp4", 60, 2, 1)),
    ],
)
def test_emulated_one_token_in_teams_and_beside_the_next_launch(
    name: str, n: int, teams: int, resident: int
) -> None:
    product = Product(NAMED[name], 1, n, 4096)
    chosen = planned(product.operands, 2)
    assert chosen is not None and (chosen.teams, chosen.resident) == (teams, resident)
    assert chosen.looks_up == (product.table == NAMED["mxfp4"].table)
    product.check(product.emulated())


@on_cpu
@pytest.mark.parametrize(
    ("name", "k"), [("int4", 2048), ("mxfp4", 1536), ("nvfp4", 1792), ("nf4", 1792)]
)
def test_emulated_scales_of_parts(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks copy the scales of their slices alone, which begin between multiples of 16 bytes."""
    monkeypatch.setattr(weight_mm_decode_sm90, "FEW_STAGES", 100)
    monkeypatch.setattr(weight_mm_decode_sm90, "plan", weight_mm_decode_sm90.plan.__wrapped__)
    product = Product(NAMED[name], 1, 40, k)
    chosen = planned(product.operands, 2, splits=(4,))
    assert chosen is not None and chosen.scale_pitch > 0
    product.check(product.emulated(split=4))


@on_cpu
def test_emulated_ends_of_the_range_of_nvfp4() -> None:
    product = Product(NAMED["nvfp4"], 1, 16, 256)
    for t in product.ends:
        t.zero_()
    scale = product.weight["scale"].view(torch.uint8)
    scale[:8], scale[8:] = 0x7E, 1  # 448 and 2^-9
    product.check(product.emulated())
    large, small = product.emulated().double()[0].split(8)
    exact = product.exact()[0].split(8)
    for found, wanted in zip((large, small), exact, strict=True):
        assert (found - wanted).norm() <= 4e-3 * wanted.norm()


@on_cpu
@pytest.mark.cover("values")
@HALVES
@pytest.mark.parametrize("m", [1, 2, 3, 9])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("name", ["int3-value", "uint2", "mxfp4", "nvfp4", "nf4"])
def test_emulated_groups(name: str, group: int, m: int, dtype: torch.dtype) -> None:
    product = Product(NAMED[name], m, 24, 1024, group, dtype)
    if not takes(product.operands):
        assert group == 16 and m > 1 and scaling_of(product.operands) is None
        return
    product.check(product.emulated(split=2))


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", ["int2-value", "uint3", "mxfp4", "nvfp4", "float8_e4m3fn"])
@pytest.mark.parametrize("m", [1, 9])
@on_cpu
def test_emulated_nan_stays_in_its_row_and_token(name: str, m: int) -> None:
    product = Product(NAMED[name], m, 20, 256)
    clean = product.emulated()
    scale = product.weight["scale"]
    if scale.dtype == torch.bfloat16:
        scale[3, -1] = math.nan
    else:
        scale.view(torch.uint8)[3, -1] = 255 if scale.dtype == torch.uint8 else 127
    if name == "float8_e4m3fn":
        product.weight["codes"].view(torch.uint8)[7, 250] = 255
    product.x[-1, 100] = math.nan
    out, wanted = product.emulated(), clean.clone()
    wanted[:, 3], wanted[-1] = math.nan, math.nan
    if name == "float8_e4m3fn":
        wanted[:, 7] = math.nan
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


def test_numbers_of_tables() -> None:
    """Those of E2M1 are exact; those of NF4 round better after a division."""
    for dtype in (torch.bfloat16, torch.float16):
        bits, factor = table_of(NAMED["mxfp4"].table, dtype, True)
        found = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype)
        assert (found / factor).tolist() == [*NAMED["mxfp4"].table]
    values = torch.tensor(NAMED["nf4"].table, dtype=torch.float64)
    bits, factor = table_of(NAMED["nf4"].table, torch.bfloat16, True)
    found = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert (found.double() / factor - values).norm() < 7e-4 * values.norm()
    assert (values.bfloat16().double() - values).norm() > 1e-3 * values.norm()


def run(product: Product) -> Tensor:
    planned = weight_mm_decode_sm90.product(product.operands)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"compute capability 9.0, got {torch.cuda.get_device_capability()}")
    assert planned is not None
    return planned(product.tensors)


@pytest.mark.cover("values")
@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("m", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("format", TAKEN, ids=lambda f: f.name)
def test_formats(format: Format, m: int, dtype: torch.dtype) -> None:
    product = Product(format, m, 1041, 1920, dtype=dtype, device="cuda")
    product.check(run(product))


@pytest.mark.cover("pairs")
@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (14336, 4096), (4096, 14336)])
@pytest.mark.parametrize("name", PRESETS)
def test_layers(name: str, n: int, k: int, m: int) -> None:
    product = Product(NAMED[name], m, n, k, device="cuda")
    product.check(out := run(product))
    assert torch.equal(run(product), out)
    error = (out.double() - (exact := product.exact())).norm() / exact.norm()
    assert error <= 2e-3


@pytest.mark.cover("values")
@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 16])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("name", ["int1-value", "int3", "int5", "uint2", "mxfp4", "nvfp4", "nf4"])
def test_groups(name: str, group: int, m: int) -> None:
    product = Product(NAMED[name], m, 333, 2048, group, device="cuda")
    if takes(product.operands):
        product.check(run(product))
    else:
        assert group == 16 and m > 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nf4", "mxfp4", "int2-value"])
def test_the_op_takes_this_kernel_in_graphs(name: str) -> None:
    product = Product(NAMED[name], 3, 256, 1024, device="cuda")
    x, codes, scale, zero_point, *ends, _, global_scale = product.tensors
    last = (product.group_size, global_scale, product.bits, [*product.table])
    arguments = (x, codes, scale, zero_point, *ends, *last)
    op = torch.ops.lowbit.weight_linear
    with launches.counted() as calls:
        product.check(op(*arguments))
    assert calls["weight_linear", "decode"] == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*arguments)
    x.neg_()
    graph.replay()
    product.check(out)
