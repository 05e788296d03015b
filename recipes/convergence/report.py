"""The table and the curves of finished runs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from recipes.convergence.results import Summary, summarize
from recipes.convergence.runs import REFERENCE
from recipes.quickstart.config import UserError
from recipes.quickstart.folder import write_text

COLOURS = (
    *("#2b2f36", "#1f6fb4", "#2e8b57", "#d9822b", "#c0392b", "#8a4fbf", "#b8860b"),
    *("#17a2a2", "#e377c2", "#6b7f3a", "#7f5a3a"),
)


def write(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """`convergence.md` and `convergence.png` in `folder`. UserError when there is nothing to show."""
    if not records:
        raise UserError(
            "there are no finished runs yet; train some, or name their file with --results"
        )
    folder.mkdir(parents=True, exist_ok=True)
    page, figure = folder / "convergence.md", folder / "convergence.png"
    draw(records, figure)
    write_text(page, text(records) + f"\n![Held-out loss]({figure.name})\n")
    return [page, figure]


def table(summaries: list[Summary]) -> str:
    """One row a run, in markdown."""
    lines = [
        "| run | | seeds | final held-out loss | lowest .. highest | against fp32 | allowed | kept |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for summary in summaries:
        finished = summary.finished
        cells = [summary.run.name, summary.run.about, str(len(summary.losses))]
        diverged = len(summary.losses) - len(finished)
        if finished:
            cells += [
                f"{statistics.mean(finished):.4f}",
                f"{min(finished):.4f} .. {max(finished):.4f}",
            ]
        else:
            cells += ["", ""]
        cells[-1] += f" ({diverged} diverged)" if diverged else ""
        allowed = summary.run.allowed
        cells += [
            difference_text(summary),
            "" if allowed is None else f"{allowed:+.1%}",
            {True: "yes", False: "no", None: ""}[summary.within],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def difference_text(summary: Summary) -> str:
    if summary.difference is None:
        return ""
    around = "" if summary.interval is None else f" ± {summary.interval:.2%}"
    return f"{summary.difference:+.2%}{around}"


def text(records: list[dict[str, Any]]) -> str:
    """The page, without the picture."""
    settings = records[0]["settings"]
    machines = sorted({f"{r['device']}, torch {r['torch']}, {r['date']}" for r in records})
    seconds = statistics.median(r["seconds"] for r in records)
    model, tokens = settings["model"], settings["batch_size"] * settings["model"]["context"]
    lines = [
        "# Convergence: low-bit states, weights and products",
        "",
        *[f"- `{command}`" for command in sorted({r["command"] for r in records})],
        f"- {'; '.join(machines)}; {seconds:.0f} s a run",
        f"- {model['layers']} layers of width {model['dim']}, vocabulary {model['vocab_size']}; {settings['steps']} "
        f"steps of {tokens} tokens, lr {settings['lr']:g}; {settings['train_tokens']} tokens to learn from",
        "",
        "Every run computes with bfloat16 weights; see `recipes/convergence`. *Against fp32*: the relative difference "
        "of the final loss, seed by seed, with the 95% interval of its mean (Student's t over the seeds).",
        "",
    ]
    return "\n".join(lines) + "\n" + table(summarize(records))


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Held-out loss over the steps, and the differences at the end."""
    import matplotlib.pyplot as plt

    from recipes.quickstart.figures import STYLE

    summaries = summarize(records)
    with plt.rc_context(STYLE):
        figure, (whole, apart, bars) = plt.subplots(
            1, 3, figsize=(15, 4.6), width_ratios=(4, 4, 3), layout="constrained"
        )
        for summary, colour in zip(summaries, COLOURS, strict=False):
            name = summary.run.name
            whole.plot(*mean_curve(records, name), color=colour, label=name)
            if summary.difference is not None:
                apart.plot(*difference_curve(records, name), color=colour)
        whole.set_title("Held-out loss, mean over seeds", fontsize=11)
        whole.set_ylabel("nats per token")
        whole.legend(frameon=False)
        apart.set_title(f"Difference from {REFERENCE} on the way", fontsize=11)
        apart.set_ylabel("%")
        apart.axhline(0, color=COLOURS[0], linewidth=1.2)
        for axis in (whole, apart):
            axis.set_xlabel("step")
        _draw_differences(bars, summaries)
        figure.savefig(path)
        plt.close(figure)


def _draw_differences(axis: Any, summaries: list[Summary]) -> None:
    colours = dict(zip([s.run.name for s in summaries], COLOURS, strict=False))
    shown = [s for s in summaries if s.difference is not None][::-1]
    for i, summary in enumerate(shown):
        own = {"color": colours[summary.run.name], "fmt": "o", "capsize": 4}
        axis.errorbar(100 * summary.difference, i, xerr=100 * (summary.interval or 0.0), **own)  # type: ignore[operator]
        if summary.run.allowed is not None:
            axis.plot(100 * summary.run.allowed, i, "|", color="#9aa3ad", markersize=18)
    axis.axvline(0, color=COLOURS[0], linewidth=1.2)
    axis.set_yticks(range(len(shown)), [s.run.name for s in shown])
    axis.set_xlabel("%; grey: what is allowed")
    axis.set_title(f"Final loss against {REFERENCE}", fontsize=11)


def curves_of(records: list[dict[str, Any]], name: str) -> dict[int, dict[int, float]]:
    """Held-out loss by step, by seed."""
    return {r["seed"]: dict(r["curve"]) for r in records if r["run"] == name}


def mean_curve(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps, and the mean loss of all seeds of a run there. Steps that not every seed reached are left out."""
    curves = list(curves_of(records, name).values())
    steps = sorted(set.intersection(*map(set, curves)))
    return steps, [statistics.mean(curve[step] for curve in curves) for step in steps]


def difference_curve(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps after the first, and the difference from the reference in per cent there, the mean over common seeds."""
    own, reference = curves_of(records, name), curves_of(records, REFERENCE)
    pairs = [(own[seed], reference[seed]) for seed in own.keys() & reference.keys()]
    steps = sorted(set.intersection(*(set(curve) for pair in pairs for curve in pair)) - {0})
    return steps, [100 * statistics.mean(a[s] / b[s] - 1 for a, b in pairs) for s in steps]
