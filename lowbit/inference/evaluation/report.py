"""EvaluationReport: how good low-bit models are beside the original, as a table, JSON and a picture.

`lowbit.evaluate` makes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lowbit import optional
from lowbit.tracing.report import aligned


@dataclass(frozen=True)
class Evaluation:
    """One model.

    Attributes:
        name: of the model.
        nbytes: bytes of its parameters.
        tokens: predicted tokens; 0 without batches.
        perplexity: exp(mean −log p(next token)); infinite where a float does not hold it. None without batches.
        kl: mean KL(original ‖ model) of the next token, in nats. None for the original itself, or without one.
        agreement: share of tokens, 0 to 1, for which both models have the same most likely next token. None as for
            `kl`.
        layers: name of a layer in low bits → KL(original ‖ original with only this layer in low bits), in nats a
            token. Empty unless they were asked for.
        tasks: task of lm-eval → metric → value. Empty unless they were asked for.
    """

    name: str
    nbytes: int
    tokens: int = 0
    perplexity: float | None = None
    kl: float | None = None
    agreement: float | None = None
    layers: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationReport:
    """The result of `lowbit.evaluate`: `print` it, or read `original` and `models`.

    Attributes:
        original: the model in high precision, or None.
        models: the low-bit models in the order in which they were given.
    """

    original: Evaluation | None
    models: tuple[Evaluation, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """The table: its head, the original, and each model."""
        every = [*([] if self.original is None else [self.original]), *self.models]
        metrics = [(t, m) for model in every for t, own in model.tasks.items() for m in own]
        metrics = [*dict.fromkeys(metrics)]
        columns = {
            "bytes": [f"{e.nbytes:,}" for e in every],
            "perplexity": [_cell(e.perplexity, ".4g") for e in every],
            "KL, nats a token": [_cell(e.kl, ".4g") for e in every],
            "top-1 agreement": [_cell(e.agreement, ".1%") for e in every],
            **{
                f"{t} {m}": [_cell(e.tasks.get(t, {}).get(m), ".4g") for e in every]
                for t, m in metrics
            },
        }
        shown = {head: cells for head, cells in columns.items() if any(cells)}
        lines = zip(*shown.values(), strict=True)
        return [("model", *shown), *((e.name, *line) for e, line in zip(every, lines, strict=True))]

    def layer_rows(self) -> list[tuple[str, ...]]:
        """The table of layers, the one that loses most first: name, and KL of each model with this layer alone."""
        names = dict.fromkeys(name for model in self.models for name in model.layers)
        worst = {n: max(m.layers.get(n, 0.0) for m in self.models) for n in names}
        order = sorted(names, key=lambda name: -worst[name])
        head = ("this layer alone: KL", *(m.name for m in self.models))
        return [head, *((n, *(_cell(m.layers.get(n), ".3g") for m in self.models)) for n in order)]

    def __str__(self) -> str:
        text = aligned(self.rows(), left=(0,))
        return f"{text}\n\n{aligned(self.layer_rows(), left=(0,))}" if self._has_layers() else text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def figure(self) -> Any:
        """A figure of matplotlib: KL against bytes, a point a model, and where layers were measured a bar a layer.
        Without an original: perplexity against bytes. Needs matplotlib, which the extra `cli` brings."""
        figures = optional.imported("matplotlib.figure", "EvaluationReport.figure needs", "cli")
        names = [name for name, *_ in self.layer_rows()[1:]] if self._has_layers() else []
        height = max(4.0, 1.5 + 0.16 * len(names) * len(self.models))
        figure = figures.Figure(figsize=(12 if names else 6, height), layout="constrained")
        points, *others = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
        compared = self.original is not None
        values = [m.kl if compared else m.perplexity for m in self.models]
        known = [(m, v) for m, v in zip(self.models, values, strict=True) if v is not None]
        sizes, damage = [m.nbytes / 1e6 for m, _ in known], [value for _, value in known]
        points.plot(sizes, damage, "o")
        points.margins(0.2)
        points.set_yscale("log" if min(damage, default=0.0) > 0 else "linear")
        for (model, y), x in zip(known, sizes, strict=True):
            points.annotate(model.name, (x, y), xytext=(4, 4), textcoords="offset points")
        points.set(
            xlabel="MB", ylabel="KL to the original, nats a token" if compared else "perplexity"
        )
        width = 0.8 / len(self.models)
        for axes in others:
            for i, model in enumerate(self.models):
                at = [j + (i + 0.5) * width - 0.4 for j in range(len(names))]
                axes.barh(at, [model.layers.get(n, 0.0) for n in names], width, label=model.name)
            axes.set_yticks(range(len(names)), names)
            axes.set(xlabel="KL with this layer alone in low bits, nats a token")
            axes.invert_yaxis()
            axes.legend(frameon=False)
        return figure

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write `figure()`, in the format that the suffix of `path` names."""
        self.figure().savefig(path)

    def _has_layers(self) -> bool:
        return any(model.layers for model in self.models)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
