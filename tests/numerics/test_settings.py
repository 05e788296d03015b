"""Whole numbers of numpy, as loops over arrays and tables of settings give them, are taken, and kept as ints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.inference import AWQ, GPTQ, LearnedRounding
from lowbit.train import save_in_int8

FOUR, EIGHT = np.int64(4), np.int32(8)


def group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return optimizer.param_groups[0]


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(8, 8))]


def prepared() -> nn.Module:
    model = nn.Linear(8, 8)
    lb.qat.prepare_(model, lb.Int4WeightOnly(8))
    return model


KEPT: dict[str, tuple[Callable[[], Any], Any]] = {
    "Int": (lambda: lb.Int(FOUR).bits, 4),
    "PerGroup": (lambda: lb.PerGroup(EIGHT).group_size, 8),
    "PerBlock": (lambda: lb.PerBlock(FOUR, EIGHT).shape[0], 4),
    "preset": (lambda: lb.IntxWeightOnly(FOUR, EIGHT).weight.format.bits, 4),
    "Int4Weight": (lambda: lb.Int4Weight(group_size=EIGHT).group_size, 8),
    "seed of a scheme": (lambda: lb.Int8MixedPrecision(seed=FOUR).seed, 4),
    "beside": (lambda: lb.Int8MixedPrecision(beside=FOUR).beside, 4),
    "seed of an optimizer": (lambda: group(lb.optim.AdamW8bit(weights(), seed=FOUR))["seed"], 4),
    "ns_steps": (lambda: group(lb.optim.Muon8bit(weights(), ns_steps=FOUR))["ns_steps"], 4),
    "t_alpha_beta3": (
        lambda: group(lb.optim.AdEMAMix(weights(), t_alpha_beta3=EIGHT))["t_alpha_beta3"],
        8,
    ),
    "AWQ": (lambda: AWQ(grid=EIGHT).grid, 8),
    "GPTQ": (lambda: GPTQ(sweeps=FOUR).sweeps, 4),
    "LearnedRounding": (lambda: LearnedRounding(steps=EIGHT).steps, 8),
    "Schedule": (lambda: lb.qat.Schedule(prepared(), start=FOUR).start, 4),
}


@pytest.mark.parametrize("name", KEPT)
def test_whole_numbers_of_numpy_are_kept_as_ints(name: str) -> None:
    made, expected = KEPT[name]
    found = made()
    assert type(found) is int and found == expected


def test_a_scheme_of_numbers_of_numpy_is_the_scheme_of_ints(tmp_path: Any) -> None:
    """As dict keys, in JSON and in files."""
    scheme = lb.Int4WeightOnly(EIGHT)
    assert scheme == lb.Int4WeightOnly(8) and hash(scheme) == hash(lb.Int4WeightOnly(8))
    assert repr(scheme) == repr(lb.Int4WeightOnly(8))
    model = nn.Sequential(nn.Linear(16, 8))
    lb.quantize_(model, scheme)
    lb.save(model, tmp_path / "model.safetensors")
    again = lb.load(tmp_path / "model.safetensors")
    assert torch.equal(again["0.weight"].dequantize(), model[0].weight.dequantize())


def test_a_number_of_numpy_for_saved_activations() -> None:
    layer = nn.Linear(8, 8)
    with save_in_int8(layer, min_numel=EIGHT):
        loss = layer(torch.randn(4, 8).requires_grad_()).square().sum()
    loss.backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("value", [np.float64(8), np.bool_(True), "8", True, 8.0], ids=repr)
def test_other_values_are_no_whole_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="group_size must be a whole number of at least 1"):
        lb.PerGroup(value)
