"""The report of a calibration: that of a conversion, and what happened to each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowbit.convert import Report
from lowbit.inference.calibration.held_out import HeldOutLosses
from lowbit.inference.calibration.learned_rounding import Losses

if TYPE_CHECKING:  # lowbit.formats reads many files
    from lowbit.formats.report import ExportReport


@dataclass(frozen=True)
class LayerResult:
    """One weight.

    Attributes:
        name: fully qualified.
        method: the steps that ran on it.
        seconds: their time.
        before, after: the relative squared error of its outputs, rounded to nearest by min-max, and as the steps on
            layers left it:
            Σ ‖Q x̂ − W x‖² / Σ ‖W x̂‖², where x̂ are its inputs in the rounded model. x are those in the model in high
            precision where a step compares with it, else x̂. Without inputs: Σ (Q − W)² / Σ W².
        rows: input rows that it saw; for stacked experts of all together.
        unreached: matrices, such as experts, that saw none.
        has_few_rows: True if it saw some rows, and fewer than it has inputs.
        zeros: the share of its values that are 0, if it was pruned; else 0.
        had_batches: False where the call had none.
    """

    name: str
    method: str
    seconds: float
    before: float
    after: float
    rows: int
    unreached: int = 0
    has_few_rows: bool = False
    zeros: float = 0.0
    had_batches: bool = True

    def __str__(self) -> str:
        note = f"{self.method}, {self.seconds:.2f} s, error {self.before:.3e} -> {self.after:.3e}"
        if self.zeros:
            note += f", {self.zeros:.0%} zeros"
        if not self.rows:
            return f"{note}; {'no batch reached it' if self.had_batches else 'by the weight alone'}"
        return f"{note}; {self.unreached} experts saw no token" if self.unreached else note


@dataclass
class CalibrationReport(Report):
    """`print` it, or read `layers` beside what `lowbit.inference.Report` has.

    Attributes:
        layers: the results by name of the weight, in the order in which they were calibrated.
        learned: what learned rounding did to the loss of each block, or of the model, held-out sequences apart.
        held_out: the losses of each block, or other place, and of a model in memory as a whole, over the batches held
            out, by min-max and by the steps.
        notes: on many layers together.
        seconds: of the whole call.
        written: what `lowbit.export` wrote of a folder; None for a model in memory.
    """

    layers: dict[str, LayerResult] = field(default_factory=dict)
    learned: list[tuple[str, Losses]] = field(default_factory=list)
    held_out: list[tuple[str, HeldOutLosses]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    written: ExportReport | None = None

    def __str__(self) -> str:
        lines = [f"  learned rounding of {name}: {losses}" for name, losses in self.learned]
        lines += [f"  {name}: {losses}" for name, losses in self.held_out]
        return "\n".join([super().__str__(), *lines, *(f"  {note}" for note in self.notes)])


def held_out_note(losses: Sequence[tuple[str, HeldOutLosses]], held_out: int, seen: int) -> str:
    """How many batches were held out, and where min-max rounding stays. `held_out`, `seen`: numbers of batches."""
    better = "the steps are nowhere worse on them than min-max rounding"
    alone = [name for name, own in losses if not (own.kept or own.back)]
    where = [f"in {some_names(alone, 'places')}"] if alone else []
    if of_model := [name for _, own in losses for name in own.back]:
        where.append(f"for the whole model in {some_names(of_model, 'places')}")
    if where:
        better = f"min-max rounding is better on them {' and '.join(where)}, and stays there"
    return f"{held_out} of {held_out + seen} batches were held out; {better}"


def some_names(names: Sequence[str], kind: str = "weights") -> str:
    """The first three names, and the number of all if there are more. `kind`: what they name."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{len(names)} {kind} ({shown}, …)"
