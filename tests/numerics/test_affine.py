"""The laws of lowbit.numerics.affine, against a float64 reference written block by block, and its edges and errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.numerics.affine import (
    MAPPINGS,
    VALUE_ZERO_POINT,
    MappingName,
    choose_qparams_affine,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
)
from lowbit.numerics.granularity import (
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
)
from lowbit.numerics.number_format import Int

EPS = torch.finfo(torch.float32).eps
INTEGER_ZERO_POINT = MAPPINGS[:3]
GRANULARITIES = {
    "tensor": PerTensor(),
    "row": PerRow(),
    "group": PerGroup(8),
    "block": PerBlock(3, 12),
}
INTS = [Int(bits, signed) for bits in range(1, 9) for signed in (True, False)]

# One bit has no positive code beside its middle, which the no-clipping mapping needs: test_one_bit_needs_one.
POSSIBLE = [
    (f, m) for f in INTS for m in MAPPINGS if f.bits > 1 or m != "symmetric_no_clipping_err"
]
formats_and_mappings = pytest.mark.parametrize(
    ("fmt", "mapping"),
    POSSIBLE,
    ids=[f"{'' if f.signed else 'u'}int{f.bits}-{m}" for f, m in POSSIBLE],
)
mappings = pytest.mark.parametrize("mapping", MAPPINGS)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)


def tiles(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    starts = [range(0, size, b) for size, b in zip(shape, block, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(i, i + b) for i, b in zip(corner, block, strict=True))


def qparams(
    x: Tensor, mapping: MappingName, block: tuple[int, ...], fmt: Int
) -> tuple[Tensor, Tensor]:
    """Scale and zero point, in the order of `tiles`."""
    scale, zero_point = choose_qparams_affine(
        x, mapping, block, fmt.dtype, fmt.quant_min, fmt.quant_max
    )
    assert zero_point is not None
    return scale.reshape(-1), zero_point.reshape(-1)


def round_trip(
    x: Tensor, mapping: MappingName, block: tuple[int, ...], fmt: Int
) -> tuple[Tensor, Tensor]:
    """Codes and values of `x`."""
    scale, zero_point = qparams(x, mapping, block, fmt)
    limits = (fmt.quant_min, fmt.quant_max)
    codes = quantize_affine(x, block, scale, zero_point, fmt.dtype, *limits)
    return codes, dequantize_affine(codes, block, scale, zero_point, *limits, output_dtype=x.dtype)


def check_tile(
    x: np.ndarray,
    codes: np.ndarray,
    values: np.ndarray,
    scale: float,
    zp: float,
    mapping: str,
    fmt: Int,
):
    """One block against the formulas, in float64. `scale` and `zp` are the ones lowbit chose."""
    low, high = fmt.quant_min, fmt.quant_max
    mid = (low + high + 1) // 2
    least, most = min(x.min(), 0.0), max(x.max(), 0.0)
    if mapping in ("symmetric", "half_integer"):
        expected = max(-least, most) / ((high - low) / 2)
    elif mapping == "symmetric_no_clipping_err":
        expected = max(-least / (mid - low), most / (high - mid))
    else:
        expected = (most - least) / (high - low)
    assert scale == pytest.approx(expected, rel=4 * EPS)
    if mapping == "asymmetric":
        assert low <= zp <= high and abs(zp - np.clip(low - least / scale, low, high)) <= 0.5 + 1e-4
    elif mapping == "float_zero_point":
        assert zp == pytest.approx(
            least + scale * (mid - low), rel=4 * EPS, abs=4 * EPS * (most - least)
        )
    elif mapping == "half_integer":
        assert zp == scale / 2
    else:
        assert zp == mid
    if mapping in ("float_zero_point", "half_integer"):
        exact = (x - (zp - scale * (mid - low))) / scale + low
        expected_values = (codes - mid) * scale + zp
    else:
        exact = x / scale + zp
        expected_values = (codes - zp) * scale
    assert codes.min() >= low and codes.max() <= high
    assert np.abs(codes - np.clip(exact, low, high)).max() <= 0.5 + 1e-4, "not the nearest code"
    np.testing.assert_allclose(
        values, expected_values, rtol=4 * EPS, atol=4 * EPS * max(-least, most)
    )


@pytest.mark.cover("values")
@formats_and_mappings
@pytest.mark.parametrize("per", GRANULARITIES)
@pytest.mark.parametrize("shape", [(9, 24), (2, 3, 24)], ids=str)
def test_against_float64(fmt: Int, mapping: MappingName, per: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * torch.logspace(-2, 2, shape[-1])
    block = GRANULARITIES[per].block_size(shape)
    codes, values = round_trip(x, mapping, block, fmt)
    assert codes.dtype == fmt.dtype and codes.shape == values.shape == x.shape
    scale, zero_point = qparams(x, mapping, block, fmt)
    arrays = [t.double().numpy() for t in (x, codes, values)]
    for n, tile in enumerate(tiles(shape, block)):
        check_tile(*(a[tile] for a in arrays), scale[n].item(), zero_point[n].item(), mapping, fmt)


@pytest.mark.cover("values")
@formats_and_mappings
@dtypes
def test_fake_quantize_is_quantize_then_dequantize(
    fmt: Int, mapping: MappingName, dtype: torch.dtype
) -> None:
    x = torch.randn(5, 24).to(dtype)
    scale, zero_point = qparams(x, mapping, (1, 8), fmt)
    _, values = round_trip(x, mapping, (1, 8), fmt)
    limits = (fmt.quant_min, fmt.quant_max)
    fake = fake_quantize_affine(x, (1, 8), scale, zero_point, fmt.dtype, *limits)
    assert fake.dtype == dtype and torch.equal(fake, values)


floats = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.just(8)), elements=st.floats(-1e6, 1e6, width=32)
)
formats = st.sampled_from([f for f in INTS if f.bits > 1])


@given(floats, formats, st.sampled_from(MAPPINGS), st.sampled_from([torch.float32, torch.bfloat16]))
def test_fake_quantize_is_idempotent(
    array: np.ndarray, fmt: Int, mapping: MappingName, dtype: torch.dtype
) -> None:
    """With the same scale and zero point, quantizing a second time changes nothing."""
    x = torch.from_numpy(array)
    if dtype == torch.bfloat16 and mapping in ("float_zero_point", "half_integer"):
        x, dtype = (
            x.round(),
            torch.float32,
        )  # value = (code − mid) · scale + zp may fall between two bf16
    x = x.to(dtype)
    scale, zero_point = qparams(x, mapping, (1, 8), fmt)
    args = ((1, 8), scale, zero_point, fmt.dtype, fmt.quant_min, fmt.quant_max)
    once = fake_quantize_affine(x, *args)
    assert torch.equal(fake_quantize_affine(once, *args), once)


@given(floats, formats, st.sampled_from(INTEGER_ZERO_POINT))
def test_zero_stays_zero(array: np.ndarray, fmt: Int, mapping: MappingName) -> None:
    """The range includes zero, so zero has a code, even where all inputs lie far on one side of it."""
    for x in (
        torch.from_numpy(array),
        torch.from_numpy(array).abs() + 10,
        -torch.from_numpy(array).abs() - 10,
    ):
        scale, zero_point = qparams(x, mapping, (1, 8), fmt)
        args = ((1, 8), scale, zero_point, fmt.dtype, fmt.quant_min, fmt.quant_max)
        assert torch.equal(fake_quantize_affine(torch.zeros_like(x), *args), torch.zeros_like(x))


@given(floats, formats, st.sampled_from(MAPPINGS))
def test_error_is_at_most_half_a_step(array: np.ndarray, fmt: Int, mapping: MappingName) -> None:
    """Clipping costs no more than rounding does, or one whole step where an integer zero point was rounded too."""
    x = torch.from_numpy(array)
    scale, _ = qparams(x, mapping, (1, 8), fmt)
    _, values = round_trip(x, mapping, (1, 8), fmt)
    steps = (values - x).double().abs() / scale.double()[:, None]
    assert steps.max() <= (1.0 if mapping == "asymmetric" else 0.5) + 1e-3


@given(floats, formats)
def test_no_clipping_mapping_never_clips(array: np.ndarray, fmt: Int) -> None:
    """Codes before the clamp lie within the range, and reach its larger end."""
    x = torch.from_numpy(array)
    scale, zero_point = qparams(x, "symmetric_no_clipping_err", (1, 8), fmt)
    codes = torch.round(x * (1.0 / scale[:, None])) + zero_point[:, None]
    assert codes.min() >= fmt.quant_min and codes.max() <= fmt.quant_max
    used = (codes.amin(1) == fmt.quant_min) | (codes.amax(1) == fmt.quant_max)
    assert used[x.abs().amax(1) > 1e-30].all()


def test_symmetric_clips_the_positive_end_only() -> None:
    x = torch.tensor([[-7.5, 7.5, 7.0, -8.0]])
    codes = quantize_affine(
        x, (1, 4), torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.int8, -8, 7
    )
    assert codes.tolist() == [[-8, 7, 7, -8]]
    scale, zero_point = choose_qparams_affine(x[:, :2], "symmetric", (1, 2), torch.int8, -8, 7)
    assert scale.tolist() == [1.0] and zero_point is not None and zero_point.tolist() == [0]


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    codes = quantize_affine(x, (6,), torch.ones(()), torch.tensor(3), torch.int8)
    assert (codes - 3).tolist() == [-2, -2, 0, 0, 2, 2]


def test_float_zero_point_by_hand() -> None:
    """tinygemm's uint4: scale = (max − min)/15, zp = min + 8 · scale; code = round((x − min)/scale)."""
    x = torch.tensor([[-2.0, -1.0, 0.5, 5.5]])
    scale, zero_point = choose_qparams_affine(x, "float_zero_point", (1, 4), torch.uint8, 0, 15)
    assert zero_point is not None and zero_point.dtype == torch.float32
    assert scale.tolist() == [0.5] and zero_point.tolist() == [2.0]
    codes = quantize_affine(x, (1, 4), scale, zero_point, torch.uint8, 0, 15)
    assert codes.tolist() == [[0, 2, 5, 15]]
    values = dequantize_affine(codes, (1, 4), scale, zero_point, 0, 15)
    assert values.tolist() == [[-2.0, -1.0, 0.5, 5.5]]


