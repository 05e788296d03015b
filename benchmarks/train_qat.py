"""Quantization-aware training of a 1.2B Llama: a whole step, beside the same step without rounding.

The model, its batch and the table are those of `train_llama`. The seven linears of each block are rounded, and not the
head. "gradients in int8" and "in float8" multiply gradients in these formats as well. "kernel": where compiled graphs
call the fused kernel, if it is not the default of `lowbit.linear.fused_rounding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.optimizers import torch_fused
from benchmarks.registry import Problem, Result, Row, benchmark
from benchmarks.report import ratio
from benchmarks.train_llama import KINDS, TRAINING_TABLE, TrainingCandidate, kind_cells
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
from lowbit.linear import fused_rounding
from lowbit.schemes.mixed_precision import MixedPrecision
from recipes.llama import Llama

PLAIN = "bf16"


@dataclass(frozen=True)
class Rounded:
    """Prepares the blocks of a model for QAT by these arguments of `lowbit.qat.prepare_`.

    Attributes:
        kernel: where compiled graphs call the fused kernel.
    """

    scheme: Scheme
    scales: Literal["present", "learned"] = "present"
    gradients: MixedPrecision | None = None
    kernel: Literal["nowhere", "backward", "everywhere"] = fused_rounding.IN_GRAPHS

    def __call__(self, model: Llama) -> None:
        fused_rounding.IN_GRAPHS = self.kernel
        chosen = {"head": None, "*": self.scheme}
        qat.prepare_(model, chosen, scales=self.scales, gradients=self.gradients)


INT4, INT8 = Int4WeightOnly(128), Int8DynamicActivationInt8Weight()
INT8_INT4, FLOAT8 = Int8DynamicActivationInt4Weight(32), Float8DynamicActivationFloat8Weight()
SCHEMES: dict[str, Rounded] = {
    "int4 g128": Rounded(INT4),
    "int4 g128, learned": Rounded(INT4, "learned"),
    "int8 x int4 g32": Rounded(INT8_INT4),
    "int8 x int4 g32, learned": Rounded(INT8_INT4, "learned"),
    "int8 x int8": Rounded(INT8),
    "int8 x int8, gradients in int8": Rounded(INT8, gradients=Int8MixedPrecision()),
    "int8 x int8, learned, gradients in int8": Rounded(INT8, "learned", Int8MixedPrecision()),
    "float8 x float8, gradients in float8": Rounded(FLOAT8, gradients=Float8MixedPrecision()),
}
IN_GRAPHS: dict[str, Rounded] = {
    f"{name}, kernel {where}": replace(SCHEMES[name], kernel=where)
    for where in ("nowhere", "backward", "everywhere")
    if where != fused_rounding.IN_GRAPHS
    for name in ("int4 g128", "int8 x int4 g32")
}


def candidates(batch: tuple[int, int], compile: bool) -> Iterator[TrainingCandidate]:
    rows: dict[str, Any] = {**SCHEMES, **(IN_GRAPHS if compile else {}), PLAIN: None}
    for name, prepare in rows.items():
        yield TrainingCandidate(
            torch_fused(), batch, products=name, scheme=prepare, compile=compile
        )


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    cost, plain = row.measured, result.reference.measured
    peaks = cost.peak, plain and plain.peak
    return [
        f"{cost.seconds * 1e3:.1f}",
        ratio(cost.seconds, plain and plain.seconds),
        "" if cost.peak is None else f"{cost.peak:.2f}",
        "" if None in peaks else f"{peaks[0] / peaks[1]:.3f}",
        *kind_cells(cost.kinds),
    ]


TABLE = replace(
    TRAINING_TABLE,
    columns=(
        *("step ms", f"/ {PLAIN}", "peak GiB", f"/ {PLAIN}'s"),
        *(f"{name} GiB" for name in KINDS),
    ),
    cells=cells,
)


@benchmark("train_qat", "quantization-aware training, a step of a 1.2B Llama", table=TABLE)
def train_qat() -> Iterator[Problem]:
    batch = (4, 4096)
    for how, compile in (("compiled", True), ("eager", False)):
        found = list(candidates(batch, compile))
        yield Problem(f"{how}, batch {batch[0]} x {batch[1]}", found, found[-1].name)
