"""Stochastic rounding to 4 bits, as moments are stored: means, exact values, an inexact root."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowbit.numerics.codebook import (
    ABSMAX_FLOOR,
    Codebook,
    _square_above_or_below,
    dequantize_blockwise,
    power_of_two_above,
    quantize_blockwise,
)

EVERY_DRAW = torch.arange(2**16, dtype=torch.int32)
SQUARES, POWERS = Codebook(4, True), Codebook(4, False)
books = pytest.mark.parametrize("book", [SQUARES, POWERS], ids=["squares", "powers"])


def near_values(book: Codebook) -> torch.Tensor:
    """Numbers on, around and between the values of the table."""
    values = book.table()[:15] if book.signed else book.table()
    steps = torch.arange(-3, 4, dtype=torch.int32)
    around = (values.view(torch.int32)[:, None] + steps).flatten().view(torch.float32)
    middle = (values[1:] + values[:-1]) / 2
    x = torch.cat([around, middle, torch.rand(2000), 2.0 ** -(18 * torch.rand(2000))])
    x = x[x.isfinite()]  # the neighbours of zero below it are not numbers
    return torch.cat([x, -x]).clamp(-1, 1) if book.signed else x.clamp(max=1)


def encode_exactly(book: Codebook, x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """The formulas of `lowbit.numerics.codebook` in whole numbers."""
    codes = []
    for value, r in zip(x.tolist(), random.tolist(), strict=True):
        if book.signed:
            z = Fraction(float(np.float32(abs(value)) * np.float32(49)))
            i = math.isqrt(int(z))
            level = i + ((z - i * i) * 65536 > (r + Fraction(1, 2)) * (2 * i + 1))
            codes.append(7 - level if value < 0 else 7 + level)
        else:
            exponent = math.floor(math.log2(value))
            share = Fraction(value) / Fraction(2) ** exponent - 1
            mantissa = int(share * 2**23)
            codes.append(max(exponent + 15 + (mantissa + 128 * r + 64 >= 2**23), 0))
    return torch.tensor(codes, dtype=torch.uint8)


@books
def test_the_formula(book: Codebook) -> None:
    x = near_values(book).repeat(3)
    random = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    found = book.encode_stochastically(x, random)
    assert torch.equal(found, encode_exactly(book, x, random))
    for draw in (0, 1, 65534, 65535):
        random.fill_(draw)
        found = book.encode_stochastically(x, random)
        assert torch.equal(found, encode_exactly(book, x, random))


@books
def test_the_mean_over_all_draws_is_the_value(book: Codebook) -> None:
    table = book.table().double()
    for x in [2.0**-15, 0.00004, 0.0039, 0.005, 0.0156, 0.1, 0.33333, 0.5, 0.8, 0.95, 0.9999]:
        for value in [x, -x] if book.signed else [x]:
            codes = book.encode_stochastically(torch.full((2**16,), value), EVERY_DRAW)
            values = table[codes.long()]
            assert len(values.unique()) <= 2
            gap = float(values.max() - values.min())
            assert abs(float(values.mean()) - float(np.float32(value))) <= gap * 2**-17 + 1e-9


@books
def test_values_of_the_table_and_the_ends_are_kept_by_every_draw(book: Codebook) -> None:
    for code, value in enumerate(book.table()[:15]):
        assert (book.encode_stochastically(value.expand(2**16), EVERY_DRAW) == code).all()
    top, zero, low = (14, 7, 0) if book.signed else (15, 0, 0)
    ends = {0.0: zero, 1.0: top, 2.0: top, math.inf: top, math.nan: zero, -5.0: low}
    for x, code in ends.items():
        codes = book.encode_stochastically(torch.full((2**16,), x), EVERY_DRAW)
        assert (codes == code).all(), x


def test_below_the_smallest_power_there_is_nothing_to_choose_from() -> None:
    for x in (1e-30, 2.0**-40, 2.0**-16, 2.0**-15 * (1 - 2.0**-20)):
        codes = POWERS.encode_stochastically(torch.full((2**16,), x), EVERY_DRAW)
        assert (codes == 0).all(), x


def test_a_root_that_is_off_changes_no_level() -> None:
    """Hardware takes roots with an error of a few units in the last place, so i is one off next to a square."""
    squares = (torch.arange(8.0) ** 2)[:, None]
    steps = torch.arange(-3, 4, dtype=torch.int32)
    z = (squares.view(torch.int32) + steps)[1:].flatten().view(torch.float32).clamp(max=49)
    nearest = z.double().sqrt().round().float()
    for draw in (0, 1, 2, 777, 32768, 65533, 65534, 65535):
        random = torch.full(z.shape, draw, dtype=torch.int32)
        right = _square_above_or_below(z.clone(), z.double().sqrt().floor().float(), random)
        for i in (nearest - 1, nearest):  # one of them is the root, the other is one off
            assert torch.equal(_square_above_or_below(z.clone(), i.clone(), random), right), draw


def test_powers_of_two_above() -> None:
    x = torch.tensor([ABSMAX_FLOOR, 1.0, 1.0000001, 1.5, 2.0, 3e38, 2.0**127, 0.7, math.nan])
    expected = [ABSMAX_FLOOR, 1.0, 2.0, 2.0, 2.0, 2.0**127, 2.0**127, 1.0]
    assert power_of_two_above(x)[:-1].tolist() == expected and power_of_two_above(x)[-1].isnan()


def test_a_moment_keeps_its_value_when_the_largest_of_its_block_changes() -> None:
    """Scales are powers of two, so every moment is on the table of every scale that reaches it."""
    x = 2.0 ** -torch.randint(0, 12, (1, 128)).float()
    for largest in (1.0, 1.3, 3.9, 7.0):
        x[0, 0] = largest
        random = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
        codes, scale = quantize_blockwise(x, POWERS, 128, random)
        y = dequantize_blockwise(codes, scale, POWERS, 128)
        assert torch.equal(y[0, 1:], x[0, 1:])


@books
def test_blockwise(book: Codebook) -> None:
    x = torch.randn(5, 300).square() * (torch.randn(5, 300).sign() if book.signed else 1)
    random = torch.randint(0, 2**16, (400, *x.shape), dtype=torch.int32)
    rounds = [quantize_blockwise(x, book, 128, bits) for bits in random]
    assert all(torch.equal(scale, rounds[0][1]) for _, scale in rounds)
    values = torch.stack([dequantize_blockwise(*one, book, 128) for one in rounds])
    scale = rounds[0][1].repeat_interleave(128, 1)[:, :300]
    y = x.abs() / scale
    inside = y > 2.0**-15
    gap = (2 * (49 * y).sqrt().floor() + 1) / 49 if book.signed else 2.0 ** y.log2().floor()
    deviation = gap * scale / 2 / 400**0.5  # at most, of a mean
    assert ((values.mean(0) - x).abs() <= 6 * deviation)[inside].all()
    if not book.signed:  # below the smallest value: up
        assert (values.mean(0) >= x * 0.99)[~inside].all()


def test_other_books_are_refused() -> None:
    x, random = torch.rand(2, 8), torch.zeros(2, 8, dtype=torch.int32)
    for book in (Codebook(8, True), Codebook(8, False)):
        with pytest.raises(ValueError, match="not rounded stochastically; accepted: books of 4"):
            book.encode_stochastically(x, random)
    with pytest.raises(ValueError, match="float8_e4m3fn is not rounded stochastically"):
        quantize_blockwise(x, torch.float8_e4m3fn, 8, random)


@books
def test_inputs_that_do_not_fit_are_refused(book: Codebook) -> None:
    x, random = torch.rand(2, 8), torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"takes float32, got torch\.bfloat16"):
        book.encode_stochastically(x.bfloat16(), random)
    for found in (random[:1], random.flatten()):
        with pytest.raises(ValueError, match=r"random must have the shape of x, \(2, 8\), got"):
            quantize_blockwise(x, book, 8, found)
