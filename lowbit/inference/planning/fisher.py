"""What the rounding of each weight costs, estimated by gradients: one forward and backward pass a batch in all.

Where rounding moves a weight by Δ, the logits' distribution moves by a divergence of, to second order,

    KL ≈ 1/2 · Σ_ij F_ij Δ_ij² / rows,    F_ij = E (∂ log p(y) / ∂ W_ij)²

with labels y drawn from the model's own distribution, so that F is the diagonal of the Fisher information. Errors of
rounding are as good as independent, so the other entries add nothing on average. The gradient of a batch is that of the
sum over its rows. Its square estimates the sum of F over its sequences without bias, as gradients of labels that were
drawn independently have mean 0. A hook squares each gradient when it is complete, and frees it. F takes 4 bytes a
weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.convert import Target
from lowbit.inference.planning.units import Unit
from lowbit.tracing.batches import call, eval_mode, output_tensor
from lowbit.tracing.trace import state_restored


def estimated(
    model: nn.Module,
    batches: Iterable[Any],
    units: list[Unit],
    passed: Callable[[], object] | None = None,
) -> list[list[float]]:
    """The KL divergence, in nats a row of logits, that each option of each unit costs.

    Args:
        model: gives logits [..., classes].
        batches: as `lowbit.autoquant` takes them.
        units: with options that round weights alone.
        passed: called after each batch.

    Raises ValueError: an option that rounds activations; no batches; a gradient of NaN or infinity.
    """
    for target in (t for unit in units for option in unit.options for t in option.targets):
        if target.scheme.activation is not None:
            raise ValueError(
                f"{target.fqn}: {target.scheme} rounds activations, whose damage gradients of weights don't "
                "show; accepted: weight-only schemes, or estimate=False"
            )
    squares = _Squares(units)
    rows = count = 0
    weights = [t.weight for unit in units for t in unit.weights.values()]
    with ExitStack() as stack:
        for context in (state_restored(model), eval_mode(model), _only(model, weights)):
            stack.enter_context(context)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        squares.listen(stack)
        for batch in batches:
            logits = output_tensor(call(model, batch))
            logits = logits.reshape(-1, logits.shape[-1])
            with torch.no_grad():
                labels = torch.multinomial(logits.detach().float().softmax(-1), 1).squeeze(1)
            F.cross_entropy(logits.float(), labels, reduction="sum").backward()
            rows, count = rows + len(logits), count + 1
            if passed is not None:
                passed()
    if not count:
        raise ValueError("there are no batches; accepted: at least one")
    return [squares.damages(unit, rows) for unit in units]


class _Squares:
    """Σ g² of each weight over batches, float32."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.found: dict[int, Tensor] = {}

    def listen(self, stack: ExitStack) -> None:
        for unit in self.units:
            for target in unit.weights.values():
                hook = target.weight.register_post_accumulate_grad_hook(self._add)
                stack.callback(hook.remove)

    def _add(self, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        squares = grad.float().square_()
        own = self.found.setdefault(id(parameter), squares)
        if own is not squares:
            own.add_(squares)

    @torch.no_grad()
    def damages(self, unit: Unit, rows: int) -> list[float]:
        """1/2 · Σ F Δ² / rows of each option."""
        found = [sum(map(self._moved, o.targets, o.weights())) for o in unit.options]
        if not all(map(math.isfinite, found)):
            raise ValueError(
                f"the gradient of {unit.name} is NaN or infinite; find the batch that gives it, or take a model in "
                "bfloat16 or float32"
            )
        return [0.5 * value / max(rows, 1) for value in found]

    def _moved(self, target: Target, weight: Any) -> float:
        squares = self.found.get(id(target.weight))
        if squares is None:  # no batch reached it
            return 0.0
        moved = weight.dequantize().float() - target.weight.detach().float()
        return float((squares * moved.square()).sum(dtype=torch.float64))


class _only:
    """The context in which only these parameters get gradients."""

    def __init__(self, model: nn.Module, weights: list[Tensor]) -> None:
        self.before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
        self.chosen = {id(w) for w in weights}

    def __enter__(self) -> None:
        for parameter, *_ in self.before:
            parameter.requires_grad_(id(parameter) in self.chosen)
            parameter.grad = None

    def __exit__(self, *_: object) -> None:
        for parameter, required, grad in self.before:
            parameter.requires_grad_(required)
            parameter.grad = grad
