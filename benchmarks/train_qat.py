"""Quantization-aware training of a 1.2B Llama: a whole step, beside the same step without rounding.

The model, its batch and the table are those of `train_llama`. The head, which is tied to the embedding, is rounded too,
unless a row says "plain head". "gradients in int8" and "in float8" multiply gradients in these formats as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.optimizers import lowbit_choice
from benchmarks.registry import Problem, benchmark
from benchmarks.train_llama import TRAINING_TABLE, TrainingCandidate
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Float8MixedPrecision,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8MixedPrecision,
    Scheme,
    qat,
)
from lowbit.train_scheme import MixedPrecision
from recipes.llama import Llama

PLAIN = "bf16"


@dataclass(frozen=True)
class Rounded:
    """Prepares a model for QAT by these arguments of `lowbit.qat.prepare_`; `head`: whether the head is rounded."""

    scheme: Scheme
    scales: Literal["present", "learned"] = "present"
    gradients: MixedPrecision | None = None
    head: bool = True

    def __call__(self, model: Llama) -> None:
        chosen = self.scheme if self.head else {"head": None, "*": self.scheme}
        qat.prepare_(model, chosen, scales=self.scales, gradients=self.gradients)


INT8, FLOAT8 = Int8DynamicActivationInt8Weight(), Float8DynamicActivationFloat8Weight()
SCHEMES: dict[str, Callable[[Llama], Any]] = {
    "int8 x int8": Rounded(INT8),
    "int8 x int8, gradients in int8": Rounded(INT8, gradients=Int8MixedPrecision()),
    "int8 x int8, gradients in int8, plain head": Rounded(
        INT8, gradients=Int8MixedPrecision(), head=False
    ),
    "int8 x int8, learned, gradients in int8": Rounded(INT8, "learned", Int8MixedPrecision()),
    "float8 x float8": Rounded(FLOAT8),
    "float8 x float8, gradients in float8": Rounded(FLOAT8, gradients=Float8MixedPrecision()),
    "int4 g128": Rounded(Int4WeightOnly(128)),
    "int4 g128, learned": Rounded(Int4WeightOnly(128), "learned"),
    "int8 x int4 g128": Rounded(Int8DynamicActivationInt4Weight(128)),
}
TABLE = replace(
    TRAINING_TABLE,
    columns=tuple(
        {"/ torch fused": f"/ {PLAIN}", "peak - torch's": f"peak - {PLAIN}'s"}.get(name, name)
        for name in TRAINING_TABLE.columns
    ),
)


def candidates(batch: tuple[int, int]) -> Iterator[TrainingCandidate]:
    adamw8bit = lowbit_choice("AdamW8bit", "AdamW8bit")
    for name, prepare in {**SCHEMES, PLAIN: None}.items():
        yield TrainingCandidate(adamw8bit, batch, products=name, scheme=prepare)


@benchmark("train_qat", "quantization-aware training, a step of a 1.2B Llama", table=TABLE)
def train_qat() -> Iterator[Problem]:
    batch = (4, 4096)
    found = list(candidates(batch))
    yield Problem(f"batch {batch[0]} x {batch[1]}", found, found[-1].name)
