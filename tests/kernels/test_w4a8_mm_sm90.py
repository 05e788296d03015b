"""int8 tokens times a weight of 4 bits on the units for int8: which operands fit, and the product against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit_kernels.matmul import w4a8_mm_sm90
from lowbit_kernels.matmul.w4a8_mm_sm90 import W4A8Division, W4A8Product
from lowbit_kernels.quantize import quantize_rows_sm90
from lowbit_kernels.weight_only.weight_operands import WeightOperands, addresses
from tests.kernels import emulator, w4a8_emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.test_weight_mm_decode_sm90_gpu import BOUND, exact, operands, tensors_of

LARGE, SMALL, SPLIT, MIXED, LANES, BOTH, LONG, LONG_MIXED = DIVISIONS = (
    W4A8Division(128),
    W4A8Division(64),
    W4A8Division(64, split=2),
    W4A8Division(112, last_tokens=48, full_rows=1),
    W4A8Division(64, lanes=2),
    W4A8Division(64, split=2, lanes=2),
    W4A8Division(128, period=8),
    W4A8Division(112, last_tokens=48, full_rows=1, period=8),
)
SHAPES = [
    (5, 140, 256, 128, False, torch.bfloat16, LARGE),
    (130, 72, 384, 128, True, torch.float16, LARGE),  # an odd number of chunks, two tiles of tokens
    (70, 300, 144, 0, True, torch.bfloat16, SMALL),  # one scale a row
    # more tiles than clusters, a k that ends within a chunk
    (3, 520, 1008, 256, False, torch.bfloat16, LARGE),
    (40, 131, 256, 128, True, torch.bfloat16, SPLIT),  # fewer chunks than a period
    (70, 140, 1216, 64, True, torch.float16, SMALL),  # groups within a chunk
    (100, 200, 1216, 64, False, torch.bfloat16, SPLIT),
    (130, 600, 512, 128, False, torch.bfloat16, MIXED),
    (70, 200, 3584, 128, False, torch.bfloat16, LANES),
    (130, 130, 2048, 128, True, torch.float16, BOTH),
    (12, 40, 4608, 128, False, torch.bfloat16, LARGE),  # sums begin anew within a tile
    (70, 300, 2176, 128, True, torch.bfloat16, LONG),
    (130, 600, 1216, 64, False, torch.float16, LONG_MIXED),
]


def case_of(
    m: int, n: int, k: int, group: int, zero: bool, dtype: torch.dtype, device: str
) -> dict:
    case = operands(m, n, k, 4, group, dtype, zero=zero, extras=True, device=device)
    return {**case, "rounds": torch.int8}


def product_of(
    case: dict, codes: Tensor, token_scale: Tensor, division: W4A8Division | None
) -> Tensor:
    """The product of x's codes, which the rounding kernel wrote."""
    tensors = (codes, *tensors_of(case)[1:6], token_scale)
    given = (codes[:, : case["x"].shape[1]], *tensors[1:])
    sizes = {"group_size": case["group_size"], "out": case["x"].dtype}
    planned = WeightOperands.of(*given, **sizes)
    assert w4a8_mm_sm90.takes(planned)
    return W4A8Product(planned, division)((*tensors, None))


def emulated(case: dict, division: W4A8Division | None = None) -> Tensor:
    with emulator.rows_quantization():
        codes, scale, _ = quantize_rows_sm90.turned_codes(case["x"])
    with w4a8_emulator.emulated():
        return product_of(case, codes, scale, division)


def assert_close(out: Tensor, case: dict) -> None:
    expected = exact(**case)
    assert out.shape == expected.shape and out.is_contiguous()
    # the residual is added after a rounding
    assert (out.double() - expected).norm() <= 2 * BOUND[out.dtype] * expected.norm()


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.parametrize(
    ("m", "n", "k", "group", "zero", "dtype", "division"),
    [
        *(
            pytest.param(*s, marks=pytest.mark.exhaustive if i in (0, 6) else ())
            for i, s in enumerate(SHAPES)
        ),
    ],
)
def test_emulated(
    m: int,
    n: int,
    k: int,
    group: int,
    zero: bool,
    dtype: torch.dtype,
    division: W4A8Division,
) -> None:
    case = case_of(m, n, k, group, zero, dtype, "cpu")
    assert_close(emulated(case, division), case)


