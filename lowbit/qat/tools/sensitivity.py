"""SensitivityReport: how much each weight of a model loses by rounding, as a table, JSON, a picture and a mixed plan.

`lowbit.qat.report` makes it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from lowbit import optional
from lowbit.qat.tools.plan import Choice, Plan, choose
from lowbit.schemes.scheme import Scheme


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
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in table
        ]
        every = ", ".join(f"{value:.6g}" for value in self.together)
        head = f"{self.measure}: {self.baseline:.6g} in high precision, {every} with all weights rounded"
        return "\n".join([head, *lines])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `SensitivityReport.from_dict` reads it back."""
        rows = [{**asdict(row), "scheme": row.scheme.to_dict()} for row in self.rows]
        return {
            "measure": self.measure,
            "baseline": self.baseline,
            "together": list(self.together),
            "rows": [{**row, "tied": [*row["tied"]], "shape": [*row["shape"]]} for row in rows],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The report that `to_dict` described. Raises ValueError for anything else."""
        try:
            rows = tuple(_row(entry) for entry in data["rows"])
            return cls(data["measure"], data["baseline"], tuple(data["together"]), rows)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"not what SensitivityReport.to_dict gives: {type(error).__name__} {error}"
            ) from error

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

    def plan(self, bits: float, *, high_precision: bool | None = None) -> Plan:
        """A scheme for each weight, so that all of them take at most `bits` bits an element on average.

        The result is a dict of patterns for `lowbit.qat.prepare_` and `lowbit.quantize_`, to call with the `filter_fn`
        of the report. Weights choose among the candidate schemes that were measured. What the plan loses is estimated
        as the sum of what each weight loses alone. `lowbit.qat.tools.plan` describes the greedy choice.

        Args:
            bits: mean bits an element over the weights of the report, scales included.
            high_precision: whether a weight may also stay as it is, for the bits of its dtype. None: if one candidate
                was measured.

        Raises:
            TypeError: `bits` is not a number.
            ValueError: not even the smallest choice for each weight takes so few bits.
        """
        if isinstance(bits, bool) or not isinstance(bits, int | float):
            raise TypeError(
                f"bits must be a number, the mean over all elements, e.g. 4.5; got {bits!r}"
            )
        sizes = {row.weight: row for row in self.rows}
        if high_precision is None:
            high_precision = len(self.together) == 1
        choices = [
            Choice((row.weight, *row.tied), row.scheme, row.nbytes, row.loss - self.baseline)
            for row in self.rows
        ]
        if high_precision:
            choices += [
                Choice((row.weight, *row.tied), None, row.plain_nbytes, 0.0)
                for row in sizes.values()
            ]
        return choose(choices, {name: row.elements for name, row in sizes.items()}, bits)


HEAD = ("weight", "format", "bits", "SNR dB", "activation dB", "clipped", "loss", "more")


def _cells(row: Sensitivity, lost: float) -> tuple[str, ...]:
    activation = "" if row.activation_snr is None else f"{row.activation_snr:.1f}"
    name = " = ".join((row.weight, *row.tied))
    measured = (f"{row.loss:.6g}", f"{lost:+.3g}") if row.reached else ("not reached", "")
    numbers = f"{row.bits:.2f}", f"{row.weight_snr:.1f}", activation, f"{row.clipped:.2%}"
    return (name, row.format, *numbers, *measured)


def _row(entry: dict[str, Any]) -> Sensitivity:
    values = {field.name: entry[field.name] for field in fields(Sensitivity)}
    values |= {name: tuple(values[name]) for name in ("tied", "shape")}
    return Sensitivity(**{**values, "scheme": Scheme.from_dict(entry["scheme"])})
