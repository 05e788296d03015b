"""Finished runs, one JSON object a line, and what they say together."""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.convergence.runs import REFERENCE, RUNS, Run
from recipes.quickstart.config import UserError

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of Student's t with 1, 2, … degrees of freedom."""

FIELDS = {
    "run",
    "seed",
    "final_loss",
    "curve",
    "seconds",
    "device",
    "torch",
    "date",
    "settings",
    "command",
}


def read(path: Path) -> list[dict[str, Any]]:
    """All finished runs. A last line that was cut off is no run; UserError for a file of something else."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or FIELDS - set(record):
            raise UserError(
                f"{path} holds something else than finished runs; give another --results"
            )
        records.append(record)
    return records


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line, on the disk when this returns, also after one that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def check_settings(records: list[dict[str, Any]], settings: dict[str, Any], path: Path) -> None:
    """UserError when the file has runs of other settings: they can't be compared."""
    wanted = json.loads(json.dumps(settings))
    for record in records:
        found = record["settings"]
        names = [n for n in sorted({*wanted, *found}) if wanted.get(n) != found.get(n)]
        if names:
            name = names[0]
            raise UserError(
                f"{path} holds a run with {name} {found.get(name)!r}, here it is {wanted.get(name)!r}; give another "
                "--results, or the same settings and text"
            )


@dataclass(frozen=True)
class Summary:
    """Of one run over its seeds.

    Attributes:
        losses: final held-out loss by seed; None where it diverged.
        difference: from the reference, seed by seed, as a share of the reference's loss: the mean. None without a
            common seed.
        interval: half the width of its 95% interval (Student's t); None of fewer than two seeds.
    """

    run: Run
    losses: dict[int, float | None]
    difference: float | None
    interval: float | None

    @property
    def finished(self) -> list[float]:
        return [loss for loss in self.losses.values() if loss is not None]

    @property
    def within(self) -> bool | None:
        """Whether no run diverged and the mean keeps to what is allowed; None where nothing is asked."""
        if self.run.allowed is None or self.difference is None:
            return None
        return None not in self.losses.values() and self.difference <= self.run.allowed


def summarize(records: list[dict[str, Any]]) -> list[Summary]:
    """One summary a run, in the order of RUNS."""
    losses = {
        name: {r["seed"]: r["final_loss"] for r in records if r["run"] == name} for name in RUNS
    }
    found = []
    for name, run in RUNS.items():
        if not losses[name]:
            continue
        own = dict(sorted(losses[name].items()))
        pairs = [(loss, losses[REFERENCE].get(seed)) for seed, loss in own.items()]
        differences = [a / b - 1 for a, b in pairs if a is not None and b is not None]
        mean = statistics.mean(differences) if differences and name != REFERENCE else None
        half = half_interval(differences) if mean is not None else None
        found.append(Summary(run, own, mean, half))
    return found


def half_interval(values: list[float]) -> float | None:
    """Half of the 95% interval of the mean. From 11 values on with the factor of 11, a little wide."""
    if len(values) < 2:
        return None
    factor = STUDENT_T[min(len(values) - 2, len(STUDENT_T) - 1)]
    return factor * statistics.stdev(values) / math.sqrt(len(values))