def test_float_zero_point_keeps_the_signed_and_unsigned_codes_apart_only_by_their_offset() -> None:
    x = torch.randn(4, 16)
    signed, unsigned = Int(4), Int(4, signed=False)
    a, values_a = round_trip(x, "float_zero_point", (1, 8), signed)
    b, values_b = round_trip(x, "float_zero_point", (1, 8), unsigned)
    assert torch.equal(a.long() + 8, b.long()) and torch.equal(values_a, values_b)


def test_one_bit_needs_one() -> None:
    with pytest.raises(ValueError, match=r"symmetric_no_clipping_err .*-1\.\.0.*asymmetric"):
        choose_qparams_affine(
            torch.randn(2, 8), "symmetric_no_clipping_err", (1, 8), torch.int8, -1, 0
        )


def test_one_bit_asymmetric_keeps_two_levels() -> None:
    x = torch.tensor([[0.0, 1.0, 0.0, 1.0], [-3.0, 0.0, -3.0, 0.0]])
    _, values = round_trip(x, "asymmetric", (1, 4), Int(1, signed=False))
    assert torch.equal(values, x)


@pytest.mark.parametrize(
    ("block", "kept", "dropped"),
    [
        ((4, 6), (1, 1), ()),
        ((1, 6), (4, 1), (4,)),
        ((4, 1), (1, 6), (6,)),
        ((1, 2), (4, 3), (4, 3)),
        ((2, 3), (2, 2), (2, 2)),
        ((1, 1), (4, 6), (4, 6)),
    ],
    ids=str,
)
@mappings
def test_keepdim(
    mapping: MappingName, block: tuple[int, ...], kept: tuple[int, ...], dropped: tuple[int, ...]
) -> None:
    x = torch.randn(4, 6)
    for keepdim, shape in ((True, kept), (False, dropped)):
        scale, zero_point = choose_qparams_affine(x, mapping, block, torch.int8, keepdim=keepdim)
        assert zero_point is not None
        assert tuple(scale.shape) == tuple(zero_point.shape) == shape
        codes = quantize_affine(x, block, scale, zero_point, torch.int8)
        assert torch.equal(
            codes, quantize_affine(x, block, scale.flatten(), zero_point.flatten(), torch.int8)
        )


