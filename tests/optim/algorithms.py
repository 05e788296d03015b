"""The table of optimizers: classes, their variants by state format, combinations of options, bytes of state.

A contract is a test over this table (`test_algorithms`, `test_algorithm_checkpoints`, `test_reference`), so a new
algorithm of lowbit is tested by a row of `VARIANTS`, `STATEFUL` and `BYTES`, and by its cases. The tests expect
`weight_decay`, `maximize` and `betas` or `momentum` of it, and weights that show a gradient of NaN or infinity. The
steps of matrices of Muon and SOAP are not elementwise: they are in `VARIANTS` only (and Muon in `BYTES`), and
`test_muon` and `test_soap` test the rest.
"""

from __future__ import annotations

import pytest
import torch

from lowbit import optim
from lowbit.tensor import CodebookTensor
from tests.optim.problems import FORMATS

VARIANTS = {
    optim.AdamW: (optim.AdamW4bit, optim.AdamW8bit, optim.AdamWFp8),
    optim.Adam: (optim.Adam4bit, optim.Adam8bit, optim.AdamFp8),
    optim.Lion: (optim.Lion4bit, optim.Lion8bit, optim.LionFp8),
    optim.SGD: (optim.SGD4bit, optim.SGD8bit, optim.SGDFp8),
    optim.AdEMAMix: (optim.AdEMAMix4bit, optim.AdEMAMix8bit, optim.AdEMAMixFp8),
    optim.Muon: (optim.Muon4bit, optim.Muon8bit, optim.MuonFp8),
    optim.SOAP: (optim.SOAP4bit, optim.SOAP8bit, optim.SOAPFp8),
}
CASES = {
    "AdamW": (optim.AdamW, {}),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True, "weight_decay": 0.3, "maximize": True}),
    "AdamW no momentum": (optim.AdamW, {"betas": (0.0, 0.5), "eps": 1e-3, "weight_decay": 0.0}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True, "maximize": True}),
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
by_class = pytest.mark.cover("pairs", cls=lambda cls: cls.__name__, options=lambda options: ())
"""The usual run meets each class with each format of states, with the cases of the class in turn."""
every = pytest.mark.parametrize("state", FORMATS)
STATEFUL = {cls: {} for cls in VARIANTS if cls not in (optim.Muon, optim.SOAP)} | {
    optim.SGD: {"momentum": 0.9}
}
"""Elementwise algorithms, with the options under which they have states."""
classes = pytest.mark.parametrize("cls", STATEFUL, ids=lambda c: c.__name__)
ONE_MOMENT = {"4bit": 0.53125, "8bit": 1.015625, "float8": 1.015625, "bf16": 2, "fp32": 4}
TWO_MOMENTS = {state: 2 * each for state, each in ONE_MOMENT.items()}
WITH_SLOW = {"4bit": 3.0625, "8bit": 4.03125, "float8": 4.03125, "bf16": 6, "fp32": 12}
BYTES = {
    **dict.fromkeys((optim.AdamW, optim.Adam), TWO_MOMENTS),
    **dict.fromkeys((optim.Lion, optim.SGD, optim.Muon), ONE_MOMENT),
    optim.AdEMAMix: WITH_SLOW,
}
"""Bytes of all states, an element."""
SHAPES = [(40, 130), (97, 131), (5, 7, 137), (13,), (), (1, 1), (0, 5)]
ODD_SHAPES = [*SHAPES, (8, 16, 3, 37), (2, 2, 2, 2, 300), (4099, 1), (1, 5000), (1,), (3, 0)]


def decoded(value, dtype=torch.float64):
    value = value.dequantize() if isinstance(value, CodebookTensor) else value
    return value.to(dtype, copy=True)
