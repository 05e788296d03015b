"""Plan: a scheme for each weight of a model, chosen under a budget, and the file that holds it.

    plan = lowbit.autoquant(model, batches, bits=4)
    plan.save("plan.json")
    lowbit.quantize_(model, lowbit.Plan.load("plan.json"))

A plan is a dict of patterns, as every call takes it that takes a scheme. Its file is JSON, to read and to edit:

    {
     "version": 1,
     "bits": 4.0, …
     "schemes": {
      "layers.0.attention.query.weight": "IntxWeightOnly(bits=3, group_size=32)",
      "head.weight": null,
      "*": "int4(group_size=32)"
     }
    }

A scheme is a line (`lowbit.schemes.lines`), or the dict of `Scheme.to_dict` where no preset makes it; null leaves
weights in high precision. The first pattern that matches decides.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lowbit.convert.by_name import check_runs, check_schemes
from lowbit.convert.least import least
from lowbit.numerics.settings import check_nonnegative, check_number
from lowbit.schemes import lines
from lowbit.schemes.scheme import Scheme
from lowbit.tracing.report import aligned

_VERSION = 1


class Plan(dict[str, Scheme | None]):
    """Patterns to schemes: what `lowbit.quantize_`, `lowbit.calibrate` and `lowbit.qat.prepare_` take as a scheme.

    Args:
        schemes: the patterns. The figures below are those of the model and machine on which the plan was made.
        bits: mean bits an element of the planned weights, scales included.
        measure: the measure of damage: "kl" (nats a row of logits), "loss" or "error".
        damage: the sum of what the units lose alone.
        measured: what the model loses with all of them rounded; None if that was not measured.
        milliseconds: the time of the modules that hold these weights; None if that was not measured.
        costs: the choices from which the plan was made. They are not saved.

    Raises:
        TypeError: other schemes or patterns, or a figure that is not a number.
        ValueError: `bits` or `milliseconds` below 0, or not finite.

    Attributes:
        why: why `lowbit.autoquant` took this plan and no other, where it compared some. It is not saved.
    """

    why = ""

    def __init__(
        self,
        schemes: Mapping[str, Scheme | None],
        *,
        bits: float | None = None,
        measure: str = "",
        damage: float | None = None,
        measured: float | None = None,
        milliseconds: float | None = None,
        costs: Costs | None = None,
    ) -> None:
        if not isinstance(schemes, Mapping):
            raise TypeError(f"schemes must be a dict of patterns to schemes, got {schemes!r}")
        super().__init__(schemes)
        check_schemes(dict(self), Scheme)
        if not isinstance(measure, str) or not isinstance(costs, Costs | None):
            raise TypeError(
                f"measure must be a str, and costs None or those of another plan, got {measure!r} and {costs!r}"
            )
        self.bits = _figure("bits", bits, check_nonnegative)
        self.milliseconds = _figure("milliseconds", milliseconds, check_nonnegative)
        self.damage, self.measured = _figure("damage", damage), _figure("measured", measured)
        self.measure, self.costs = measure, costs

    def __str__(self) -> str:
        """The figures, why it was taken, and a line for each pattern."""
        width = max(map(len, self), default=0)
        why = [f"  {self.why}"] if self.why else []
        return "\n".join(
            [self.figures, *why, *(f"  {name:<{width}}  {shown(s)}" for name, s in self.items())]
        )

    @property
    def figures(self) -> str:
        """Its figures in a line."""
        found = [] if self.bits is None else [f"{self.bits:.3f} bits a weight"]
        if self.damage is not None:
            found.append(f"{self.measure} {self.damage:+.4g} as the sum of the parts")
        if self.measured is not None:
            found.append(f"{self.measure} {self.measured:+.4g} together")
        if self.milliseconds is not None:
            found.append(f"{self.milliseconds:.4g} ms")
        return ", ".join(found) or f"{len(self)} patterns"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file of the module."""
        given = {name: getattr(self, name) for name in _FIGURES}
        figures = {name: value for name, value in given.items() if value not in (None, "")}
        schemes = {
            p: None if s is None else lines.line_of(s) or s.to_dict() for p, s in self.items()
        }
        text = json.dumps({"version": _VERSION, **figures, "schemes": schemes}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of `save`, edited or not. Only "schemes" is needed.

        Raises ValueError for anything else, and names the entry.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique)
        except ValueError as error:
            raise ValueError(f"{path} is not a plan in JSON: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("schemes"), dict):
            raise ValueError(f'{path} is not a plan: it has no patterns under "schemes"')
        known = ("version", "schemes", *_FIGURES)
        if unknown := [key for key in data if key not in known]:
            raise ValueError(f"{path}: unknown entry {unknown[0]!r}; accepted: {', '.join(known)}")
        if data.get("version", _VERSION) != _VERSION:
            raise ValueError(f"{path} has version {data['version']!r}; accepted: {_VERSION}")
        schemes = {p: _scheme(p, given, path) for p, given in data["schemes"].items()}
        check_schemes(schemes, Scheme)
        check_runs(schemes, str(path))
        try:
            return cls(schemes, **{name: data[name] for name in _FIGURES if name in data})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


_FIGURES = ("bits", "measure", "damage", "measured", "milliseconds")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of an object in JSON. Raises ValueError for a key that it gives twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(k for k in keys if keys.count(k) > 1)!r} is given twice")
    return found


