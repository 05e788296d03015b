"""Optimizers and training schemes by name, as one line of a configuration gives them.

A line is a name, or a call with literal keyword arguments:

    AdamW8bit    AdamW4bit(bf16_stochastic_round=True)    an optimizer: a class of lowbit.optim
    int8         float8(backward="e5m2")                  a training scheme

`lowbit.schemes.lines` has the lines of schemes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowbit import optim
from lowbit.optim import LowbitOptimizer
from lowbit.schemes.lines import made, named, parsed
from lowbit.schemes.low_bit_weights import BitNet, Int4Weight, Int8Weight
from lowbit.schemes.mixed_precision import Float8MixedPrecision, Int8MixedPrecision
from lowbit.schemes.training import TrainingScheme

PREFIX = "lowbit."
"""Distinguishes an optimizer of lowbit from one of torch with the same name: "lowbit.AdamW(state='bf16')"."""
OPTIMIZERS: dict[str, type[LowbitOptimizer]] = {
    name: kind
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, LowbitOptimizer) and kind is not LowbitOptimizer
}
TRAINING: dict[str, type[TrainingScheme]] = {
    "int8": Int8MixedPrecision,
    "float8": Float8MixedPrecision,
    "int8_weights": Int8Weight,
    "int4_weights": Int4Weight,
    "bitnet": BitNet,
}
"""Short names. The names of the classes are accepted too."""


def optimizer(line: str) -> tuple[type[LowbitOptimizer], dict[str, Any]]:
    """The class and the options of an optimizer. Raises ValueError for an unknown name."""
    name, options = parsed(line, "optimizer", "AdamW8bit(bf16_stochastic_round=True)")
    return named(name.removeprefix(PREFIX), "optimizer", OPTIMIZERS), options


def check_options(line: str, kind: type[LowbitOptimizer], options: dict[str, Any]) -> None:
    """Raise ValueError for an option that an optimizer does not have. `line`: what the message calls it."""
    try:
        kind([nn.Parameter(torch.zeros(1))], **options)
    except TypeError as error:
        raise ValueError(f"{line}: {error}") from error


def training_scheme(line: str) -> TrainingScheme:
    """The training scheme of a line. Raises ValueError for an unknown name, and for options that the scheme refuses."""
    name, options = parsed(line, "training scheme", "int8(grad_weight=False)")
    classes = {kind.__name__: kind for kind in TRAINING.values()}
    ours = "lowbit.schemes."  # bases of training schemes are among them
    own = {n: k for n, k in TrainingScheme.kinds.items() if not k.__module__.startswith(ours)}
    return made(named(name, "training scheme", {**TRAINING, **classes, **own}), options, line)
