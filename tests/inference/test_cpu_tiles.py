"""Products on a CPU with weights that are decoded a tile of rows at a time, or in registers: the bits of plain products
in float32, small errors in 16 bits, and no memory for the whole weight."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import qat
from lowbit.linear.frozen import choose_linear, dequantized
from lowbit.tensor import AffineTensor
from lowbit.tensor.frozen import cpu_values
from lowbit_kernels.runtime import host_compiler
from lowbit_kernels.weight_only import dequantize_cpu
from tests.schemes import PER_TOKEN, WEIGHT_ONLY, over, relative_error

needs_compiler = pytest.mark.skipif(not host_compiler.compiler(), reason="no C++ compiler")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of 64 rows, whatever the number of columns, with a kernel and without one."""
    monkeypatch.setattr(dequantize_cpu, "TILE", 1)
    monkeypatch.setattr(dequantized, "_LARGE", 1)
    layouts = cpu_values._layout
    layouts.cache_clear()
    yield
    layouts.cache_clear()


def inputs(k: int) -> Iterator[Tensor]:
    """[..., K] with one token, with many, with none, and with gaps."""
    for leading in ((), (1,), (5,), (17,), (2, 3), (0,)):
        yield torch.randn(*leading, k)
    yield torch.randn(k, 6).t()
    yield torch.randn(2, 6, k)[:, ::2]
    yield torch.randn(3, 2 * k)[:, ::2]


def check_bits(weight: AffineTensor, bias: Tensor | None) -> None:
    values = weight.dequantize()
    for x in inputs(weight.shape[1]):
        assert torch.equal(F.linear(x, weight, bias), F.linear(x, values, bias)), x.shape


@pytest.mark.cover("values")
@pytest.mark.usefixtures("small_tiles")
@over(WEIGHT_ONLY)
@pytest.mark.parametrize("shape", [(130, 75), (191, 64), (64, 1), (7, 33)], ids=str)
def test_tiles_have_the_bits_of_a_plain_product(scheme: lb.Scheme, shape: tuple[int, int]) -> None:
    weight = AffineTensor.from_float(torch.randn(shape), scheme)
    check_bits(weight, None)
    check_bits(weight, torch.randn(shape[0]))


@pytest.mark.usefixtures("small_tiles")
@over(WEIGHT_ONLY)
def test_tiles_of_pytorch_operations(scheme: lb.Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_values, "_layout", lambda spec, shape: None)
    weight = AffineTensor.from_float(torch.randn(130, 75), scheme)
    check_bits(weight, torch.randn(130))
    leaf = torch.randn(3, 75, requires_grad=True)
    dequantized.plain_linear(leaf, weight, None).sum().backward()
    assert torch.allclose(leaf.grad[0], weight.dequantize().sum(0), atol=1e-4)
    x, half = torch.randn(3, 75).bfloat16(), weight.to(torch.bfloat16)
    expected = x.double() @ half.dequantize().double().t()
    assert relative_error(F.linear(x, half), expected) < 5e-3


# More columns than rows and fewer, odd ones, and rows whose last tile would be of a few rows.
LARGE = [(1100, 512), (5000, 301), (515, 2048), (129, 8192), (2113, 256)]


@needs_compiler
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_of_real_size_have_the_bits_of_a_plain_product(
    shape: tuple[int, int], threads: int
) -> None:
    weight = AffineTensor.from_float(torch.randn(shape), lb.Int8WeightOnly())
    layout, parts = cpu_values.kernel_of(weight)  # type: ignore[misc]
    before, bias, values = torch.get_num_threads(), torch.randn(shape[0]), weight.dequantize()
    torch.set_num_threads(threads)
    try:
        assert not layout.is_small and (threads > 1 or len([*layout.tiles(parts)]) > 1)
        for m in (1, 2, 3, 4, 8, 9, 16, 31, 65):
            x = torch.randn(m, shape[1])
            for added in (None, bias):
                found, expected = F.linear(x, weight, added), F.linear(x, values, added)
                if (
                    m == 1 and threads > 1
                ):  # MKL divides all rows among threads, not those of a tile
                    assert relative_error(found, expected) < 1e-6, m
                else:
                    assert torch.equal(found, expected), m
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("small_tiles")
@over({**WEIGHT_ONLY, **PER_TOKEN})
def test_the_prepared_model_has_the_bits_of_the_converted_one(scheme: lb.Scheme) -> None:
    model, x = nn.Sequential(nn.Linear(64, 200), nn.GELU(), nn.Linear(200, 70)), torch.randn(5, 64)
    qat.prepare_(model, scheme)
    prepared = model(x)
    qat.convert_(model)
    assert torch.equal(model(x), prepared)


