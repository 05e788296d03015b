"""The rounding of merged weights, learned from batches by the steps of a calibration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lowbit.inference.calibration.batches import usable_batches
from lowbit.inference.calibration.call import checked_steps
from lowbit.inference.calibration.learned_rounding import LearnedRounding, mean_losses
from lowbit.inference.calibration.learned_weight import originals
from lowbit.inference.calibration.report import CalibrationReport
from lowbit.inference.calibration.run import Run
from lowbit.inference.calibration.stages import block_of
from lowbit.inference.calibration.step import Start, Step
from lowbit.interop.peft.report import MergeLosses, MergeReport, measured
from lowbit.interop.peft.sums import Kept, Sum, attribute_of, values_of
from lowbit.schemes.scheme import Scheme
from lowbit.tracing.batches import call, eval_mode, uncached_autocast

STEPS: tuple[Step, ...] = (
    LearnedRounding(steps=100, batch_size=16, over="model", reach=2.0, scale_rate=0, vector_rate=0),
)
"""The steps of a merge by batches, unless it gets others."""


class Learned:
    """The rounding of the sums by batches.

    Raises TypeError and ValueError for batches and steps, as `merge_` says."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], steps: Any) -> None:
        self.model, self.batches = model, usable_batches(model, batches)
        self.steps = checked_steps(STEPS if steps is None else steps)
        if changing := [step.method for step in self.steps if step.comes_first]:
            raise ValueError(
                f"{changing[0]} changes the model in high precision, and a merge rounds into the scheme that the base "
                "has; accepted: steps that round, such as [GPTQ(), LearnedRounding(over='model')]"
            )
        self.sums: list[Sum] = []

    def vectors(self) -> list[Kept]:
        """The norms and biases, where a step learns them."""
        learns = any(isinstance(s, LearnedRounding) and s.vector_rate for s in self.steps)
        return [Kept([p for p in self.model.parameters() if p.ndim < 2])] if learns else []

    def run(self, sums: list[Sum], report: MergeReport) -> None:
        """Give the weights the values that the steps find, if these lose less than those rounded to nearest."""
        self.sums = sums
        vectors = self.vectors()
        nearest = [s.held.detach().clone() for s in sums]
        own = [s.loss for s in self.steps if isinstance(s, LearnedRounding) and s.over == "model"]
        loss = own[-1] if own else None
        eager = torch.compiler.set_stance("force_eager")
        with uncached_autocast(), eager, eval_mode(self.model):
            with self._base():
                without = self._measured(loss)
            requantized = self._measured(loss)
            report.calibration = self._calibrated()
            learned = self._measured(loss)
        kept = learned < requantized
        report.losses = MergeLosses(without, requantized, learned, kept)
        if not kept:
            with torch.no_grad():
                for s, values in zip(sums, nearest, strict=True):
                    s.held.copy_(values)
            for each in vectors:
                each.restore()
        for s in sums:
            assert s.before is not None
            one, before = report.layers[s.at], values_of(s.before.weight(s))
            report.layers[s.at] = measured(one.name, s.held, s.values, before)

    def _calibrated(self) -> CalibrationReport:
        found = {id(m): name for name, m in self.model.named_modules()}
        starts: dict[str, Start] = {}
        schemes: dict[str, Scheme] = {}
        try:
            for s in self.sums:
                name = f"{found[id(s.layer.get_base_layer())]}.{attribute_of(s.layer)}"
                starts[name] = Start(s.held, s.values)
                schemes[name] = Scheme(s.held.spec)
                plain = s.values.to(s.held.dtype)
                s.put(nn.Parameter(plain, requires_grad=False))
            run = Run(
                *(self.model, schemes, None, self.steps, self.batches, "squared_error"),
                starts=starts,
                reference=self._reference,
            )
            return run.quantize(None, torch.device("cpu"))
        finally:
            for s in self.sums:
                s.put(s.held)

    def _measured(self, loss: Any) -> float:
        block = block_of(self.model, self.batches)
        block.high = self._reference
        seen, held_out = mean_losses(block, loss)
        return seen if held_out is None else held_out

    def _reference(self, number: int) -> Any:
        """The output of the base with its adapters beside it."""
        with ExitStack() as stack:
            for s in self.sums:
                stack.enter_context(_apart(s.layer))
            stack.enter_context(self._base())
            return call(self.model, self.batches[number])

    @contextmanager
    def _base(self) -> Iterator[None]:
        """The context in which the base layers have their weights and biases from before the merge."""
        kept = [(s, s.before) for s in self.sums if s.before is not None]
        held = [getattr(s.layer.get_base_layer(), attribute_of(s.layer)) for s, _ in kept]
        try:
            for s, before in kept:
                s.put(before.weight(s))
            with originals((), [pair for s, before in kept for pair in before.biases(s)]):
                yield
        finally:
            for (s, _), weight in zip(kept, held, strict=True):
                s.put(weight)


@contextmanager
def _apart(layer: Any) -> Iterator[None]:
    """The context in which the adapters of a merged layer are beside its weight."""
    merged = list(layer.merged_adapters)
    layer.merged_adapters.clear()
    try:
        yield
    finally:
        layer.merged_adapters.extend(merged)
