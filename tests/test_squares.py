"""Stochastic rounding to squares, as 4-bit second moments are stored: means, exact values, an inexact root."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lowbit.codebook import (
    SQUARES,
    Codebook,
    _square_above_or_below,
    dequantize_blockwise,
    quantize_blockwise,
)

EVERY_DRAW = torch.arange(2**16, dtype=torch.int32)


def near_squares() -> torch.Tensor:
    """Numbers on, around and between the values of the table."""
    values = SQUARES.table()
    steps = torch.arange(-3, 4, dtype=torch.int32)
    around = (values.view(torch.int32)[:, None] + steps).flatten().view(torch.float32)
    middle = (values[1:] + values[:-1]) / 2
    return torch.cat([around, middle, torch.rand(2000)]).clamp(max=1)


def encode_exactly(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """The formula of `lowbit.codebook` in float64, where no operation rounds."""
    z = x.double() * 256
    i = torch.tensor([math.isqrt(int(v)) for v in z.tolist()], dtype=torch.float64)
    up = (z - i * i) * 65536 > (random.double() + 0.5) * (2 * i + 1)
    return ((i + up).clamp(1, 16) - 1).to(torch.uint8)


def test_the_formula() -> None:
    x = near_squares().repeat(40)
    random = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    assert torch.equal(SQUARES.encode_stochastically(x, random), encode_exactly(x, random))
    for draw in (0, 1, 65534, 65535):
        random.fill_(draw)
        assert torch.equal(SQUARES.encode_stochastically(x, random), encode_exactly(x, random))


def test_the_mean_over_all_draws_is_the_value() -> None:
    table = SQUARES.table().double()
    for x in [1 / 256, 0.00391, 0.005, 0.0156, 0.1, 0.33333, 0.5, 0.8, 0.95, 0.9999]:
        codes = SQUARES.encode_stochastically(torch.full((2**16,), x), EVERY_DRAW)
        values = table[codes.long()]
        assert len(values.unique()) <= 2
        gap = float(values.max() - values.min())
        assert abs(float(values.mean()) - float(np.float32(x))) <= gap * 2**-17


def test_values_of_the_table_and_the_ends_are_kept_by_every_draw() -> None:
    for code, value in enumerate(SQUARES.table()):
        assert (SQUARES.encode_stochastically(value.expand(2**16), EVERY_DRAW) == code).all()
    for x, code in ((0.0, 0), (1e-9, 0), (2.0, 15), (math.inf, 15), (math.nan, 15), (-0.5, 0)):
        codes = SQUARES.encode_stochastically(torch.full((2**16,), x), EVERY_DRAW)
        assert (codes == code).all(), x


def test_a_root_that_is_off_changes_no_code() -> None:
    """Hardware takes roots with an error of a few units in the last place, so i is one off next to a square."""
    z = near_squares()[: 16 * 7] * 256
    root = z.double().sqrt()
    nearest = root.round().float()
    assert ((root - nearest).abs() < 1e-5).all()
    for draw in (0, 1, 2, 777, 32768, 65533, 65534, 65535):
        random = torch.full(z.shape, draw, dtype=torch.int32)
        right = _square_above_or_below(z.clone(), root.floor().float(), random)
        for i in (
            nearest - 1,
            nearest,
        ):  # one of them is `root.floor()`, the other is one too low or too high
            keeps = i.clamp(min=0)
            assert torch.equal(_square_above_or_below(z.clone(), keeps, random), right), draw


def test_half_way_draws_are_the_nearest() -> None:
    """With r + 0.5 = 32768 the formula is the nearest with ties to the lower code, as kernels use it."""
    x = near_squares()
    z = x * 256
    between = torch.full(x.shape, 32767.5)
    found = _square_above_or_below(z.clone(), z.sqrt().floor(), between)
    assert torch.equal(found, SQUARES.encode(x))


def test_blockwise() -> None:
    x = torch.rand(5, 300).square()
    random = torch.randint(0, 2**16, (400, *x.shape), dtype=torch.int32)
    rounds = [quantize_blockwise(x, SQUARES, 128, bits) for bits in random]
    assert all(torch.equal(scale, rounds[0][1]) for _, scale in rounds)
    values = torch.stack([dequantize_blockwise(*one, SQUARES, 128) for one in rounds])
    scale = rounds[0][1].repeat_interleave(128, 1)[:, :300]
    inside, gap = x > scale / 256, (2 * (256 * x / scale).sqrt().floor() + 1) * scale / 256
    deviation = gap / 2 / 400**0.5  # at most, of a mean
    assert ((values.mean(0) - x).abs() <= 6 * deviation)[inside].all()
    assert (values.mean(0) >= x * 0.99)[~inside].all()  # below the smallest value: up


def test_other_books_are_refused() -> None:
    x, random = torch.rand(2, 8), torch.zeros(2, 8, dtype=torch.int32)
    for book in (Codebook(4, True), Codebook(8, False), Codebook(4, False, linear=True)):
        with pytest.raises(ValueError, match="not rounded stochastically; accepted: Codebook"):
            book.encode_stochastically(x, random)
    with pytest.raises(ValueError, match="float8_e4m3fn is not rounded stochastically"):
        quantize_blockwise(x, torch.float8_e4m3fn, 8, random)


def test_inputs_that_do_not_fit_are_refused() -> None:
    x, random = torch.rand(2, 8), torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"takes float32, got torch\.bfloat16"):
        SQUARES.encode_stochastically(x.bfloat16(), random)
    for found in (random[:1], random.flatten()):
        with pytest.raises(ValueError, match=r"random must have the shape of x, \(2, 8\), got"):
            quantize_blockwise(x, SQUARES, 8, found)
