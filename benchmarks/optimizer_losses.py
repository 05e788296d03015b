"""Losses of Muon and SOAP with states in few bits, against float32 states: a small network on a CPU, paired seeds.

The network has linear layers of 64, 128, 128 and 64. Its inputs have standard deviations from a log-normal distribution
of sigma 1/2, and its targets are those of a fixed network with noise of 0.3. It trains 200 steps of 64 samples, with a
warm-up of 20 steps and a cosine. Optimizers of one problem meet the same weights and batches. The loss is that of 4,096
other samples after the last step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.registry import Problem, Result, Row, Table, benchmark
from lowbit import optim
from lowbit.optim.base import LowbitOptimizer
from lowbit.tensor import CodebookTensor
from recipes.convergence_report import half_interval

STEPS, WARM_UP, BATCH, HELD_OUT = 200, 20, 64, 4096
SIZES = (64, 128, 128, 64)
RATES = (0.0025, 0.01, 0.02, 0.03, 0.05)
"""Of Muon. The loss is lowest at the last two."""


@dataclass(frozen=True)
class LossCandidate:
    """An optimizer with its options, and the seeds of its runs."""

    name: str
    cls: type[LowbitOptimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 4


@dataclass(frozen=True)
class Losses:
    """The loss of each seed, and the bytes of states a parameter."""

    each: list[float]
    bytes: float


def trained(candidate: LossCandidate, repeats: int = 1, steps: int = STEPS) -> Losses:
    """The runs of all seeds."""
    found = [_run(candidate, seed, steps) for seed in range(candidate.seeds)]
    return Losses([loss for loss, _ in found], found[0][1])


def _run(candidate: LossCandidate, seed: int, steps: int) -> tuple[float, float]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    deviations = draw(SIZES[0]).mul(0.5).exp()
    teacher = draw(SIZES[0], 96) * 1.5 / 8, draw(96, SIZES[-1]) * 1.5 / math.sqrt(96)

    def samples(count: int) -> tuple[Tensor, Tensor]:
        x = draw(count, SIZES[0]) * deviations
        hidden = (x / deviations.square().mean().sqrt() @ teacher[0]).tanh()
        return x, hidden @ teacher[1] + 0.3 * draw(count, SIZES[-1])

    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIZES):
        linear = nn.Linear(inputs, outputs)
        linear.weight.data = draw(outputs, inputs) / math.sqrt(inputs)
        linear.bias.data.zero_()
        layers += [linear, nn.GELU()]
    model = nn.Sequential(*layers[:-1])
    held_out = samples(HELD_OUT)
    optimizer = candidate.cls(model.parameters(), **{"lr": 0.01, **candidate.options})

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(steps):
        x, y = samples(BATCH)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        loss = F.mse_loss(model(held_out[0]), held_out[1]).item()
    return loss, _state_bytes(optimizer) / sum(p.numel() for p in model.parameters())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                parts = [value]
                if isinstance(value, CodebookTensor):
                    parts = [value.codes, value.scale]
                total += sum(part.nbytes for part in parts)
    return total


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    each, base = row.measured.each, result.reference.measured.each
    changes = [100 * (loss / other - 1) for loss, other in zip(each, base, strict=True)]
    change = f"{statistics.mean(changes):+.2f}"
    half = half_interval(changes)
    if row is not result.reference:
        change += f" ± {half:.2f}%" if half is not None else "%"
    else:
        change = ""
    return [f"{statistics.mean(each):.4f}", change, f"{row.measured.bytes:.2f}"]


def _problem(
    name: str,
    rows: Mapping[str, tuple[type[LowbitOptimizer], Mapping[str, Any]]],
    seeds: int = 4,
) -> Problem:
    candidates = [LossCandidate(n, cls, options, seeds) for n, (cls, options) in rows.items()]
    return Problem(name, candidates, candidates[0].name)


@benchmark(
    "optimizer_losses",
    "losses of Muon and SOAP with states in few bits",
    table=Table(
        columns=("loss", "against the first row", "bytes a parameter"),
        measure=trained,
        cells=cells,
        legend="Means of four seeds, at each rate of 20, paired, with 95% intervals. Bytes of all states of all "
        "parameters. Rates are 0.01 where no other stands.",
    ),
    device="cpu",
)
def optimizer_losses() -> Iterator[Problem]:
    full: dict[str, Any] = {"state": "fp32"}
    faster = {"ns_scaling": "gram", "ns_steps": 4}
    yield _problem(
        "Muon",
        {
            'Muon(state="fp32")': (optim.Muon, full),
            "Muon8bit": (optim.Muon8bit, {}),
            "MuonFp8": (optim.MuonFp8, {}),
            "Muon4bit": (optim.Muon4bit, {}),
            "fp32, ns_steps=4": (optim.Muon, {**full, "ns_steps": 4}),
            'fp32, ns_steps=4, ns_scaling="gram"': (optim.Muon, {**full, **faster}),
            "fp32, row_beta2=0.95": (optim.Muon, {**full, "row_beta2": 0.95}),
            "fp32, all three": (optim.Muon, {**full, **faster, "row_beta2": 0.95}),
        },
    )
    for lr in RATES:
        rows = {"five steps": {}, "four scaled steps": faster}
        ways = {name: (optim.Muon, {**full, **o, "lr": lr}) for name, o in rows.items()}
        yield _problem(f"Muon, rate {lr:g}", ways, seeds=20)
    yield _problem(
        "SOAP",
        {
            'SOAP(state="fp32")': (optim.SOAP, full),
            "SOAP8bit": (optim.SOAP8bit, {}),
            "SOAP4bit": (optim.SOAP4bit, {}),
            "SOAPFp8": (optim.SOAPFp8, {}),
            'SOAP(state="bf16")': (optim.SOAP, {"state": "bf16"}),
            'AdamW(state="fp32", betas=(0.95, 0.95))': (
                optim.AdamW,
                {**full, "betas": (0.95, 0.95)},
            ),
        },
    )