# ---- 16 bits -------------------------------------------------------------------------------------------------------


@pytest.mark.cover("values")
@over(WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_in_16_bits(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    """In words, with groups of one to many; code by code; as tiles."""
    for n, k in ((9, 256), (70, 45), (1, 1)):
        weight = AffineTensor.from_float(torch.randn(n, k), scheme).to(dtype)
        bias, values = torch.randn(n).to(dtype), weight._with(dtype=torch.float32).dequantize()
        for x in inputs(k):
            x = x.to(dtype)
            assert "linear" in choose_linear(x, weight, bias).name
            y = F.linear(x, weight, bias)
            expected = F.linear(x.double(), values.double(), bias.double())
            assert y.dtype is dtype and y.shape == expected.shape
            if y.numel():
                bound = 5e-3 if dtype is torch.bfloat16 else 1e-3
                assert relative_error(y, expected) < bound, (n, k, x.shape)


@over(WEIGHT_ONLY)
@torch.no_grad()
def test_products_without_gradients(scheme: lb.Scheme) -> None:
    """Few tokens and many, in words and code by code, columns in the padding; NaN stays in its token."""
    for n, k in ((65, 128), (24, 100), (33, 512), (7, 33)):
        weight = AffineTensor.from_float(torch.randn(n, k), scheme)
        values, bias = weight.dequantize().double(), torch.randn(n)
        for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 3e-3)):
            for m in (1, 3, 4, 7, 17):
                x = torch.randn(m, k).to(dtype)
                expected = F.linear(x.double(), values, bias.to(dtype).double())
                y = F.linear(x, weight.to(dtype), bias.to(dtype))
                assert y.dtype is dtype and relative_error(y, expected) < bound, (n, k, m, dtype)
                x[0, k // 2] = torch.nan
                y = F.linear(x, weight.to(dtype))
                assert y[0].isnan().all() and y[1:].isfinite().all()


@over(WEIGHT_ONLY)
def test_nan_and_infinite_inputs_pass(scheme: lb.Scheme) -> None:
    weight = AffineTensor.from_float(torch.randn(6, 128), scheme)
    for dtype in (torch.float32, torch.bfloat16):
        for m in (1, 5, 17):
            x = torch.randn(m, 128, dtype=dtype)
            x[0, 3] = torch.nan
            y = F.linear(x, weight.to(dtype))
            assert y[0].isnan().all() and y[1:].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("flush", [False, True], ids=["", "flush denormal"])
@pytest.mark.parametrize("columns", [64, 67], ids=["words", "codes"])
def test_every_float8_in_a_product(format: torch.dtype, flush: bool, columns: int) -> None:
    """Subnormal numbers, NaNs and infinities, one in each row."""
    scheme = lb.Scheme(lb.Spec(lb.Float8(format), lb.PerRow()))
    weight = AffineTensor.from_float(torch.ones(256, columns), scheme)
    every = torch.arange(256, dtype=torch.uint8)
    codes = weight.codes.view(torch.uint8).zero_()
    codes[every.long(), every.long() % columns] = every
    half, expected = (
        weight.to(torch.bfloat16),
        every.view(format).double() * weight.scale[0].double(),
    )
    torch.set_flush_denormal(flush)
    try:
        for m in (1, 2, 5, 17):
            for w, dtype in ((half, torch.bfloat16), (weight, torch.float32)):
                y = F.linear(torch.ones(m, columns, dtype=dtype), w).double()
                assert torch.allclose(y, expected.expand(m, 256), 4e-3, 0, equal_nan=True), (
                    m,
                    dtype,
                )
    finally:
        torch.set_flush_denormal(False)


# ---- memory --------------------------------------------------------------------------------------------------------

BY_ROWS = {n: s for n, s in WEIGHT_ONLY.items() if not s.weight.shares_rows}


@needs_compiler
@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="counts page faults of a thread")
@over({n: s for n, s in BY_ROWS.items() if s.weight.scales is None or not s.weight.scales.shared})
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_product_takes_no_fresh_pages(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    """34 MB in float32: the C library returns memory of that size to the system."""
    part = AffineTensor.from_float(torch.randn(64, 2944), scheme).to(dtype)
    weight = torch.cat([part] * 46)
    x = torch.randn(1, 2944, dtype=dtype)
    for _ in range(2):
        F.linear(x, weight)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    F.linear(x, weight)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 1000