@pytest.mark.skipif(not COMPILER, reason="no g++")
def test_emulated_nan_stays_with_its_token_and_row() -> None:
    case = case_of(5, 40, 256, 128, True, torch.bfloat16, "cpu")
    clean = emulated(case)
    case["x"][1, 3], case["x"][2, 7], case["scale"][9, 1] = float("nan"), float("inf"), float("nan")
    expected, out = clean.clone(), emulated(case)
    expected[1], expected[2], expected[:, 9] = float("nan"), float("nan"), float("nan")
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("division", [None, LONG])
def test_sums_of_large_codes_are_exact(division: W4A8Division | None, sign: float) -> None:
    """Codes at the ends of their ranges make tokens loud: sums of four chunks are the largest, of either sign."""
    case = case_of(2, 16, 1024, 0, False, torch.float16, "cpu")
    case["x"] = torch.full((2, 1024), sign).half()
    case["codes"] = torch.zeros(16, 512, dtype=torch.uint8)
    case["scale"], case["bias"], case["residual"] = torch.full((16, 1), 2.0**-9).half(), None, None
    assert torch.equal(
        emulated(case, division), torch.full((2, 16), -sign * 1024 * 8 * 2.0**-9).half()
    )


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.parametrize(("code", "quiet"), [(60.0, True), (70.0, False)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("division", [None, LONG])
def test_sums_of_1024_codes_are_exact(
    division: W4A8Division | None, sign: float, code: float, quiet: bool
) -> None:
    """The largest sums of tokens that are quiet, whose sums begin anew after 1,024 codes."""
    case = case_of(2, 16, 4096, 0, False, torch.float16, "cpu")
    case["x"] = torch.full((2, 4096), sign * code).half()
    case["x"][:, ::1024] = sign * (127.0 if sign > 0 else 128.0)
    case["codes"] = torch.zeros(16, 2048, dtype=torch.uint8)
    case["scale"], case["bias"], case["residual"] = torch.full((16, 1), 2.0**-9).half(), None, None
    with emulator.rows_quantization():
        scale = quantize_rows_sm90.turned_codes(case["x"]).scale
    assert torch.equal(scale, torch.full((2,), 1.0 if quiet else -1.0))
    assert torch.equal(emulated(case, division), exact(**case).half())


@pytest.mark.skipif(not COMPILER, reason="no g++")
def test_scales_and_zero_points_are_read_from_multiples_of_16_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The groups of 512 codes are loaded at once."""
    case = case_of(2, 16, 512, 128, True, torch.bfloat16, "cpu")
    expected = emulated(case)
    starts: list[Tensor | None] = []

    def recorded(*tensors: Tensor | None) -> list[int]:
        starts.extend(tensors[:2])
        return addresses(*tensors)

    monkeypatch.setattr(w4a8_mm_sm90, "addresses", recorded)
    for name in ("scale", "zero_point"):
        moved = torch.cat([case[name].flatten()[:1], case[name].flatten()])[1:]
        assert moved.data_ptr() % 16
        case[name] = moved.view_as(case[name])
    assert torch.equal(emulated(case), expected)
    assert len(starts) == 2 and all(start % 16 == 0 for start in addresses(*starts))


@pytest.mark.parametrize("group", [16, 32, 96, 192])
def test_groups_that_are_no_chunks_are_declined(group: int) -> None:
    case = operands(4, 16, group * 3, 4, group, device="cpu")
    codes, scale = torch.zeros(4, group * 3, dtype=torch.int8), torch.ones(4)
    tensors = (codes, *tensors_of(case)[1:6], scale)
    planned = WeightOperands.of(*tensors, group_size=group, out=torch.bfloat16)
    assert not w4a8_mm_sm90.takes(planned)


def test_the_ring_fits_shared_memory() -> None:
    for division in DIVISIONS:
        stages, shared = division.stages()
        assert stages >= 4 and shared <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize(
    ("m", "n", "k", "group", "zero", "dtype"),
    [
        *(shape[:-1] for shape in SHAPES),
        (1000, 4096, 4096, 128, True, torch.bfloat16),
        (257, 1027, 14336, 256, False, torch.bfloat16),
    ],
)
def test_cuda(
    m: int,
    n: int,
    k: int,
    group: int,
    zero: bool,
    dtype: torch.dtype,
    division: W4A8Division,
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    case = case_of(m, n, k, group, zero, dtype, "cuda")
    codes, scale, _ = quantize_rows_sm90.turned_codes(case["x"])
    assert_close(product_of(case, codes, scale, division), case)


@pytest.mark.gpu
def test_cuda_outliers_do_not_lose_the_other_columns() -> None:
    """One column of x is so large that other codes are 0 or 1, and the scales of a row differ 100 times."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    case = case_of(100, 520, 4096, 128, False, torch.float16, "cuda")
    case["x"][:, 5] *= 100
    case["scale"] *= torch.logspace(-2, 0, 32, device="cuda")[
        torch.randperm(32, device="cuda")
    ].half()
    case["bias"] = case["residual"] = None
    codes, scale, _ = quantize_rows_sm90.turned_codes(case["x"])
    assert_close(product_of(case, codes, scale, None), case)
