"""Averages of weights by copies of plain values: they keep up, and what does not change stays as it is."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

import lowbit
from lowbit import Int8Weight, Int8WeightOnly
from lowbit.tensor import AffineTensor, Int8WeightTensor
from lowbit.tensor.trained import remainder
from tests.garbage import only_new
from tests.tensor.cases import (
    CASES,
    by_class,
    every_case,
    every_frozen_weight,
    every_trainable,
    same,
    values,
)

SHAPE = (8, 96)
DECAY, UPDATES = 0.99, 60


def formula(average, weight):
    average.copy_(DECAY * average + (1 - DECAY) * weight)


def from_the_right(average, weight):
    average.copy_(average * DECAY + weight * (1 - DECAY))


def difference(average, weight):
    average.copy_(average - (average - weight) * (1 - DECAY))


def lerp(average, weight):
    average.copy_(torch.lerp(average, weight, 1 - DECAY))


def through_data(average, weight):
    average.data.copy_(average.detach() * DECAY + weight.data * (1 - DECAY))


def lists(average, weight):
    scaled = torch._foreach_mul([average], DECAY)
    torch._foreach_add_(scaled, torch._foreach_mul([weight], 1 - DECAY))
    torch._foreach_copy_([average], scaled)


def in_place(average, weight):
    average.mul_(DECAY).add_(weight, alpha=1 - DECAY)


def lerp_in_place(average, weight):
    average.lerp_(weight, 1 - DECAY)


def subtracted(average, weight):
    average.sub_((1 - DECAY) * (average - weight))


COPIES = [formula, from_the_right, difference, lerp, through_data, lists]
IN_PLACE = [in_place, lerp_in_place, subtracted]


def expected(start, end, updates=UPDATES):
    return end + (start - end) * DECAY**updates


def share(average, start, end):
    """The share of the way from `start` to `end` that a weight has moved."""
    way = end - start
    return (((average - start) * way).sum() / way.square().sum()).item()


@by_class
@every_trainable
@pytest.mark.parametrize("update", COPIES + IN_PLACE)
@torch.no_grad()
def test_an_average_keeps_up(case, update):
    average, weight = case.make(SHAPE), case.make(SHAPE, seed=1)
    start, end = average.master().clone(), weight.master()
    for _ in range(UPDATES):
        update(average, weight)
    due = expected(start, end)
    assert abs(share(average.master(), start, end) - share(due, start, end)) < 0.01
    if isinstance(average, Int8WeightTensor) and update in COPIES:
        nearest = (average.dequantize() - due).abs() / average.spread_scale()
        assert nearest.max() < 0.51  # rounded once, in place of once a turn


FUNCTIONS = {
    "ema": {"avg_fn": get_ema_avg_fn(DECAY)},
    "ema of lists": {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
    "swa": {"avg_fn": get_swa_avg_fn()},
    "swa of lists": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "default": {},
}


@pytest.mark.cover("values")
@every_trainable
@pytest.mark.parametrize("name", FUNCTIONS)
def test_averaged_models_of_torch(case, name):
    model = nn.Module()
    model.weight = nn.Parameter(case.make(SHAPE))
    average = AveragedModel(model, **FUNCTIONS[name])
    average.update_parameters(model)
    start = model.weight.detach().master().clone()
    with torch.no_grad():
        model.weight.copy_(case.make(SHAPE, seed=1))
    end = model.weight.detach().master()
    for _ in range(UPDATES):
        average.update_parameters(model)
    due = expected(start, end) if "ema" in name else (start + UPDATES * end) / (UPDATES + 1)
    found = average.module.weight.detach().master()
    assert abs(share(found, start, end) - share(due, start, end)) < 0.02


@pytest.mark.cover("values")
@every_frozen_weight
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_averaged_model_keeps_its_frozen_weights(case, name):
    """As QLoRA has them: they do not change, beside an adapter that does."""
    model = nn.Module()
    model.adapter = nn.Parameter(torch.zeros(3))
    model.weight = nn.Parameter(case.make(SHAPE), requires_grad=False)
    average = AveragedModel(model, **FUNCTIONS[name])
    for _ in range(3):
        average.update_parameters(model)
        model.adapter.data += 1.0
    assert same(average.module.weight.data, model.weight.data)
    assert 0 < average.module.adapter.min() < 3


@pytest.mark.parametrize("trained_first", [False, True])
def test_autograd_sees_changes_of_lists(trained_first):
    frozen = AffineTensor.from_float(values(SHAPE), Int8WeightOnly())
    trained = Int8WeightTensor(values(SHAPE), Int8Weight())
    weights = [trained, frozen] if trained_first else [frozen, trained]
    y = F.linear(torch.randn(3, 96, requires_grad=True), frozen)
    torch._foreach_mul_(weights, 0.5)
    assert all(w._version > 0 for w in weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.filterwarnings("error")
@every_frozen_weight
@pytest.mark.parametrize("update", IN_PLACE)
@torch.no_grad()
def test_averages_in_place_keep_frozen_weights(case, update):
    weight = case.make(SHAPE)
    if update is in_place and weight.spec.scales is not None:
        pytest.skip("its scales do not hold every factor")
    average = weight.clone()
    for _ in range(3):
        update(average, weight)
    torch.testing.assert_close(average.dequantize(), weight.dequantize())


@by_class
@every_trainable
def test_an_avg_fn_without_no_grad_keeps_up(case):
    """torch's own functions turn gradients off, and AveragedModel does not for those of a user."""
    model, start = nn.Module(), case.make(SHAPE)
    model.weight = nn.Parameter(case.make(SHAPE, seed=1))
    average = AveragedModel(model, avg_fn=lambda a, w, _: a + (w - a) * (1 - DECAY))
    average.update_parameters(model)
    end = model.weight.detach().master()
    with torch.no_grad():
        average.module.weight.copy_(start)
    for _ in range(UPDATES):
        average.update_parameters(model)
    found, due = average.module.weight.detach().master(), expected(start.master(), end)
    assert abs(share(found, start.master(), end) - share(due, start.master(), end)) < 0.01