@mappings
def test_observed_range_replaces_the_inputs_own(mapping: MappingName) -> None:
    x = torch.randn(4, 16)
    args = (mapping, (1, 8), torch.int8, -8, 7)
    own = choose_qparams_affine(x, *args)
    blocks = x.reshape(4, 2, 8)
    observed = {"min_val": blocks.amin(-1), "max_val": blocks.amax(-1)}
    given_range = choose_qparams_affine(torch.full_like(x, torch.nan), *args, **observed)
    wider = choose_qparams_affine(
        x, *args, min_val=observed["min_val"] * 2, max_val=observed["max_val"] * 2
    )
    for a, b in zip(own, given_range, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
    torch.testing.assert_close(wider[0], own[0] * 2)
    with pytest.raises(ValueError, match="both min_val and max_val"):
        choose_qparams_affine(x, *args, min_val=observed["min_val"])
    with pytest.raises(ValueError, match="min_val has 3 elements"):
        choose_qparams_affine(x, *args, min_val=torch.zeros(3), max_val=torch.ones(3))


def test_dtypes_of_parameters() -> None:
    x = torch.randn(4, 16)
    for mapping in MAPPINGS:
        dtype = torch.bfloat16 if mapping in VALUE_ZERO_POINT else torch.int16
        options = {"scale_dtype": torch.bfloat16, "zero_point_dtype": dtype}
        scale, zero_point = choose_qparams_affine(x, mapping, (1, 16), torch.int8, **options)
        assert zero_point is not None
        assert (scale.dtype, zero_point.dtype) == (torch.bfloat16, dtype)
    scale, zero_point = choose_qparams_affine(
        x, "asymmetric", (1, 16), torch.uint8, zero_point_dtype=torch.uint8
    )
    assert zero_point is not None and zero_point.dtype == torch.uint8
    reference = choose_qparams_affine(x, "asymmetric", (1, 16), torch.uint8)[1]
    assert reference is not None and torch.equal(zero_point.int(), reference)


def test_zero_point_none_means_zero() -> None:
    x, scale = torch.randn(4, 16), torch.rand(4) + 0.1
    zero = torch.zeros(4, dtype=torch.int32)
    codes = quantize_affine(x, (1, 16), scale, None, torch.int8)
    assert torch.equal(codes, quantize_affine(x, (1, 16), scale, zero, torch.int8))
    values = dequantize_affine(codes, (1, 16), scale, None)
    assert torch.equal(values, dequantize_affine(codes, (1, 16), scale, zero))
    assert torch.equal(values, fake_quantize_affine(x, (1, 16), scale, None, torch.int8))
