"""The signal-to-noise ratio by hand, at its ends, and in chunks of rows."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit.numerics.snr import Energies, decibels, snr


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [(100.0, 1.0, 20.0), (1.0, 0.0, math.inf), (0.0, 0.0, math.inf), (0.0, 1.0, -math.inf)],
)
def test_decibels(signal: float, noise: float, expected: float) -> None:
    assert decibels(signal, noise) == expected


def test_finite_signals_in_infinite_noise() -> None:
    assert decibels(1e300, math.inf) == -math.inf


def test_rows_in_several_chunks() -> None:
    values = torch.ones(3 * 2**20 + 5, 1)
    rounded = values.clone()
    rounded[::4] = 0.5  # a quarter of the values lose a quarter of their square
    assert snr(values, rounded) == pytest.approx(10 * math.log10(16), abs=1e-4)
    assert snr(values[0, 0], values[0, 0]) == math.inf


def test_relative_errors() -> None:
    found = Energies()
    found.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]))
    assert found.relative_error() == pytest.approx(1 / 25)
    assert Energies(0.0, 2.0).relative_error() == 2.0
