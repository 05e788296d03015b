"""The host's time to issue linear layers in training without torch.compile, forward and backward, beside bf16: one
layer, and three that read one input, as those of query, key and value do.

The layers are small, so that the GPU never holds the host up. Each scheme and bf16 take turns in short rounds, and the
fastest round of each counts: other work on the host only makes rounds slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.registry import Problem, Result, Row, Table, benchmark
from lowbit import train
from lowbit.train import (
    Float8BlockMixedPrecision,
    Float8MixedPrecision,
    Int8MixedPrecision,
    Int8Weight,
)

REFERENCE = "bf16"
SIZE = 256
SCHEMES: dict[str, Any] = {
    "int8": Int8MixedPrecision(always=True),
    "int8, gradients to nearest": Int8MixedPrecision(always=True, stochastic_rounding=False),
    "float8 rowwise": Float8MixedPrecision(always=True),
    "float8 tensorwise": Float8MixedPrecision(always=True, tensorwise=True),
    "float8 blocks": Float8BlockMixedPrecision(always=True),
    "int8 weight, int8 products": Int8Weight(True, True, True, always=True),
    REFERENCE: None,
}
ROUNDS, CALLS = 40, 50


@dataclass(frozen=True)
class EagerCandidate:
    """Layers [size, size] that a scheme prepared, or plain ones."""

    name: str
    scheme: Any
    layers: int = 1
    device: str = "cuda"
    size: int = SIZE


@dataclass(frozen=True)
class HostTimes:
    """Seconds of a forward pass, and of a forward and a backward pass; of the candidate, and of bf16 beside it."""

    own: tuple[float, float]
    reference: tuple[float, float]


class Layers:
    """The layers of a candidate, and the operands of their calls."""

    def __init__(self, candidate: EagerCandidate) -> None:
        size = candidate.size
        options: dict[str, Any] = {"device": candidate.device, "dtype": torch.bfloat16}
        made = [nn.Linear(size, size, bias=False, **options) for _ in range(candidate.layers)]
        self.model = nn.ModuleList(made)
        if candidate.scheme is not None:
            train.prepare_(self.model, candidate.scheme)
        self.layers = list(self.model)
        self.x = torch.randn(size, size, **options).requires_grad_()
        self.grads = [torch.randn(size, size, **options) for _ in self.layers]

    def seconds(self, number: int, backward: bool) -> float:
        """Seconds of one of `number` calls. Between them, and not timed, gradients are dropped."""
        spent = 0.0
        if self.x.is_cuda:
            torch.cuda.synchronize()
        for _ in range(number):
            start = time.perf_counter()
            x = self.x if len(self.layers) == 1 else self.x.view_as(self.x)  # as a result, shared
            ys = [layer(x) for layer in self.layers]
            if backward:
                torch.autograd.backward(ys, self.grads)
            spent += time.perf_counter() - start
            self.x.grad = None
            for layer in self.layers:
                layer.weight.grad = None
        return spent / number


def measure(candidate: EagerCandidate, repeats: int) -> HostTimes:
    """Time the candidate and bf16 in turn. `ROUNDS` takes the place of `repeats`."""
    layers = Layers(candidate), Layers(replace(candidate, scheme=None))
    for layer in layers:
        layer.seconds(10, backward=True)
    rounds, number = (ROUNDS, CALLS) if candidate.device == "cuda" else (2, 2)
    timed = [(layer, backward) for layer in layers for backward in (False, True)]
    found = [float("inf")] * len(timed)
    for _ in range(rounds):
        for i, (layer, backward) in enumerate(timed):
            found[i] = min(found[i], layer.seconds(number, backward))
    return HostTimes((found[0], found[1]), (found[2], found[3]))


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    times: HostTimes = row.measured
    forward, both = times.own
    return [
        f"{forward * 1e6:.0f}",
        f"{both * 1e6:.0f}",
        f"{times.reference[0] * 1e6:.0f}, {times.reference[1] * 1e6:.0f}",
        f"{forward / times.reference[0]:.2f}",
        f"{both / times.reference[1]:.2f}",
    ]


TABLE = Table(
    columns=("forward", "forward + backward", "bf16 beside it", "forward / bf16", "both / bf16"),
    measure=measure,
    cells=cells,
    legend=f"Microseconds of the host, not compiled; the fastest of {ROUNDS} rounds of {CALLS} calls, "
    "each beside a round of bf16. The GPU is idle at the start of a round.",
)


@benchmark("eager_linear", "the host's time of linear layers that are not compiled", table=TABLE)
def eager_linear() -> Iterator[Problem]:
    for layers, title in ((1, "one layer"), (3, "three layers of one input")):
        candidates = [EagerCandidate(name, scheme, layers) for name, scheme in SCHEMES.items()]
        yield Problem(f"{title}, {SIZE} x {SIZE}, {SIZE} rows", candidates, REFERENCE)