def _figure(
    name: str, value: Any, check: Callable[[str, Any], object] = check_number
) -> float | None:
    if value is None:
        return None
    check(name, value)
    return float(value)  # JSON takes no tensor and no number of numpy


def _scheme(pattern: str, given: Any, path: Any) -> Scheme | None:
    try:
        if given is None:
            return None
        return lines.scheme(given) if isinstance(given, str) else Scheme.from_dict(given)
    except ValueError as error:
        raise ValueError(f"{path}: {pattern!r}: {error}") from error


def shown(scheme: Scheme | None) -> str:
    """A scheme as `Plan` prints it."""
    return "high precision" if scheme is None else lines.line_of(scheme) or str(scheme)


# ---- the choice -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanChoice:
    """One way to store the weights of a unit, which take one scheme: a weight, siblings such as q, k and v, or the
    stacked experts of a module.

    Attributes:
        unit: its name.
        schemes: patterns to schemes, one for each weight; None leaves it in high precision.
        nbytes: of the weights, scales included.
        damage: what the model loses with this unit alone rounded.
        milliseconds: the time of the modules that hold the weights; None if it was not measured.
    """

    unit: str
    schemes: Mapping[str, Scheme | None]
    nbytes: int
    damage: float
    milliseconds: float | None = None


@dataclass(frozen=True)
class Costs:
    """What the choices for the weights of a model cost: `print` it, or make plans of it.

    Attributes:
        choices: of all units.
        elements: of all weights.
        measure: of the damage: "kl", "loss" or "error".
    """

    choices: tuple[PlanChoice, ...]
    elements: int
    measure: str

    @property
    def units(self) -> dict[str, list[PlanChoice]]:
        """The choices of each unit."""
        found: dict[str, list[PlanChoice]] = {}
        for choice in self.choices:
            found.setdefault(choice.unit, []).append(choice)
        return found

    @property
    def timed(self) -> bool:
        """True if times were measured."""
        return all(choice.milliseconds is not None for choice in self.choices)

    def __str__(self) -> str:
        """A table: a line for each unit and scheme."""
        rows = [("unit", "scheme", "bytes", self.measure, *(("ms",) if self.timed else ()))]
        for c in self.choices:
            schemes = " | ".join(dict.fromkeys(map(shown, c.schemes.values())))
            time = (f"{c.milliseconds:.4g}",) if self.timed else ()
            rows.append((c.unit, schemes, f"{c.nbytes:,}", f"{c.damage:.3g}", *time))
        return aligned(rows, left=(0, 1))

    def plan(
        self,
        bits: float | None = None,
        *,
        damage: float | None = None,
        milliseconds: float | None = None,
    ) -> Plan:
        """The best choice for each unit under one budget. Damages and times of units are added up.

        Args:
            bits: at most so many bits an element on average, scales included; the damage is the least.
            damage: at most this sum of damages. The time is the least, or the bytes if no times were measured.
            milliseconds: at most this time; the damage is the least.

        Raises:
            TypeError: not exactly one budget, or one that is not a number.
            ValueError: no choice holds the budget; a budget of time without measured times.
        """
        name, budget = budget_of(bits=bits, damage=damage, milliseconds=milliseconds)
        if name == "milliseconds" and not self.timed:
            raise ValueError(
                "a budget of milliseconds needs measured times; accepted: bits or damage, or autoquant with timed=…"
            )
        limited = {"bits": "nbytes"}.get(name, name)
        wanted = "damage" if name != "damage" else "milliseconds" if self.timed else "nbytes"
        if name == "bits":
            budget = budget * self.elements / 8
        units = list(self.units.values())
        costs = [[float(getattr(c, limited)) for c in own] for own in units]
        chosen = least(self._values(units, wanted), costs, budget)
        if chosen is None:
            smallest = sum(map(min, costs))
            smallest = 8 * smallest / max(self.elements, 1) if name == "bits" else smallest
            given = bits if name == "bits" else budget
            unit = {
                "bits": "bits a weight on average, scales included",
                "damage": "of damage",
                "milliseconds": "ms",
            }[name]
            raise ValueError(
                f"no plan has {name}={given}: the smallest choices take {smallest:.4g} {unit}; accepted: that or more, "
                "or other schemes to choose from"
            )
        return self.of([own[i] for own, i in zip(units, chosen, strict=True)])

    def _values(self, units: list[list[PlanChoice]], wanted: str) -> list[list[float]]:
        """The values to minimize. Between equal choices the one with fewer bytes is better."""
        values = [[float(getattr(c, wanted)) for c in own] for own in units]
        if wanted == "nbytes":
            return values
        tie = 1e-9 * max((abs(v) for own in values for v in own), default=0.0)
        most = max((c.nbytes for c in self.choices), default=1) or 1
        return [
            [v + tie * c.nbytes / most for v, c in zip(row, own, strict=True)]
            for row, own in zip(values, units, strict=True)
        ]

    def uniform(self) -> list[Plan]:
        """The plans that give all weights one scheme."""
        schemes = {s for c in self.choices for s in c.schemes.values()}
        found = []
        for scheme in schemes:
            own = [c for c in self.choices if all(s == scheme for s in c.schemes.values())]
            if len(own) == len(self.units):
                found.append(self.of(own))
        return found

    def of(self, chosen: list[PlanChoice]) -> Plan:
        """The plan of these choices, one of each unit."""
        return Plan(
            {pattern: scheme for c in chosen for pattern, scheme in c.schemes.items()},
            bits=8 * sum(c.nbytes for c in chosen) / max(self.elements, 1),
            measure=self.measure,
            damage=sum(c.damage for c in chosen),
            milliseconds=sum(c.milliseconds or 0.0 for c in chosen) if self.timed else None,
            costs=self,
        )


_EXAMPLES = {"bits": 4.5, "damage": 0.01, "milliseconds": 2.0}
"""A usual value of each budget."""


def budget_of(**budgets: Any) -> tuple[str, float]:
    """The name and the value of the one budget that is given. Raises TypeError otherwise."""
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise TypeError(f"give one budget of {', '.join(budgets)}; got {given or 'none'}")
    ((name, value),) = given.items()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, e.g. {_EXAMPLES[name]}; got {value!r}")
    if not (value > 0 or (value == 0 and name == "damage")):
        least = "a number of at least 0" if name == "damage" else "a number above 0"
        raise ValueError(f"{name} must be {least}, e.g. {_EXAMPLES[name]}; got {value!r}")
    return name, float(value)


def pattern_of(names: tuple[str, ...]) -> str:
    """A pattern that matches these names and no others. A tied weight needs one, since a pattern that chooses no weight
    is refused, and the filter may select one of its modules only."""
    (first, *others) = names
    if not others and not set(first) & set("*?["):
        return first
    return "re:" + "|".join(map(re.escape, names))
