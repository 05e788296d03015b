"""Random bits: the formula in Python's integers, the stream of `lowbit.numerics.rounding`, uniformity."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit.numerics import rounding
from lowbit_kernels.elementwise.random_bits import (
    M,
    keys,
    random_bits,
    upper,
)
from lowbit_kernels.quantize.round_rows import KEYS

MASK = 2**32 - 1


def bits_of(i: int, k0: int, k1: int) -> int:
    octet = i >> 3
    h = (octet & MASK) ^ k0
    h = ((h ^ h >> 16) * 0x7FEB352D) & MASK
    h ^= (h >> 15) ^ ((k1 + 0x9E3779B9 * ((octet >> 32) & MASK)) & MASK)
    h = (h * 0x846CA68B) & MASK
    h ^= h >> 16
    return h * M[i & 7] & MASK


def test_the_formula() -> None:
    some = torch.randint(-(2**63), 2**63 - 1, (300,)).tolist() + list(range(-9, 9))
    assert [x & MASK for x in random_bits(torch.tensor(some), *KEYS).tolist()] == [
        bits_of(i, *KEYS) for i in some
    ]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**40 + 77, -(2**63)])
def test_the_stream_of_rounding(seed: int) -> None:
    k0, k1 = (int(key) & MASK for key in keys(torch.tensor(seed)))
    expected = []
    for key in (0x243F6A88, 0x85A308D3):
        for half in (seed & MASK, seed >> 32 & MASK):
            key = rounding._finalise(((key ^ half) + 0x9E3779B9) & MASK)
        expected.append(key)
    assert [k0, k1] == expected
    index = torch.tensor([0, 5, 8, 2**33 - 1, 2**40 + 3])
    found = random_bits(index, *keys(torch.tensor(seed)))
    assert torch.equal(upper(found, 16), rounding.bits_at(index, *map(torch.tensor, expected)))
    assert [x & MASK for x in found.tolist()] == [bits_of(i, k0, k1) for i in index.tolist()]


@pytest.mark.parametrize("first", [0, -(2**40) - 1, 2**62 + 12345])
def test_uniform_and_independent(first: int) -> None:
    found = upper(random_bits(torch.arange(2**18) + first, *KEYS), 16)
    counts = torch.bincount(found >> 8, minlength=256).double()
    chi2 = ((counts - 2**10) ** 2 / 2**10).sum()
    assert chi2 < 255 + 6 * math.sqrt(2 * 255)
    for lag in (1, 2, 3, 4, 5, 6, 7, 8, 64):
        both = torch.stack([found[:-lag], found[lag:]]).double()
        assert abs(torch.corrcoef(both)[0, 1]) < 6 / math.sqrt(len(found))
