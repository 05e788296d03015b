"""Shared by the tests of Lion, SGD and AdEMAMix: the classes, and combinations of their options."""

from __future__ import annotations

import pytest
import torch

from lowbit import optim
from lowbit.tensor import CodebookTensor
from tests.optim.problems import FORMATS

DROP_IN = {
    optim.Lion: (optim.Lion4bit, optim.Lion8bit, optim.LionFp8),
    optim.SGD: (optim.SGD4bit, optim.SGD8bit, optim.SGDFp8),
    optim.AdEMAMix: (optim.AdEMAMix4bit, optim.AdEMAMix8bit, optim.AdEMAMixFp8),
}
CASES = {
    "Lion": (optim.Lion, {}),
    "Lion all": (optim.Lion, {"betas": (0.5, 0.8), "weight_decay": 0.3, "maximize": True}),
    "SGD": (optim.SGD, {}),
    "SGD decay": (optim.SGD, {"weight_decay": 0.3, "maximize": True}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9}),
    "SGD dampened": (optim.SGD, {"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.3}),
    "SGD Nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "AdEMAMix": (optim.AdEMAMix, {}),
    "AdEMAMix warmup": (optim.AdEMAMix, {"t_alpha_beta3": 4, "weight_decay": 0.3, "alpha": 2.0}),
    "AdEMAMix all": (
        optim.AdEMAMix,
        {"betas": (0.0, 0.9, 0.99), "t_alpha_beta3": 3, "eps": 1e-3, "maximize": True},
    ),
}
cases = pytest.mark.parametrize("cls,options", CASES.values(), ids=CASES)
classes = pytest.mark.parametrize("cls", DROP_IN, ids=lambda c: c.__name__)
every = pytest.mark.parametrize("state", FORMATS)
MOMENTUM = {optim.Lion: {}, optim.SGD: {"momentum": 0.9}, optim.AdEMAMix: {}}
SHAPES = [(40, 130), (97, 131), (5, 7, 137), (13,), (), (1, 1), (0, 5)]


def decoded(value, dtype=torch.float64):
    value = value.dequantize() if isinstance(value, CodebookTensor) else value
    return value.to(dtype, copy=True)
