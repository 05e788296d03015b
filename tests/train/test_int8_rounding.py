"""The rounding of int8 weights: unbiased, the same for any cut into rows, and exact for unchanged values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowbit import Int8Weight, Int8WeightTensor
from lowbit.tensor.trained.int8_weight import NEXT, first_offset
from lowbit_kernels.quantize.round_rows import round_rows
from tests.train.problems import relative, values
from tests.train.test_int8_weight import same, weight_of


def round_at(x, index):
    """Values within 127 rounded with a scale of 1, each by the draw at its index."""
    ones = torch.ones_like(x)
    codes, scale = round_rows(x[:, None], ones, 127 * ones, index)
    assert torch.equal(scale, ones)
    return codes[:, 0].float()


@pytest.mark.parametrize("distance", [0.0, 1e-4, 0.01, 0.25, 0.5, 0.75, 0.999, 1.0])
def test_rounding_is_unbiased(distance):
    """The mean of n draws is within 5 standard errors of the value, plus the systematic error of the rounding."""
    n = 2**20
    for low in (-127.0, -3.0, 0.0, 88.0):
        x = torch.full((n,), low + distance)
        mean = round_at(x, torch.arange(n) + first_offset(0, "w")).double().mean()
        error = 5 * math.sqrt(distance * (1 - distance) / n) + 2**-16
        assert abs(mean - float(x[0])) <= error + 1e-5 * (low != 0), (low, distance)


def test_an_update_is_unbiased_over_the_weights():
    """A weight moved by a hundredth of a code moves by that on average, in every row."""
    t = weight_of(64, 1001)
    before, moved = t.master(), 0.01 * t.scale
    inside = t.codes.abs() < 127
    t.update_(before + torch.where(inside, moved, 0.0))
    change = ((t.master() - before) / t.scale)[inside].double()
    assert (change.abs() < 1.01).all()
    assert abs(change.mean() - 0.01) < 5 * math.sqrt(0.01 / change.numel()) + 2**-16


def test_an_element_of_a_weight_has_a_draw_of_its_own():
    weight = weight_of(8, 512)
    assert (weight.place.diff(dim=0) == 512).all()
    assert torch.equal(weight[2:5].place, weight.place[2:5])


def test_random_bits_differ_between_rows_updates_and_names():
    def draws(name, row, update):
        index = torch.arange(1000) + row * 1000 + first_offset(0, name)
        index = index + torch.tensor(update) * NEXT  # modulo 2**64
        return round_at(torch.full((1000,), 0.5), index)

    seen = [draws(*k) for k in [("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("a", 0, 2), ("b", 0, 0)]]
    for i, first in enumerate(seen):
        for second in seen[:i]:
            assert abs((first == second).float().mean() - 0.5) < 0.1
    assert first_offset(0, "a") != first_offset(1, "a")


@given(st.integers(0, 6), st.integers(1, 9), st.floats(1e-30, 1e30))
def test_unchanged_values_stay(rows, columns, size):
    """Also after a multiplication of the scales, by which they are not quotients of 127 any more."""
    t = Int8WeightTensor(torch.randn(rows, columns) * size, Int8Weight())
    t.scale_(0.99973)
    before = t.clone()
    t.update_(t.master())
    assert torch.equal(t.codes, before.codes) and torch.equal(t.scale, before.scale)
    assert torch.equal(t.place, before.place + NEXT)


@given(st.data())
def test_any_cut_into_rows_gives_the_same_updates(data):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 40)))
    t, whole = weight_of(*shape), weight_of(*shape)
    new = whole.master() + values(*shape, seed=1) * 0.01
    whole.update_(new)
    edge = data.draw(st.integers(0, shape[0]))
    for part, values_ in ((t[:edge], new[:edge]), (t[edge:], new[edge:])):
        part.update_(values_)
    assert same(t, whole)


def test_rows_of_zeros_nan_infinity_and_extreme_scales():
    x = values(7, 33)
    x[0], x[1, 3], x[2, 4] = 0, math.nan, math.inf
    x[3] *= 1e-34
    x[4] *= 3e35
    x[5] *= 1e-44
    t = weight_of(7, 33)
    t.update_(x)
    found = t.master()
    assert torch.equal(found[0], torch.zeros(33)) and t.scale[0] == 1
    assert found[1:3].isnan().all(), "they stay visible in the whole row"
    for row in (3, 4, 6):
        assert relative(found[row], x[row]) < 0.02
    assert found[5].abs().max() < 1e-37 and found[3:].isfinite().all()
    t.update_(torch.ones(7, 33))
    assert torch.equal(t.master(), torch.ones(7, 33))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_low_precision_lose_no_small_updates(dtype):
    """Far below half of the last bit of the dtype, and of a code."""
    t = weight_of(64, 256, dtype=dtype)
    weight = nn.Parameter(t)
    start = weight.master().detach()
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    for _ in range(50):
        weight.grad = torch.ones(64, 256, dtype=dtype)
        optimizer.step()
    assert weight.dtype is dtype
    change = (weight.master().detach() - start).double().mean()
    # as many steps of a code, each a coin of variance below 1/4
    noise = float(t.scale.mean()) * math.sqrt(50 / 4 / t.numel())
    assert abs(change + 50 * 1e-4) < 5 * noise
