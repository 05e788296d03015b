"""The figures of the recipes, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

COLOURS = (
    *("#2b2f36", "#1f6fb4", "#2e8b57", "#d9822b", "#c0392b", "#8a4fbf", "#b8860b"),
    *("#17a2a2", "#e377c2", "#6b7f3a", "#7f5a3a"),
)
HIGH, ROUNDED, QAT = "#1f6fb4", "#d9822b", "#2e8b57"
STYLE: Any = {
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "axes.axisbelow": True,
    "savefig.dpi": 150,
}

Points = list[tuple[int, float]]
"""(step, value)."""


@contextmanager
def figure(path: Path, columns: int, width: float, **options: Any) -> Iterator[Any]:
    """The axes of a row of plots, written to `path` at the end."""
    with plt.rc_context(STYLE):
        drawn, axes = plt.subplots(
            1, columns, figsize=(width, 4.6), layout="constrained", **options
        )
        yield axes
        drawn.savefig(path)
        plt.close(drawn)


@dataclass(frozen=True)
class Curve:
    """Loss of one phase of a run over its steps."""

    label: str
    heldout: Points
    train: Points


def draw_losses(path: Path, curves: list[Curve], step_tokens: int) -> None:
    """The whole run, and its branches: all curves but the first."""
    with figure(path, 2, width=11) as (whole, branches):
        for curve, colour in zip(curves, COLOURS, strict=False):
            whole.plot(*zip(*smoothed(curve.train), strict=True), color=colour, alpha=0.35)
            for axis in (whole, branches) if curve is not curves[0] else (whole,):
                points = zip(*curve.heldout, strict=True)
                axis.plot(*points, color=colour, marker="o", markersize=3, label=curve.label)
        whole.axvline(curves[0].heldout[-1][0], color="#9aa3ad", linestyle=":")
        whole.set_title("Whole run: held-out loss (points), training loss (faint)")
        branches.set_title("The branches: held-out loss")
        whole.set_ylabel("loss (nats per token)")
        for axis in (whole, branches):
            axis.set_xlabel(f"step ({step_tokens:,} tokens each)")
            axis.legend(loc="upper right", frameon=False)


def smoothed(points: Points, windows: int = 40) -> Points:
    """The mean of each of about so many windows, at its last step."""
    length = max(1, len(points) // windows)
    parts = [points[i : i + length] for i in range(0, len(points), length)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def draw_perplexities(path: Path, perplexities: dict[str, float], notes: dict[int, str]) -> None:
    """The perplexity of each model ("high", "int4-rtn", "int4-qat" …), and its distance from "high" with a note for
    each bit width."""
    names, values = list(perplexities), list(perplexities.values())
    colours = [{"h": HIGH, "n": ROUNDED, "t": QAT}[n[-1]] for n in names]
    labels = [n.replace("-rtn", "\nrounded").replace("-qat", "\nQAT") for n in names]
    with figure(path, 2, width=11, width_ratios=(5, 4)) as (whole, lost):
        whole.bar_label(whole.bar(labels, values, color=colours), fmt="%.2f", padding=3)
        whole.set_ylabel("held-out perplexity (lower is better)")
        whole.set_title("Perplexity of each model")
        tops = []
        for i, bits in enumerate(notes):
            for offset, kind, colour in ((-0.21, "rtn", ROUNDED), (0.21, "qat", QAT)):
                value = perplexities[f"int{bits}-{kind}"] - perplexities["high"]
                bar = lost.bar(i + offset, value, width=0.38, color=colour)
                lost.bar_label(bar, [f"{value:+.2f}"], padding=3, fontsize=9)
                tops.append(value)
        lost.axhline(0, color=HIGH)
        lost.set_xticks(range(len(notes)), [f"{bits} bits\n{note}" for bits, note in notes.items()])
        # Two bits lose many times what four bits lose. A symmetric logarithmic scale shows both.
        smallest = min((abs(top) for top in tops if top), default=1.0)
        lost.set_yscale("symlog", linthresh=max(smallest, max(map(abs, tops)) / 1000))
        lost.set_ylim(min(0.0, *tops) * 3, max(*tops, 1e-6) * 3)
        lost.set_ylabel("perplexity above high precision (log scale)")
        lost.set_title("Lost by rounding (orange), and still after QAT (green)")
        for axis in (whole, lost):
            axis.grid(axis="x", visible=False)


def draw_recovery(
    path: Path, curves: dict[str, Points], shares: dict[str, tuple[float, float, float]]
) -> None:
    """Held-out loss of each branch, and the share won back in per cent: (value, low, high) of each run."""
    colours = dict(zip(curves, [*COLOURS, *plt.get_cmap("tab20")(range(20))], strict=False))
    with figure(path, 2, width=13, width_ratios=(5, 4)) as (losses, bars):
        for name, points in curves.items():
            losses.plot(*zip(*points, strict=True), color=colours[name], label=name)
        losses.set_title("Held-out loss of the branches, first seed")
        losses.set_ylabel("nats per token")
        losses.set_xlabel("step")
        ends = [points[-1][1] for points in curves.values()]
        losses.set_ylim(min(ends) - 0.01, max(ends) + 2 * (max(ends) - min(ends)) + 0.01)
        losses.legend(frameon=False, fontsize=8, ncols=2)
        for i, (name, (value, low, high)) in enumerate(reversed(shares.items())):
            bars.errorbar(
                value, i, xerr=[[max(value - low, 0)], [max(high - value, 0)]],
                color=colours.get(name, COLOURS[0]), fmt="o", capsize=4,
            )  # fmt: skip
        bars.set_yticks(range(len(shares)), list(shares)[::-1])
        bars.set_xlabel("% of the loss that rounding costs")
        bars.set_title("Won back")


@dataclass(frozen=True)
class Difference:
    """The final loss of a run against the reference: loss / reference's − 1, half its interval, the allowed limit."""

    value: float
    interval: float | None
    allowed: float | None


