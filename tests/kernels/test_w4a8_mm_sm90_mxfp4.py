"""float8 tokens times MXFP4 on the units for float8: ranges of exponents, several passes, and the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit_kernels.composed import dynamic_linear
from lowbit_kernels.matmul import w4a8_mm_sm90
from lowbit_kernels.matmul.w4a8_mm_sm90 import W4A8Division, W4A8Product
from lowbit_kernels.quantize import quantize_rows_sm90
from lowbit_kernels.weight_only.codes_format import E2M1
from lowbit_kernels.weight_only.weight_operands import WeightOperands
from tests.kernels import emulator, w4a8_emulator
from tests.kernels.compiled_on_cpu import COMPILER

BOUND = 2e-3
LARGE, SMALL, SPLIT = W4A8Division(128), W4A8Division(64), W4A8Division(64, split=2)
SHAPES = [
    (5, 140, 256, torch.bfloat16, LARGE),
    # groups that are not a multiple of four, two tiles of tokens
    (130, 72, 608, torch.float16, LARGE),
    (70, 300, 160, torch.bfloat16, SMALL),
    (3, 300, 1056, torch.bfloat16, LARGE),  # more tiles than clusters
    (40, 131, 1024, torch.bfloat16, SPLIT),
]


def case_of(m: int, n: int, k: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Exponents that e4m3 holds beside each other, one scale a row."""
    generator = torch.Generator().manual_seed(m + n + k)
    normal = [torch.randn(s, generator=generator).to(dtype) for s in ((m, k), (n,), (m, n))]
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    groups = torch.randint(0, 15, (n, k // 32), dtype=torch.uint8, generator=generator)
    base = torch.randint(100, 120, (n, 1), dtype=torch.uint8, generator=generator)
    parts = {"x": normal[0], "codes": codes, "scale": groups + base}
    parts |= {"bias": normal[1], "residual": normal[2]}
    return {name: part.to(device) for name, part in parts.items()}


def product_of(case: dict[str, Tensor], division: W4A8Division | None) -> Tensor:
    x, codes, scale, bias, residual = case.values()
    q, token_scale, ranges = quantize_rows_sm90.turned_codes(x, (codes, scale))
    tensors = (q[:, : x.shape[1]], codes, scale, None, bias, residual, token_scale)
    planned = WeightOperands.of(*tensors, group_size=32, out=x.dtype, table=E2M1)
    assert w4a8_mm_sm90.takes(planned)
    found = (q, codes, scale, ranges, bias, residual, token_scale, None)
    return W4A8Product(planned, division)(found)


def emulated(case: dict[str, Tensor], division: W4A8Division | None = None) -> Tensor:
    with emulator.rows_quantization(), w4a8_emulator.emulated():
        return product_of(case, division)


def assert_close(out: Tensor, case: dict[str, Tensor]) -> None:
    expected = dynamic_linear.reference(*(p.cpu() for p in case.values()), group_size=32)
    out, expected = out.cpu().double(), expected.double()
    assert (out - expected).norm() <= 2 * BOUND * expected.norm()  # the residual is added last


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "division"),
    [pytest.param(*SHAPES[0], marks=pytest.mark.exhaustive), *SHAPES[1:]],
)
def test_emulated(m: int, n: int, k: int, dtype: torch.dtype, division: W4A8Division) -> None:
    case = case_of(m, n, k, dtype)
    assert_close(emulated(case, division), case)


@pytest.mark.skipif(not COMPILER, reason="no g++")
def test_rows_that_span_more_octaves_take_more_passes() -> None:
    case = case_of(4, 150, 1024, torch.bfloat16)
    case["bias"].zero_(), case["residual"].zero_()
    case["x"][:] = 0
    case["x"][0, :32], case["x"][1, 992:], case["x"][2] = 1.0, 1.0, 1.0
    octaves = torch.arange(32) * 2
    case["scale"][100:] = (octaves + 60).to(torch.uint8)
    expected = dynamic_linear.reference(*case.values(), group_size=32)
    with emulator.rows_quantization():
        ranges = quantize_rows_sm90.turned_codes(case["x"], (case["codes"], case["scale"])).ranges
    assert ranges is not None
    assert ranges[:3].tolist() == [1, 1, 1] and ranges[3:5].tolist() == [5, 5]
    assert torch.equal(ranges[8:], case["scale"].amax(1))
    for division in (LARGE, SPLIT):
        out = emulated(case, division)
        torch.testing.assert_close(out, expected, rtol=2**-8, atol=0)


@pytest.mark.skipif(not COMPILER, reason="no g++")
def test_zeros_and_nan_take_no_pass() -> None:
    case = case_of(4, 150, 1024, torch.bfloat16)
    case["codes"][3, 16:32] = 0x80
    case["scale"][3, 1], case["scale"][40, 2] = 0, 255
    with emulator.rows_quantization():
        ranges = quantize_rows_sm90.turned_codes(case["x"], (case["codes"], case["scale"])).ranges
    assert ranges is not None and ranges[:5].tolist() == [1] * 5
    out = emulated(case)
    assert out[:, 40].isnan().all() and out.isnan().sum() == 4


@pytest.mark.skipif(not COMPILER, reason="no g++")
def test_nan_of_a_token_stays_with_it() -> None:
    case = case_of(5, 40, 256, torch.bfloat16)
    clean = emulated(case)
    case["x"][1, 3], case["x"][2, 7] = float("nan"), float("inf")
    out = emulated(case)
    assert out[1:3].isnan().all() and torch.equal(out[[0, 3, 4]], clean[[0, 3, 4]])


def test_other_groups_and_scales_are_declined() -> None:
    case = case_of(4, 16, 128, torch.bfloat16)
    q, token_scale = torch.zeros(4, 128).to(torch.float8_e4m3fn), torch.ones(4)
    for scale, group in ((case["scale"][:, ::2], 64), (torch.ones(16, 4), 32)):
        tensors = (q, case["codes"], scale.contiguous(), None, None, None, token_scale)
        planned = WeightOperands.of(*tensors, group_size=group, out=torch.bfloat16, table=E2M1)
        assert not w4a8_mm_sm90.takes(planned)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "division"),
    [
        *SHAPES,
        (1000, 4096, 4096, torch.bfloat16, None),
        (257, 1027, 14336, torch.float16, None),
        (64, 4096, 14336, torch.bfloat16, None),
    ],
)
def test_cuda(m: int, n: int, k: int, dtype: torch.dtype, division: W4A8Division | None) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    case = case_of(m, n, k, dtype, "cuda")
    assert_close(product_of(case, division), case)
