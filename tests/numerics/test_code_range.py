"""Codes never leave their range: NaN, infinities, subnormals, ranges up to the ends of int32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
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

INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN, INF = torch.nan, torch.inf
numbers = st.one_of(
    st.floats(),
    st.sampled_from([NAN, -NAN, INF, -INF, 0.0, -0.0, 5e-324, 1e-45, -1e-40, 65504.0, 3.4e38]),
    st.integers(-(2**33), 2**33).map(float),
)


@st.composite
def ranges(draw: st.DrawFn, dtypes: list[torch.dtype] = INTEGERS) -> tuple[torch.dtype, int, int]:
    """A dtype of codes, quant_min and quant_max, often near its ends or beyond float32's exact integers."""
    dtype = draw(st.sampled_from(dtypes))
    info = torch.iinfo(dtype)
    near_ends = [
        info.min,
        info.max,
        *(n for n in (-(2**24) - 3, 2**24 + 3, 0, 3) if info.min <= n <= info.max),
    ]
    ends = st.one_of(st.sampled_from(near_ends), st.integers(info.min, info.max))
    low, high = sorted(draw(st.lists(ends, min_size=2, max_size=2, unique=True)))
    return dtype, low, high


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(BITS[t.dtype.itemsize])


def check_round_trip(x: Tensor, fake: Tensor, back: Tensor) -> None:
    """`fake` has the bits of `back`, but for NaN in x, which stays NaN."""
    known = ~x.isnan()
    assert torch.equal(bits(fake[known]), bits(back[known]))
    assert fake[~known].isnan().all()


def expected_codes(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, low: int, high: int
) -> Tensor:
    """The formula of `lowbit.numerics.affine` for one block: float32 up to the code, and integers from there."""
    with np.errstate(all="ignore"):
        inverse = (1.0 / scale.double().numpy()).astype(np.float32)
        codes = np.rint(x.float().numpy() * inverse)
        codes = np.where(np.isnan(codes), np.float32(0), codes)
        if zero_point is not None:
            codes = codes + zero_point.float().numpy()
    return torch.from_numpy(codes.astype(np.float64).clip(low, high).astype(np.int64))


@given(
    st.lists(numbers, min_size=1, max_size=8),
    st.sampled_from(FLOATS),
    ranges(),
    st.one_of(st.floats(2**-126, 2**127), st.sampled_from([1.0, 2.0**-31, 1e-45, INF, NAN])),
    st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
)
@example([1.0], torch.float32, (torch.int32, -(2**31), 2**31 - 1), 2.0**-31, None)
@example([NAN], torch.bfloat16, (torch.uint8, 4, 15), 1.0, 9)
@example([1e9], torch.float64, (torch.int32, 2**24 + 1, 2**24 + 3), 1.0, None)
def test_codes_lie_in_the_range_and_fake_quantize_is_the_round_trip(
    values: list[float],
    dtype: torch.dtype,
    code_range: tuple[torch.dtype, int, int],
    scale: float,
    zero: int | None,
) -> None:
    code_dtype, low, high = code_range
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    s = torch.tensor([scale], dtype=torch.float32)
    zero_point = None if zero is None else torch.tensor([min(max(zero, low), high)])
    args = ((len(values),), s, zero_point)
    codes = quantize_affine(x, *args, code_dtype, low, high)
    assert codes.dtype == code_dtype
    assert torch.equal(codes.long(), expected_codes(x, s, zero_point, low, high))
    back = dequantize_affine(codes, *args, low, high, output_dtype=dtype)
    check_round_trip(x, fake_quantize_affine(x, *args, code_dtype, low, high), back)


@given(
    st.lists(numbers, min_size=1, max_size=8),
    st.sampled_from(FLOATS),
    ranges(),
    st.sampled_from(MAPPINGS),
)
def test_codes_stay_in_range_with_chosen_scale_and_zero_point(
    values: list[float],
    dtype: torch.dtype,
    code_range: tuple[torch.dtype, int, int],
    mapping: MappingName,
) -> None:
    """The zero point lies in the range too, and a non-finite input shows in the scale and in every value."""
    code_dtype, low, high = code_range
    if mapping == "symmetric_no_clipping_err" and high == (low + high + 1) // 2:
        return  # refused: it has no positive code
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    block = (len(values),)
    scale, zero_point = choose_qparams_affine(x, mapping, block, code_dtype, low, high)
    assert zero_point is not None
    if mapping not in VALUE_ZERO_POINT:
        assert low <= int(zero_point) <= high
    codes = quantize_affine(x, block, scale, zero_point, code_dtype, low, high)
    assert codes.long().min() >= low and codes.long().max() <= high
    back = dequantize_affine(codes, block, scale, zero_point, low, high, output_dtype=dtype)
    check_round_trip(
        x, fake_quantize_affine(x, block, scale, zero_point, code_dtype, low, high), back
    )
    finite = bool(x.float().isfinite().all())
    assert bool(scale.isfinite()) == finite
    assert finite or not back.isfinite().any()