@by_class
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", COPIES[:3])
@pytest.mark.filterwarnings("ignore:an average of int8 weights is computed in")
@torch.no_grad()
def test_the_average_of_a_weight_that_does_not_change_is_this_weight(case, update, dtype):
    """As that of the frozen weights beside an adapter. Most schemes would choose other scales for their own values."""
    if not case.is_weight or (case.is_trainable and dtype is torch.bfloat16):
        pytest.skip("states are not averaged; bfloat16 arithmetic moves trained weights")
    for shape in (SHAPE, (3, 16, 96)):
        weight = case.make(shape, dtype=dtype)
        average = weight.clone()
        for _ in range(5):
            update(average, weight)
        if case.is_trainable:
            torch.testing.assert_close(average.master(), weight.master())
        else:
            assert same(average, weight)


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.bfloat16, 1.01), (torch.float16, 1.001), (torch.float32, 1.0001)]
)
@pytest.mark.parametrize(
    "scheme", [lowbit.Int8WeightOnly(), lowbit.Int4WeightOnly(32), lowbit.Float8WeightOnly()]
)
@torch.no_grad()
def test_a_small_factor_is_not_taken_for_rounding(scheme, dtype, factor):
    weight = AffineTensor.from_float(values((64, 96), 3).to(dtype), scheme)
    assert weight.holds(weight.dequantize()) and not weight.holds(weight.dequantize() * factor)
    before = weight.dequantize().double().norm()
    weight.copy_(weight.dequantize() * factor)
    grown = weight.dequantize().double().norm() / before - 1
    assert 0.3 * (factor - 1) < grown < 2 * (factor - 1)


def int8(seed=0, dtype=torch.float32):
    return Int8WeightTensor(values(SHAPE, seed, dtype), Int8Weight(), "weight")


@torch.no_grad()
def test_a_checkpoint_rounds_to_nearest_whatever_was_read_before():
    weight, plain = int8(), values(SHAPE, 7)
    fresh = Int8WeightTensor(plain, Int8Weight(), "weight")
    for _ in range(2):
        assert (weight - plain).abs().max() > 0  # arithmetic
        weight.copy_(plain)
        assert torch.equal(weight.codes, fresh.codes) and torch.equal(weight.scale, fresh.scale)
        assert torch.equal(weight.dequantize(), fresh.dequantize())
    module = nn.Linear(96, 8, bias=False)
    module.weight = nn.Parameter(int8())
    module.load_state_dict({"weight": plain})
    assert torch.equal(module.weight.codes, fresh.codes)


@torch.no_grad()
@only_new()
def test_what_ends_a_remainder():
    other = int8(3)

    def averaged():
        weight = int8()
        formula(weight, other)
        assert remainder.of(weight.codes) is not None
        return weight

    weight = averaged()
    master = weight.master()
    assert not torch.equal(master, weight.dequantize())
    weight.copy_(other)
    assert torch.equal(weight.master(), other.dequantize())
    weight = averaged()
    torch.testing.assert_close(weight.master(), master)
    weight.add_(1e-3)
    assert remainder.of(weight.codes) is None
    saved = pickle.loads(pickle.dumps(averaged()))
    assert torch.equal(saved.master(), saved.dequantize())
    gc.collect(0)
    known = len(remainder._REMAINDERS)
    weight = averaged()
    assert len(remainder._REMAINDERS) >= known
    del weight
    gc.collect(0)
    assert len(remainder._REMAINDERS) <= known


@torch.no_grad()
def test_a_model_and_its_average_are_swapped():
    """As Lightning's callback does before and after validation."""
    average, weight = int8(), int8(1)
    for _ in range(5):
        formula(average, weight)
    master, own = average.master(), weight.master()
    assert not torch.equal(master, average.dequantize())
    for _ in range(2):
        held = average.data.clone()
        average.data.copy_(weight.data)
        weight.data.copy_(held)
        average, weight = weight, average
        torch.testing.assert_close(average.master(), master, rtol=0, atol=0)
        torch.testing.assert_close(weight.master(), own, rtol=0, atol=0)


def test_training_keeps_no_remainder():
    weight = nn.Parameter(int8())
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    for _ in range(2):
        (weight * 2).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert weight.sub(1.0).isfinite().all()  # a program that watches its weights
    optimizer.step()
    assert remainder.of(weight.codes) is None


@torch.no_grad()
def test_a_bfloat16_average_says_what_it_loses():
    """torch's arithmetic is bfloat16, for plain weights as well."""
    average, weight = int8(dtype=torch.bfloat16), int8(1, torch.bfloat16)
    with pytest.warns(UserWarning, match=r"computed in torch\.bfloat16.*multi_avg_fn.*lerp_"):
        formula(average, weight)
    start, end = int8(dtype=torch.bfloat16).master(), weight.master()
    average = int8(dtype=torch.bfloat16)
    for _ in range(UPDATES):  # in float32
        average.copy_(average.float() * DECAY + weight.float() * (1 - DECAY))
    assert abs(share(average.master(), start, end) - (1 - DECAY**UPDATES)) < 0.01


def test_every_representation_is_here():
    kinds = {case.kind for case in CASES if case.is_trainable}
    assert Int8WeightTensor in kinds and len(kinds) > 2
