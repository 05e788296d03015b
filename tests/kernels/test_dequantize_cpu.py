"""dequantize_cpu: every format equals the formula in PyTorch operations to the bit."""

from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.tensor import AffineTensor
from lowbit.tensor.frozen import cpu_values
from lowbit_kernels.runtime import host_compiler
from lowbit_kernels.weight_only import codes_cpu, codes_format, dequantize_cpu
from tests.covering import usually
from tests.schemes import WEIGHT_ONLY, over, specs

pytestmark = pytest.mark.skipif(not host_compiler.compiler(), reason="no C++ compiler")


def by_operations(weight: AffineTensor) -> Tensor:
    """The result of `dequantize` without the kernel."""
    codes = weight._load(weight.spec.padded_shape(weight.shape)[-1])
    parts = (codes, weight.scale_values(), weight.zero_point)
    return weight.spec.dequantize(*parts, weight.shape, weight.dtype)


def check(weight: AffineTensor) -> None:
    assert cpu_values.kernel_of(weight) is not None
    expected, found = by_operations(weight), weight.dequantize()
    same = (found == expected) | (found.isnan() & expected.isnan())
    assert found.dtype is expected.dtype and found.stride() == expected.stride()
    assert same.all() and torch.equal(found.signbit(), expected.signbit())


@pytest.mark.cover("pairs")
@over(WEIGHT_ONLY)
@pytest.mark.parametrize("shape", [(5, 37), (16, 256), (1, 1), (3, 1000), (2, 6, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_schemes(scheme: lowbit.Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = AffineTensor.from_float(torch.randn(shape), scheme).to(dtype)
    if scheme is WEIGHT_ONLY["int5-blocks"] and len(shape) == 3:
        return  # PyTorch operations dequantize blocks of rows of several experts
    check(weight)


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(1, 20), st.integers(1, 80))
def test_specs(spec: lowbit.Spec, rows: int, columns: int) -> None:
    if isinstance(spec.granularity, lowbit.PerBlock) and len(spec.granularity.shape) > 2:
        return
    check(AffineTensor.from_float(torch.randn(rows, columns), spec))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8(dtype: torch.dtype) -> None:
    """Zeros of both signs, subnormal numbers, NaNs and infinities."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    exponent = 4 if dtype is torch.float8_e4m3fn else 5
    kernel = dequantize_cpu.Dequantizer(codes_format.CodesFormat(8, exponent=exponent), 1, 256, 256)
    found = kernel.dequantize(codes_cpu.Parts(codes, torch.ones(1, 1)))
    expected = codes.view(dtype).float()
    known = ~expected.isnan()
    assert torch.equal(found.isnan(), ~known)
    assert torch.equal(found[known].view(torch.int32), expected[known].view(torch.int32))


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_at_every_position(bits: int) -> None:
    spec = lowbit.Spec(lowbit.Int(bits), lowbit.PerGroup(13), "asymmetric")
    weight = AffineTensor.from_float(torch.randn(7, 91), spec)
    weight.codes.random_(0, 256) if bits < 8 else weight.codes.random_(-128, 128)
    check(weight)


@pytest.mark.parametrize(
    "option",
    usually(("-mno-avx512f", "-mno-avx2", "-mno-avx"), "-mno-avx"),
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86 compilers")
def test_other_processors(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = (host_compiler.library, dequantize_cpu._functions, cpu_values._layout)
    monkeypatch.setattr(host_compiler, "NATIVE", ("-march=native", option))
    try:
        for cache in caches:
            cache.cache_clear()
        for scheme in WEIGHT_ONLY.values():
            check(AffineTensor.from_float(torch.randn(9, 75), scheme))
    finally:
        for cache in caches:
            cache.cache_clear()


def test_results_do_not_depend_on_threads() -> None:
    weight = AffineTensor.from_float(torch.randn(4099, 256), lowbit.IntxWeightOnly(3))
    assert weight.numel() >= codes_cpu.GRAIN
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            check(weight)
    finally:
        torch.set_num_threads(before)


def test_memory_that_does_not_fit_is_refused() -> None:
    weight = AffineTensor.from_float(torch.randn(8, 64), lowbit.Int4WeightOnly(32))
    found = cpu_values.kernel_of(weight)
    assert found is not None
    layout, _ = found
    codes, scale = weight.codes, weight.scale
    assert layout.fits(codes_cpu.Parts(codes, scale))
    for wrong in (
        (codes[:4], scale, None),
        (codes.t(), scale, None),
        (codes, scale.double(), None),
        (codes, scale.bfloat16(), None),
        (codes, scale[:, :1], None),
        (codes, scale, codes),
    ):
        assert not layout.fits(codes_cpu.Parts(*wrong))