def test_the_ends_of_int32() -> None:
    """2^31 − 1 is not a float32: the nearest, 2^31, wraps."""
    x = torch.tensor([1.0, -1.0, 2.0, -2.0, INF, -INF], requires_grad=True)
    scale = torch.tensor(2.0**-31)
    codes = quantize_affine(x, (6,), scale, None, torch.int32)
    assert codes.tolist() == [2**31 - 1, -(2**31)] * 3
    values = fake_quantize_affine(x, (6,), scale, None, torch.int32)
    assert values.tolist() == [1.0, -1.0] * 3
    values.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 1, 0, 0, 0, 0]  # 1.0 is the code 2^31
    _, zero_point = choose_qparams_affine(-x.detach()[:1], "asymmetric", (1,), torch.int32)
    assert zero_point is not None and zero_point.tolist() == [2**31 - 1]


@pytest.mark.parametrize(
    ("zero_point", "code", "value"),
    [
        (None, 4, 2.0),  # 0 is outside of 4..15: its nearest end
        (torch.tensor(9), 9, 0.0),
        (torch.tensor(2.5), 10, 2.5),  # a floating zero point is the value of the middle code
    ],
    ids=["none", "integer", "floating"],
)
def test_a_nan_has_the_code_of_its_zero_point_and_stays_nan_in_training(
    zero_point: Tensor | None, code: int, value: float
) -> None:
    x = torch.tensor([NAN], requires_grad=True)
    args = (x, (1,), torch.tensor(0.5), zero_point, torch.uint8, 4, 15)
    codes = quantize_affine(*args)
    assert codes.tolist() == [code]
    assert dequantize_affine(codes, *args[1:4], 4, 15).tolist() == [value]
    assert fake_quantize_affine(*args).isnan().all()


def test_compiled_code_gives_the_same_for_nan_and_infinity() -> None:
    x = torch.tensor([[NAN, 1.0, -9.0, 3.0], [INF, 1.0, -INF, 3e38], [0.5, 1.0, 2.0, 70.0]])

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        args = (x, (1, 4), torch.ones(3), None, torch.int8, -8, 7)
        return quantize_affine(*args), fake_quantize_affine(*args)

    found, expected = torch.compile(both, fullgraph=True)(x), both(x)
    assert expected[0].tolist() == [[0, 1, -8, 3], [7, 1, -8, 7], [0, 1, 2, 7]]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert expected[1][0].isnan().tolist() == [True, False, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("code_dtype", INTEGERS, ids=str)
def test_gpu_gives_the_codes_of_the_cpu_for_nan_and_infinity(code_dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, INF, -INF, 3e38, -3e38, 1.0, 0.0, 1e-45]).repeat(64)
    for scale in (torch.tensor(2.0**-31), torch.tensor(1.0), torch.tensor(INF)):
        args = ((len(x),), scale, None, code_dtype)
        codes = quantize_affine(x, *args)
        moved = ((len(x),), scale.cuda(), None, code_dtype)
        assert torch.equal(quantize_affine(x.cuda(), *moved).cpu(), codes)
        fake = fake_quantize_affine(x.cuda(), *moved).cpu()
        torch.testing.assert_close(
            fake, fake_quantize_affine(x, *args), rtol=0, atol=0, equal_nan=True
        )


# ---- dtypes of zero points ----------------------------------------------------------------------------------


