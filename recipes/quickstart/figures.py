"""The figures of the report, drawn with matplotlib from metrics.jsonl and the measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from recipes.quickstart.config import QuickstartConfig
from recipes.quickstart.measure import Measurements
from recipes.quickstart.report import recovered
from recipes.quickstart.train import phases

COLOURS = {"trunk": "#5b6470", "high": "#1f6fb4", "rtn": "#d9822b", "qat": "#2e8b57"}
QAT_COLOURS = ("#2e8b57", "#8a4fbf", "#c0392b", "#b8860b")
STYLE: Any = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "axes.axisbelow": True,
    "figure.dpi": 100,
    "savefig.dpi": 150,
}


def draw(
    config: QuickstartConfig, records: list[dict[str, Any]], found: Measurements, folder: Path
) -> list[Path]:
    """Write `loss.png` and `perplexity.png` to `folder` and return their paths."""
    with plt.rc_context(STYLE):
        return [
            _save(_loss_figure(config, records), folder / "loss.png"),
            _save(_perplexity_figure(config, found), folder / "perplexity.png"),
        ]


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    return path


def phase_label(name: str) -> str:
    if name == "trunk":
        return "shared steps, high precision"
    return "high precision" if name == "high" else f"QAT, {name.removeprefix('int')} bits"


def _colours(config: QuickstartConfig) -> dict[str, str]:
    qat = {f"int{b}": QAT_COLOURS[i % len(QAT_COLOURS)] for i, b in enumerate(config.bits)}
    return {"trunk": COLOURS["trunk"], "high": COLOURS["high"], **qat}


def smooth(values: list[float], window: int) -> np.ndarray:
    """Mean over the last `window` values, fewer at the start."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _loss_figure(config: QuickstartConfig, records: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(
        2, 2, figsize=(11, 5.6), height_ratios=(4, 1), sharex="col", layout="constrained"
    )
    colours = _colours(config)
    for phase in phases(config):
        own = [r for r in records if r["phase"] == phase.name]
        steps = [r["step"] for r in own if "loss" in r]
        losses = smooth([r["loss"] for r in own if "loss" in r], max(1, config.steps // 60))
        probes = [(r["step"], r["heldout_loss"]) for r in own if "heldout_loss" in r]
        rates = [r["lr"] for r in own if "loss" in r]
        for column in (0, 1):
            if column == 1 and phase.name == "trunk":
                continue
            upper, lower = axes[0][column], axes[1][column]
            colour = colours[phase.name]
            if column == 0:
                upper.plot(steps, losses, color=colour, alpha=0.35, linewidth=1)
            upper.plot(*zip(*probes, strict=True), color=colour, marker="o", markersize=3, linewidth=1.6,
                       label=phase_label(phase.name))  # fmt: skip
            if phase.name in ("trunk", "high"):
                lower.plot(steps, rates, color=colours["trunk"], linewidth=1.4)
    _finish_loss_axes(config, axes)
    return figure


def _finish_loss_axes(config: QuickstartConfig, axes: Any) -> None:
    whole, branches = axes[0]
    whole.set_title("Whole run: held-out loss (points), training loss (faint)", fontsize=11)
    branches.set_title("From where the models part: held-out loss", fontsize=11)
    whole.set_ylabel("loss (nats per token)")
    lines = [line for line in whole.get_lines() if len(line.get_ydata())]
    top = max(float(np.max(line.get_ydata())) for line in lines)
    bottom = min(float(np.min(line.get_ydata())) for line in lines)
    whole.set_ylim(bottom - 0.05 * (top - bottom), top)
    whole.axvline(config.trunk_steps, color="#9aa3ad", linestyle=":", linewidth=1.2)
    for axis in (whole, branches):
        axis.legend(loc="upper right", edgecolor="none", framealpha=1.0)
    axes[1][0].set_ylabel("learning\nrate")
    for axis, highest in zip(axes[1], (config.lr, config.lr * config.branch_lr), strict=True):
        axis.set_xlabel(f"step ({config.step_tokens:,} tokens each)")
        axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axis.set_ylim(0, highest * 1.15)


def _perplexity_figure(config: QuickstartConfig, found: Measurements) -> Any:
    figure, (whole, lost) = plt.subplots(
        1, 2, figsize=(11, 4.4), width_ratios=(5, 4), layout="constrained"
    )
    names = [result.name for result in found.results]
    values = [result.perplexity for result in found.results]
    colours = [COLOURS["high" if n == "high" else n.split("-")[1]] for n in names]
    labels = ["high\nprecision" if n == "high" else n.replace("-rtn", "\nrounded").replace("-qat", "\nQAT")
              for n in names]  # fmt: skip
    bars = whole.bar(range(len(names)), values, color=colours, width=0.68)
    whole.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    whole.set_xticks(range(len(names)), labels)
    whole.set_ylabel("held-out perplexity (lower is better)")
    whole.set_title("Perplexity of each model", fontsize=11)
    whole.set_ylim(0, max(values) * 1.13)
    whole.grid(axis="x", visible=False)
    _draw_lost(lost, found)
    return figure


def _draw_lost(axis: Axes, found: Measurements) -> None:
    high = found.by_name("high").perplexity
    tops = []
    for i, recovery in enumerate(found.recoveries):
        for offset, kind in ((-0.21, "rtn"), (0.21, "qat")):
            value = found.by_name(f"int{recovery.bits}-{kind}").perplexity - high
            label = {"rtn": "rounded after training", "qat": "after QAT"}[kind] if i == 0 else None
            bar = axis.bar(i + offset, value, width=0.38, color=COLOURS[kind], label=label)
            note = f"+{value:.2f}" if value >= 0 else f"{value:.2f}"
            if kind == "qat":
                note += "\n" + recovered(recovery).replace(" ", "\n")
            axis.bar_label(bar, [note], padding=3)
            tops.append(value)
    axis.axhline(0, color=COLOURS["high"], linewidth=1.4)
    axis.set_xticks(range(len(found.recoveries)), [f"{r.bits} bits" for r in found.recoveries])
    axis.set_ylabel("perplexity above high precision")
    axis.set_title("What rounding loses, and what QAT leaves of it", fontsize=11)
    axis.set_ylim(min(0.0, *tops) * 1.25, max(tops) * 1.28)
    axis.set_xlim(-0.6, len(found.recoveries) - 0.4)
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper left", frameon=False)
