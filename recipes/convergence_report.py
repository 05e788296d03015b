"""The convergence recipe's report: each variant against the reference, its table and its curves."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import figures, pages
from recipes.command_line import UserError
from recipes.convergence_variants import REFERENCE, RUNS, ConvergenceRun
from recipes.runs import write_text

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of Student's t with 1, 2, … degrees of freedom."""


@dataclass(frozen=True)
class Summary:
    """One variant over its seeds.

    Attributes:
        losses: final held-out loss by seed; None where it diverged.
        difference: (loss / reference's loss − 1), the mean over common seeds; None without a common seed.
        interval: half the width of its 95% interval; None with fewer than two seeds.
    """

    variant: ConvergenceRun
    losses: dict[int, float | None]
    difference: float | None
    interval: float | None

    @property
    def within(self) -> bool | None:
        """True if all runs converged and the mean difference is allowed; None without a limit."""
        if self.variant.allowed is None or self.difference is None:
            return None
        return None not in self.losses.values() and self.difference <= self.variant.allowed


def summarize(records: list[dict[str, Any]]) -> list[Summary]:
    """One summary a variant that has runs, in the order of RUNS."""
    losses: dict[str, dict[int, float | None]] = {name: {} for name in RUNS}
    for record in sorted(records, key=lambda r: r["seed"]):
        losses[record["run"]][record["seed"]] = record["final_loss"]
    found = []
    for name, own in losses.items():
        pairs = [(loss, losses[REFERENCE].get(seed)) for seed, loss in own.items()]
        differences = [a / b - 1 for a, b in pairs if a is not None and b is not None]
        mean = statistics.mean(differences) if differences and name != REFERENCE else None
        interval = half_interval(differences) if mean is not None else None
        if own:
            found.append(Summary(RUNS[name], own, mean, interval))
    return found


def half_interval(values: list[float]) -> float | None:
    """Half of the 95% interval of the mean (Student's t). From 11 values on the factor is that of 11: a little wide."""
    if len(values) < 2:
        return None
    factor = STUDENT_T[min(len(values) - 2, len(STUDENT_T) - 1)]
    return factor * statistics.stdev(values) / math.sqrt(len(values))


def table(summaries: list[Summary]) -> str:
    """One row a variant, in Markdown."""
    header = ["run", "", "seeds", "final held-out loss", "lowest .. highest", "against fp32",
              "allowed", "kept"]  # fmt: skip
    rows = []
    for s in summaries:
        finished = [loss for loss in s.losses.values() if loss is not None]
        diverged = len(s.losses) - len(finished)
        mean = f"{statistics.mean(finished):.4f}" if finished else ""
        spread = f"{min(finished):.4f} .. {max(finished):.4f}" if finished else ""
        spread += f" ({diverged} diverged)" if diverged else ""
        difference = "" if s.difference is None else f"{s.difference:+.2%}"
        difference += "" if s.interval is None else f" ± {s.interval:.2%}"
        allowed = "" if s.variant.allowed is None else f"{s.variant.allowed:+.1%}"
        kept = {True: "yes", False: "no", None: ""}[s.within]
        count = str(len(s.losses))
        rows.append(
            [s.variant.name, s.variant.about, count, mean, spread, difference, allowed, kept]
        )
    return pages.table(header, rows, left=(0, 1, 7)) + "\n"


def page(records: list[dict[str, Any]]) -> str:
    """The report in Markdown."""
    own = records[0]["settings"]
    model, tokens = own["model"], own["batch_size"] * own["model"]["context"]
    commands = "\n".join(f"- `{command}`" for command in sorted({r["command"] for r in records}))
    machines = "; ".join(sorted({f"{r['device']}, torch {r['torch']}, {r['date']}" for r in records}))  # fmt: skip
    seconds = statistics.median(r["seconds"] for r in records)
    return f"""# Convergence: low-bit states, weights and products

{commands}
- {machines}; {seconds:.0f} s a run
- {model["layers"]} layers of width {model["dim"]}, vocabulary {model["vocab_size"]}; {own["steps"]} steps of {tokens} \
tokens, lr {own["lr"]:g}; {own["train_tokens"]} tokens to train on

Every run computes with bfloat16 weights; see `recipes/convergence.py`. *Against fp32*: the relative difference of the \
final loss, seed by seed, with the 95% interval of its mean (Student's t over the seeds).

{table(summarize(records))}
![Held-out loss](convergence.png)
"""


def write_report(records: list[dict[str, Any]], folder: Path) -> None:
    """`convergence.md` and `convergence.png` in `folder`. UserError without finished runs."""
    if not records:
        raise UserError(
            "there are no finished runs yet; train some, or name their file with --results"
        )
    folder.mkdir(parents=True, exist_ok=True)
    summaries = summarize(records)
    names = [s.variant.name for s in summaries]
    final = {
        s.variant.name: figures.Difference(s.difference, s.interval, s.variant.allowed)
        for s in summaries
        if s.difference is not None
    }
    figures.draw_convergence(
        folder / "convergence.png",
        REFERENCE,
        {name: mean_curve(records, name) for name in names},
        {name: difference_curve(records, name) for name in final},
        final,
    )
    write_text(folder / "convergence.md", page(records))


def curves_of(records: list[dict[str, Any]], name: str) -> dict[int, dict[int, float]]:
    """Held-out loss by step, by seed."""
    return {r["seed"]: dict(r["curve"]) for r in records if r["run"] == name}


def mean_curve(records: list[dict[str, Any]], name: str) -> figures.Points:
    """The mean loss of all seeds at each step that all of them reached."""
    curves = list(curves_of(records, name).values())
    steps = sorted(set.intersection(*map(set, curves)))
    return [(step, statistics.mean(curve[step] for curve in curves)) for step in steps]


def difference_curve(records: list[dict[str, Any]], name: str) -> figures.Points:
    """The relative difference from the reference at each step after the first, the mean over common seeds."""
    own, reference = curves_of(records, name), curves_of(records, REFERENCE)
    pairs = [(own[seed], reference[seed]) for seed in own.keys() & reference.keys()]
    steps = sorted(set.intersection(*(set(curve) for pair in pairs for curve in pair)) - {0})
    return [(s, statistics.mean(a[s] / b[s] - 1 for a, b in pairs)) for s in steps]
