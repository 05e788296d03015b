"""What a model loses while it is changed: its loss, the divergence of its logits, or the error of its output.

    lost = damages(model, batches, [changed, …])       # each a function that gives a context in which it is changed

`lowbit.autoquant` measures a model with one weight rounded by it, and `exchanged` of `lowbit.layers.exchange` is such a
context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowbit.numerics.divergence import divergence
from lowbit.numerics.snr import Energies
from lowbit.tracing.batches import call, entry, eval_mode, output_tensor
from lowbit.tracing.trace import state_restored

Loss = Callable[[nn.Module, Any], Tensor]
"""A function of the model and a batch that gives a scalar."""
Measure = Loss | Literal["kl", "error"] | None
"""A loss; "kl": the divergence of the logits from those in high precision, in nats a row (a token; padding counts);
"error": ‖y − ŷ‖² / ‖y‖² of the output y; None: the output's `loss` where it has one, else "kl" of its `logits`, else
"error"."""
Changed = Callable[[], AbstractContextManager[Any]]
KL_ROWS = 1024
"""Rows of logits that are in float32 at a time."""


@dataclass(frozen=True)
class Damages:
    """The means over batches.

    Attributes:
        measure: "loss", "kl" or "error".
        baseline: the measure of the model as it is; 0 for "kl" and "error".
        values: the measure in each context, in their order.
    """

    measure: str
    baseline: float
    values: tuple[float, ...]

    @property
    def added(self) -> tuple[float, ...]:
        """What each context adds to the baseline."""
        return tuple(value - self.baseline for value in self.values)


def damages(
    model: nn.Module,
    batches: Iterable[Any],
    contexts: Sequence[Changed],
    measure: Measure = None,
    *,
    passed: Callable[[], object] | None = None,
) -> Damages:
    """Measure `model` in each context, on the same batches.

    The model runs eagerly, in eval mode and without gradients. Buffers and random states are afterwards as they were.

    Args:
        model: the model; `batches` are as `lowbit.autoquant` takes them, on its device.
        contexts: each gives a context in which the model is changed.
        measure: see `Measure`.
        passed: called after each pass in one of `contexts`.

    Raises:
        TypeError: an output without a tensor, where no loss is given, or a loss that is not a number.
        ValueError: an unknown measure; no batches; a batch whose measure in high precision is not finite.
    """
    if isinstance(measure, str) and measure not in ("kl", "error"):
        raise ValueError(f"loss must be a function, 'kl', 'error' or None, got {measure!r}")
    meter = Meter(model, measure)
    totals, baseline, count = [0.0] * len(contexts), 0.0, 0
    eager = torch.compiler.set_stance("force_eager")
    with eval_mode(model), eager, torch.no_grad():
        for batch in batches:
            measured = meter.reference(batch)
            if not math.isfinite(measured):
                raise ValueError(
                    f"batch {count}: the {meter.measure} of the model in high precision is {measured}, with which "
                    "nothing compares; leave the batch out, or repair the model"
                )
            baseline += measured
            for i, context in enumerate(contexts):
                with context():
                    totals[i] += meter.score(batch)
                if passed is not None:
                    passed()
            count += 1
    if not count:
        raise ValueError("there are no batches; accepted: at least one")
    return Damages(meter.measure, baseline / count, tuple(total / count for total in totals))


class Meter:
    """Runs the model, and compares what it gives with what it gave in high precision."""

    def __init__(self, model: nn.Module, loss: Loss | str | None) -> None:
        self.model = model
        self.loss = loss if callable(loss) else None
        self.measure = "loss" if callable(loss) else loss or ""
        self.expected: Tensor | None = None

    def reference(self, batch: Any) -> float:
        """The measure of the model as it is now, with which `score` compares."""
        if self.loss is not None:
            return self.score(batch)
        output = self._run(batch)
        if not self.measure:
            found = [name for name in ("loss", "logits") if entry(output, name) is not None]
            self.measure = {"loss": "loss", "logits": "kl"}[found[0]] if found else "error"
        if self.measure == "loss":
            return float(entry(output, "loss"))
        self.expected = output_tensor(output)
        return math.nan if bool(self.expected.isnan().any()) else 0.0

    def score(self, batch: Any) -> float:
        if self.loss is not None:
            with state_restored(self.model):
                found = self.loss(self.model, batch)
            if isinstance(found, Tensor) and found.numel() != 1:
                raise TypeError(
                    f"loss(model, batch) gave a tensor of shape {tuple(found.shape)}; accepted: a scalar, such as its "
                    "mean"
                )
            return float(found)
        output = self._run(batch)
        if self.measure == "loss":
            return float(entry(output, "loss"))
        found, expected = output_tensor(output), self.expected
        assert expected is not None
        return _divergence(expected, found) if self.measure == "kl" else _error(expected, found)

    def _run(self, batch: Any) -> Any:
        with state_restored(self.model):
            return call(self.model, batch)


def _divergence(expected: Tensor, found: Tensor) -> float:
    """KL(softmax(expected) ‖ softmax(found)), the mean over rows, in nats."""
    total, rows = 0.0, 0
    pairs = (t.reshape(-1, t.shape[-1]).split(KL_ROWS) for t in (expected, found))
    for before, after in zip(*pairs, strict=True):
        p, q = before.float().log_softmax(-1), after.float().log_softmax(-1)
        total += float(divergence(p, q))
        rows += len(before)
    return total / max(rows, 1)


def _error(expected: Tensor, found: Tensor) -> float:
    energies = Energies()
    energies.add(expected, found)
    return energies.relative_error()