@given(
    ranges(),
    st.sampled_from(MAPPINGS),
    st.sampled_from([*INTEGERS, torch.int64, *FLOATS, *FLOAT8, torch.bool, torch.complex64]),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=4),
)
@example((torch.uint8, 0, 255), "asymmetric", torch.int8, [-1.0, 0.5])
@example((torch.uint8, 0, 255), "symmetric", torch.int8, [-1.0, 0.5])
def test_a_zero_point_is_exact_or_its_dtype_refused(
    code_range: tuple[torch.dtype, int, int],
    mapping: MappingName,
    zero_point_dtype: torch.dtype,
    values: list[float],
) -> None:
    code_dtype, low, high = code_range
    if mapping == "symmetric_no_clipping_err" and high == (low + high + 1) // 2:
        return
    x = torch.tensor(values)
    args = (x, mapping, x.shape, code_dtype, low, high)
    _, expected = choose_qparams_affine(*args)
    try:
        _, found = choose_qparams_affine(*args, zero_point_dtype=zero_point_dtype)
    except ValueError as error:
        assert str(error).startswith(f"zero_point_dtype={zero_point_dtype} does not hold")
        if mapping in VALUE_ZERO_POINT:
            assert zero_point_dtype not in FLOATS
        else:
            mid = (low + high + 1) // 2
            lowest, highest = (low, high) if mapping == "asymmetric" else (mid, mid)
            assert zero_point_dtype not in [*INTEGERS, torch.int64] or not (
                torch.iinfo(zero_point_dtype).min <= lowest
                and highest <= torch.iinfo(zero_point_dtype).max
            )
    else:
        assert found is not None and expected is not None and found.dtype == zero_point_dtype
        if mapping in VALUE_ZERO_POINT:
            assert torch.equal(found, expected.to(zero_point_dtype))
        else:
            assert torch.equal(found.long(), expected.long())


# ---- ranges that a dtype does not have ----------------------------------------------------------------------


def float8_numbers(dtype: torch.dtype) -> list[float]:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return sorted(set(every[every.isfinite()].tolist()))


@pytest.mark.parametrize("dtype", FLOAT8, ids=["e4m3fn", "e5m2"])
def test_a_float8_range_ends_at_float8_numbers(dtype: torch.dtype) -> None:
    """A range may end at every number of the dtype and nowhere between; values, gradient and codes respect it."""
    all_of_it = float8_numbers(dtype)
    for low, high, above in zip(all_of_it[:-1], all_of_it[1:], [*all_of_it[2:], INF], strict=True):
        x = torch.tensor([-INF, low, high, INF, NAN], requires_grad=True)
        codes = quantize_affine(x, (5,), torch.ones(()), None, dtype, low, high).float()
        assert codes[:4].tolist() == [low, low, high, high] and codes[4].isnan()
        with pytest.raises(ValueError, match=r"quant_max=.* is not a torch\.float8"):
            quantize_affine(x, (5,), torch.ones(()), None, dtype, low, high - (high - low) / 4)
        if high > 0 and above != INF:
            near = torch.tensor([high + (above - high) * 0.49, high + (above - high) * 0.51])
            near.requires_grad_()
            fake_quantize_affine(
                near, (2,), torch.ones(()), None, dtype, low, high
            ).sum().backward()
            assert near.grad is not None and near.grad.tolist() == [1, 0]


ONE = torch.ones(())
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "between two codes": (
        lambda: quantize_affine(torch.ones(2), (2,), ONE, None, torch.int8, -1.5, 7),
        r"quant_min=-1\.5 is not a torch\.int8 number, .* the nearest are -2\.0 and -1\.0",
    ),
    "between two float8": (
        lambda: fake_quantize_affine(
            torch.ones(2), (2,), ONE, None, torch.float8_e4m3fn, -101.0, 104.0
        ),
        r"quant_min=-101\.0 is not a torch\.float8_e4m3fn number, .* the nearest are -104\.0 and -96\.0",
    ),
    "nan": (
        lambda: quantize_affine(torch.ones(2), (2,), ONE, None, torch.int8, NAN, 7),
        "quant_min=nan, quant_max=7 is not a range",
    ),
    "zero points in a narrower dtype": (
        lambda: choose_qparams_affine(
            torch.ones(2), "asymmetric", (2,), torch.uint8, zero_point_dtype=torch.int8
        ),
        r"zero_point_dtype=torch\.int8 does not hold the zero points of 'asymmetric', which are codes: 0\.\.255; "
        r"accepted: torch\.uint8, torch\.int16, torch\.int32, torch\.int64",
    ),
    "codes as floats": (
        lambda: choose_qparams_affine(
            torch.ones(2), "symmetric", (2,), torch.uint8, zero_point_dtype=torch.float32
        ),
        r"torch\.float32 does not hold .*'symmetric', which are codes: 128; accepted: torch\.uint8",
    ),
    "values as codes": (
        lambda: choose_qparams_affine(
            torch.ones(2), "float_zero_point", (2,), torch.uint8, zero_point_dtype=torch.int32
        ),
        r"torch\.int32 .*'float_zero_point', which are values, not codes; accepted: torch\.float32, ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_outside_of_a_range_or_dtype_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
