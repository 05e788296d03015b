"""The ways to fine-tune with QAT that the recovery recipe compares, and its presets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import lowbit
from recipes import presets
from recipes.phases import scheme
from recipes.training import TrainingConfig

GROUP = 32

TEACHER_COMPUTE = 4 / 3
"""Compute of a step with a teacher, in steps without: forward and backward take three times the forward pass."""


@dataclass(frozen=True)
class RecoveryRun:
    """One way to fine-tune with QAT.

    Attributes:
        bits: bits of a weight; None trains in high precision.
        group_size: None gives each row one scale.
        int8: activations are rounded to int8, with one scale a token.
        scales: the argument of `lowbit.qat.prepare_`.
        distils: True if part of the loss is the divergence from the model in high precision.
        rank: rank of the adapters that train in place of the blocks' weights.
        length: steps, as a multiple of the branch in high precision.
    """

    about: str
    bits: int | None
    group_size: int | None = GROUP
    int8: bool = False
    scales: Literal["learned", "present"] = "learned"
    distils: bool = True
    rank: int | None = None
    length: float = 1.0

    def scheme(self, config: TrainingConfig) -> lowbit.Scheme | None:
        """The quick start's scheme for these bits, with int8 activations where the variant has them."""
        if self.bits is None:
            return None
        own = scheme(dataclasses.replace(config, group_size=self.group_size), self.bits)
        if not self.int8:
            return own
        activation = lowbit.Int8DynamicActivationInt4Weight().activation
        return dataclasses.replace(own, activation=activation)

    @property
    def control(self) -> str:
        """The name of the run in high precision that this one is compared with."""
        return "high" if self.rank is None else "lora-high"

    @property
    def rounded(self) -> str:
        """The name of the control that is rounded after training by the same scheme."""
        after = "" if self.rank is None else "lora "
        return f"rounded {after}{'row' if self.group_size is None else 'g32'}-int{'8x' * self.int8}{self.bits}"

    @property
    def baseline(self) -> str:
        """The name of the rounded model that the share counts from."""
        return self.rounded + WITH_ZERO if self.bits == 2 else self.rounded

    def rounded_models(self, config: TrainingConfig) -> dict[str, lowbit.Scheme]:
        """The scheme by name of each model that is rounded after training: at 2 bits also the grid with a zero."""
        own = self.scheme(config)
        found = {} if own is None else {self.rounded: own}
        if self.bits == 2:
            zero = lowbit.IntxWeightOnly(2, self.group_size, "symmetric")
            found[self.rounded + WITH_ZERO] = zero
        return found


def variants() -> dict[str, RecoveryRun]:
    plain: dict[str, Any] = {"scales": "present", "distils": False}
    found = {f"g32-int{bits}": RecoveryRun("full", bits) for bits in (4, 3, 2)}
    found["row-int4"] = RecoveryRun("full, a scale a row", 4, None)
    found["g32-int8xint4"] = RecoveryRun("full, int8 activations", 4, int8=True)
    found["lora-high"] = RecoveryRun("LoRA in high precision", None, rank=LORA_RANK)
    found |= {f"lora-int{bits}": RecoveryRun("LoRA", bits, rank=LORA_RANK) for bits in (4, 2)}
    for bits in (4, 3, 2):
        found[f"plain-int{bits}"] = RecoveryRun("straight-through", bits, **plain)
    for bits in (4, 3, 2):
        about = "straight-through, equal compute"
        found[f"compute-int{bits}"] = RecoveryRun(about, bits, **plain, length=TEACHER_COMPUTE)
    return found


WITH_ZERO = ", {−2 … 1}"

LORA_RANK = 32

RUNS = variants()


def tiny() -> TrainingConfig:
    """The quick start's 0.4M parameters: about a minute a run on one CPU core."""
    return presets.tiny()


def gpu() -> TrainingConfig:
    """The quick start's 99M parameters, trained on 69M tokens of the source of the installed packages. The blocks are
    compiled. No dropout: the text is read two or three times at most.

    The rate falls to zero in nearly a straight line. With this rate in the branch, the model in high
    precision ends within 0.0012 nats of the best of three rates. QAT starts at twice the rate of the branch that it is
    compared with.
    """
    base = presets.gpu()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dropout=0.0),
        corpus="installed",
        steps=2100,
        branch_steps=250,
        warmup_steps=100,
        decay_steps=800,
        branch_lr=0.25,
        qat_lr=2.0,
        compile=True,
    )


PRESETS = {"tiny": tiny, "gpu": gpu}
