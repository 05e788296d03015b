"""SensitivityReport: how much each weight of a model loses by rounding, as a table, JSON, a picture and a mixed plan.

`lowbit.qat.report` makes it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit import optional
from lowbit.convert import Costs, Plan, PlanChoice, pattern_of, unit_of
from lowbit.schemes.scheme import Scheme
from lowbit.tracing.report import aligned


@dataclass(frozen=True)
class Sensitivity:
    """One weight, rounded alone by one scheme.

    Attributes:
        weight: its fully qualified name; for a tied one the first.
        tied: its other names.
        shape: of the weight.
        scheme: by which it is rounded.
        format: the scheme in a word, such as "int4-g32" or "int8-row-int8-token" (the activation's format last).
        nbytes: bytes that it takes when it is converted, scales included.
        plain_nbytes: bytes that it takes now.
        weight_snr: 10 · log10(Σ w² / Σ (w − ŵ)²) in dB, at most 200, also where rounding changes nothing.
        activation_snr: the same of the inputs of its products, over all batches; None where the scheme does not round
            them, or no product ran.
        clipped: share of the weight's elements, 0 to 1, that lie beyond the last code and clip to it.
        loss: the measure (`SensitivityReport.measure`) with this weight rounded and all others in high precision.
        reached: whether a product used the weight. Its loss says nothing where none did.
    """

    weight: str
    tied: tuple[str, ...]
    shape: tuple[int, ...]
    scheme: Scheme
    format: str
    nbytes: int
    plain_nbytes: int
    weight_snr: float
    activation_snr: float | None
    clipped: float
    loss: float
    reached: bool

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bits(self) -> float:
        """Bits an element, scales and padding included."""
        return 8 * self.nbytes / max(self.elements, 1)


@dataclass(frozen=True)
class SensitivityReport:
    """The result of `lowbit.qat.report`: `print` it, or read `rows`.

    Attributes:
        measure: what `loss` means: "loss", "kl" (nats a row of logits) or "error" (‖y − ŷ‖² / ‖y‖² of the output y).
        baseline: the measure of the model in high precision.
        together: the measure with all weights rounded, for each candidate scheme.
        rows: each weight by each candidate scheme, in the order of the model.
    """

    measure: str
    baseline: float
    together: tuple[float, ...]
    rows: tuple[Sensitivity, ...]

    def __str__(self) -> str:
        """A table, the most sensitive weight first."""
        lost = {id(row): row.loss - self.baseline for row in self.rows}
        rows = sorted(self.rows, key=lambda row: -lost[id(row)])
        table = [HEAD, *(_cells(row, lost[id(row)]) for row in rows)]
        every = ", ".join(f"{value:.6g}" for value in self.together)
        head = f"{self.measure}: {self.baseline:.6g} in high precision, {every} with all weights rounded"
        return f"{head}\n{aligned(table, left=(0, 1))}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        rows = [{**asdict(row), "scheme": row.scheme.to_dict()} for row in self.rows]
        return {
            "measure": self.measure,
            "baseline": self.baseline,
            "together": list(self.together),
            "rows": [{**row, "tied": [*row["tied"]], "shape": [*row["shape"]]} for row in rows],
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture, in the format that the suffix of `path` names: for each weight a bar of what its rounding
        adds to the measure, one for each candidate scheme, and its SNR. Needs matplotlib, which the extra `cli`
        brings."""
        figures = optional.imported("matplotlib.figure", "SensitivityReport.draw needs", "cli")
        names = list(dict.fromkeys(row.weight for row in self.rows))
        formats = list(dict.fromkeys(row.format for row in self.rows))
        figure = figures.Figure(
            figsize=(11, 1.5 + 0.22 * len(names) * len(formats)), layout="constrained"
        )
        lost, snr = figure.subplots(1, 2, sharey=True)
        height = 0.8 / len(formats)
        for i, format in enumerate(formats):
            own = [row for row in self.rows if row.format == format]
            at = [names.index(row.weight) + (i + 0.5) * height - 0.4 for row in own]
            lost.barh(at, [row.loss - self.baseline for row in own], height, label=format)
            snr.barh(at, [row.weight_snr for row in own], height)
        lost.set_yticks(range(len(names)), names)
        lost.invert_yaxis()
        lost.set_title(f"{self.measure} above high precision, this weight alone rounded")
        snr.set_title("SNR of the weight (dB)")
        lost.legend(frameon=False)
        figure.savefig(path)

    def plan(
        self,
        bits: float | None = None,
        *,
        damage: float | None = None,
        high_precision: bool | None = None,
    ) -> Plan:
        """The plan (`lowbit.Plan`) with the least loss under a budget of bits, or the fewest bits under one of damage.

        Weights choose among the candidate schemes that were measured; siblings such as q, k and v take one. What the
        plan loses is estimated as the sum of what each weight loses alone. `lowbit.autoquant` also measures times, and
        the finished plan. Call the flow with the `filter_fn` of the report.

        Args:
            bits: mean bits an element over the weights of the report, scales included.
            damage: the most that may be added to the measure.
            high_precision: whether a weight may also stay as it is, for the bits of its dtype. None: if one candidate
                was measured.

        Raises:
            TypeError: not exactly one budget, or one that is not a number.
            ValueError: no choice for each weight holds the budget.
        """
        if high_precision is None:
            high_precision = len(self.together) == 1
        return self.costs(high_precision).plan(bits, damage=damage)

    def costs(self, high_precision: bool = False) -> Costs:
        """The rows as the choices of a plan. `high_precision`: weights may also stay as they are."""
        by_weight: dict[str, list[Sensitivity]] = {}
        for row in self.rows:
            by_weight.setdefault(row.weight, []).append(row)
        units: dict[str, list[list[Sensitivity]]] = {}
        for name, own in by_weight.items():
            unit = units.setdefault(unit_of(name, own[0].shape), [])
            if unit and not _common([*unit, own]):
                unit = units.setdefault(name, [])  # it shares no candidate with its siblings
            unit.append(own)
        choices = []
        for name, weights in units.items():
            options = [[_with(own, scheme) for own in weights] for scheme in _common(weights)]
            choices += [_choice(name, rows, self.baseline) for rows in options]
            if high_precision:
                choices.append(_plain_choice(name, [own[0] for own in weights]))
        elements = sum(own[0].elements for own in by_weight.values())
        return Costs(tuple(choices), elements, self.measure)


def _common(weights: list[list[Sensitivity]]) -> list[Scheme]:
    """The schemes by which all of these weights were rounded."""
    first, *others = weights
    return [row.scheme for row in first if all(_has(own, row.scheme) for own in others)]


def _has(rows: list[Sensitivity], scheme: Scheme) -> bool:
    return any(row.scheme == scheme for row in rows)


def _with(rows: list[Sensitivity], scheme: Scheme) -> Sensitivity:
    return next(row for row in rows if row.scheme == scheme)


def _choice(unit: str, rows: list[Sensitivity], baseline: float) -> PlanChoice:
    schemes = {pattern_of((row.weight, *row.tied)): row.scheme for row in rows}
    lost = sum(row.loss - baseline for row in rows)
    return PlanChoice(unit, schemes, sum(row.nbytes for row in rows), lost)


def _plain_choice(unit: str, rows: list[Sensitivity]) -> PlanChoice:
    schemes = dict.fromkeys(pattern_of((row.weight, *row.tied)) for row in rows)
    return PlanChoice(unit, schemes, sum(row.plain_nbytes for row in rows), 0.0)


HEAD = ("weight", "format", "bits", "SNR dB", "activation dB", "clipped", "loss", "more")


def _cells(row: Sensitivity, lost: float) -> tuple[str, ...]:
    activation = "" if row.activation_snr is None else f"{row.activation_snr:.1f}"
    name = " = ".join((row.weight, *row.tied))
    measured = (f"{row.loss:.6g}", f"{lost:+.3g}") if row.reached else ("not reached", "")
    numbers = f"{row.bits:.2f}", f"{row.weight_snr:.1f}", activation, f"{row.clipped:.2%}"
    return (name, row.format, *numbers, *measured)