def draw_convergence(
    path: Path,
    reference: str,
    curves: dict[str, Points],
    differences_on_the_way: dict[str, Points],
    final: dict[str, Difference],
) -> None:
    """Held-out loss over the steps of each run, its difference from the reference, and the difference at the end.

    Args:
        path: the file to write.
        reference: name of the run that the others are compared with.
        curves: loss of each run, the mean over seeds.
        differences_on_the_way: relative difference of each run from the reference during training.
        final: difference of each run at the end.
    """
    colours = dict(zip(curves, COLOURS, strict=False))
    with figure(path, 3, width=15, width_ratios=(4, 4, 3)) as (whole, apart, bars):
        for name, points in curves.items():
            whole.plot(*zip(*points, strict=True), color=colours[name], label=name)
        for name, points in differences_on_the_way.items():
            apart.plot(*zip(*points, strict=True), color=colours[name])
        whole.set_title("Held-out loss, mean over seeds")
        whole.set_ylabel("nats per token")
        whole.legend(frameon=False)
        apart.set_title(f"Difference from {reference} during training")
        apart.axhline(0, color=COLOURS[0])
        for axis in (whole, apart):
            axis.set_xlabel("step")
        apart.yaxis.set_major_formatter(PercentFormatter(1.0))
        bars.xaxis.set_major_formatter(PercentFormatter(1.0))
        for i, (name, one) in enumerate(reversed(final.items())):
            error = one.interval or 0.0
            bars.errorbar(one.value, i, xerr=error, color=colours[name], fmt="o", capsize=4)
            if one.allowed is not None:
                bars.plot(one.allowed, i, "|", color="#9aa3ad", markersize=18)
        bars.axvline(0, color=COLOURS[0])
        bars.set_yticks(range(len(final)), list(final)[::-1])
        bars.set_xlabel("grey: the allowed limit")
        bars.set_title(f"Final loss against {reference}")
