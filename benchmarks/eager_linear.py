"""The host's time to issue one linear layer in training without torch.compile, forward and backward, beside bf16.

The layer is small, so that the GPU never holds the host up. Each scheme and bf16 take turns in short rounds, and the
fastest round of each counts: other work on the host only makes rounds slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    """A layer [size, size] that a scheme prepared, or a plain one."""

    name: str
    scheme: Any
    device: str = "cuda"
    size: int = SIZE


@dataclass(frozen=True)
class HostTimes:
    """Seconds of a forward pass, and of a forward and a backward pass; of the candidate, and of bf16 beside it."""

    own: tuple[float, float]
    reference: tuple[float, float]


@dataclass
class Layer:
    """A layer with the calls that are timed."""

    candidate: EagerCandidate
    module: nn.Module = field(init=False)
    x: Tensor = field(init=False)
    grad: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.candidate.size
        options: dict[str, Any] = {"device": self.candidate.device, "dtype": torch.bfloat16}
        self.module = nn.Linear(size, size, bias=False, **options)
        if self.candidate.scheme is not None:
            train.prepare_(self.module, self.candidate.scheme)
        self.x = torch.randn(size, size, **options).requires_grad_()
        self.grad = torch.randn(size, size, **options)

    def forward(self) -> Tensor:
        return self.module(self.x)

    def both(self) -> None:
        self.forward().backward(self.grad)
        self.x.grad = None
        self.module.zero_grad()


def fastest(calls: list[Callable[[], Any]], rounds: int, number: int) -> list[float]:
    """Seconds of one call of each in its fastest round of `number`, in turn."""
    found = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(number):
                call()
            found[i] = min(found[i], (time.perf_counter() - start) / number)
    return found


def measure(candidate: EagerCandidate, repeats: int) -> HostTimes:
    """`repeats`: not used; the number of rounds is fixed."""
    layers = (
        Layer(candidate),
        Layer(EagerCandidate(REFERENCE, None, candidate.device, candidate.size)),
    )
    for layer in layers:
        for _ in range(10):
            layer.both()
    rounds, number = (ROUNDS, CALLS) if candidate.device == "cuda" else (2, 2)
    calls = [call for layer in layers for call in (layer.forward, layer.both)]
    times = fastest(calls, rounds, number)
    return HostTimes((times[0], times[1]), (times[2], times[3]))


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
    legend=f"Microseconds of the host for one layer, not compiled; the fastest of {ROUNDS} rounds of {CALLS} calls, "
    "each beside a round of bf16. The GPU is idle at the start of a round.",
)


@benchmark("eager_linear", "the host's time of a linear layer that is not compiled", table=TABLE)
def eager_linear() -> Iterator[Problem]:
    candidates = [EagerCandidate(name, scheme) for name, scheme in SCHEMES.items()]
    yield Problem(f"{SIZE} x {SIZE}, {SIZE} rows", candidates, REFERENCE)
