"""One step of Muon over the weights of a dense model and of a mixture of experts, against torch.optim.Muon.

Matrices go to Muon; the embedding and the vectors go to AdamW, which is fused in both libraries. Times are measured as
in ``optimizer_step``; the floor is that of the bytes, which a Muon step is far from, since it computes: see the LOG.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.optimizer_step import StepCandidate, StepTimes, measure_step
from benchmarks.optimizers import (
    LLAMA_1B,
    OptimizerChoice,
    random_parameters,
    step_seconds,
    synchronize,
)
from benchmarks.ranks import in_ranks
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio

EXPERTS = 128
ATTENTION = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096)]
EXPERT = [(768, 2048), (768, 2048), (2048, 768)]
"""The shapes of a layer of Qwen3-30B-A3B."""
MIXTURE: list[tuple[int, ...]] = [*ATTENTION, *(EXPERT * EXPERTS)] * 2
STACKED: list[tuple[int, ...]] = [*ATTENTION, *((EXPERTS, *shape) for shape in EXPERT)] * 2
VOCABULARY = 100_000
"""Rows from which on a matrix is an embedding here."""
REFERENCE = "torch Muon, AdamW fused"
MOST_REPEATS = 9
"""Timed steps of a row at most, so that all rows take a minute."""


class TorchMuon:
    """torch.optim.Muon for the matrices and torch.optim.AdamW for the other parameters."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        matrices, others = divided(params)
        self.parts: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=1e-3)]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=1e-4, fused=True))

    @property
    def state(self) -> dict[Any, Any]:
        return dict(chain.from_iterable(part.state.items() for part in self.parts))

    def step(self) -> None:
        for part in self.parts:
            part.step()


def divided(params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters for Muon, and those for AdamW."""
    is_matrix = [p.ndim >= 2 and p.shape[0] < VOCABULARY for p in params]
    pairs = list(zip(params, is_matrix, strict=True))
    return [p for p, yes in pairs if yes], [p for p, yes in pairs if not yes]


def lowbit_muon(params: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
    from lowbit.optim import Muon

    matrices, others = divided(params)
    groups = [
        {"params": [p for p in matrices if p.ndim == 2], "use_muon": True},
        {"params": [p for p in matrices if p.ndim == 3], "use_muon": True, "stacked": True},
        {"params": others, "use_muon": False},
    ]
    return Muon([g for g in groups if g["params"]], lr=1e-3, adamw_lr=1e-4, **options)


def muon_choices() -> list[OptimizerChoice]:
    scaled = {"ns_scaling": "gram", "ns_steps": 4}
    chosen: dict[str, dict[str, Any]] = {
        "Muon8bit": {"state": "8bit"},
        "Muon8bit, 4 scaled steps": {"state": "8bit", **scaled},
        "Muon8bit, NorMuon, 4 scaled steps": {"state": "8bit", "row_beta2": 0.95, **scaled},
        "Muon4bit": {"state": "4bit"},
        "Muon, fp32 states": {"state": "fp32"},
    }
    return [
        OptimizerChoice(f"lowbit {name}", partial(lowbit_muon, **options))
        for name, options in chosen.items()
    ]


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    times: StepTimes = row.measured
    reference: StepTimes | None = result.reference.measured
    assert times.held is not None and times.extra is not None
    return [
        f"{times.step * 1e3:.1f}",
        ratio(times.step, reference.step if reference else None),
        f"{times.issue * 1e3:.1f}",
        f"{times.first:.2f}",
        f"{times.held / times.parameters:.2f}",
        f"{times.extra / 2**20:.0f}",
    ]


def measure(candidate: StepCandidate, repeats: int) -> StepTimes:
    """`measure_step` with at most `MOST_REPEATS`."""
    return measure_step(candidate, min(repeats, MOST_REPEATS))


TABLE = Table(
    columns=("step ms", "/ torch", "host ms", "first step s", "state B/param", "extra peak MiB"),
    measure=measure,
    cells=cells,
    legend="Medians. *host*: the time until `step()` returns, nothing queued, the gradients at other addresses than in "
    "the previous step. *first step*: in this process, after the compilation of other rows. *state*: memory of the "
    'optimizer, by the allocator. *extra peak*: memory of a step beyond that. *scaled*: `ns_scaling="gram"`; the '
    f"others take five steps. At most {MOST_REPEATS} timed steps a row.",
)


@benchmark("muon_step", "one step of Muon", table=TABLE)
def muon_step() -> Iterator[Problem]:
    make: Any = TorchMuon  # it has the methods that are measured
    torchs = OptimizerChoice(REFERENCE, make)
    dense = [StepCandidate(choice, LLAMA_1B) for choice in [*muon_choices(), torchs]]
    yield Problem("Llama-3.2-1B, 112 matrices, 1.236e9 weights", dense, REFERENCE)
    experts = [StepCandidate(choice, MIXTURE) for choice in [muon_choices()[0], torchs]]
    for choice in muon_choices()[:2]:
        stacked = replace(choice, name=f"{choice.name}, experts stacked")
        experts.append(StepCandidate(stacked, STACKED))
    name = "2 layers of Qwen3-30B-A3B, 776 matrices, 1.246e9 weights"
    yield Problem(name, experts, REFERENCE)


@dataclass(frozen=True)
class SharedCandidate(StepCandidate):
    """A step of parameters whose rows ``ranks`` GPUs share; ``most_seconds``: the time limit of the processes."""

    ranks: int = 2
    most_seconds: float = 120.0

    @property
    def name(self) -> str:
        return f"{self.choice.name}, {self.ranks} GPU{'s' if self.ranks > 1 else ''}"


def measure_rank(candidate: SharedCandidate, repeats: int) -> tuple[float, float, int]:
    """Seconds of a step, the host's part of it, and the bytes of states, on one rank of the process group."""
    on_gpu = candidate.device == "cuda"
    mesh = init_device_mesh(candidate.device, (dist.get_world_size(),))
    params = []
    for whole in random_parameters(candidate.shapes, candidate.choice.dtype, candidate.device):
        assert whole.grad is not None
        params.append(torch.nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)])))
        params[-1].grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
    optimizer: Any = candidate.choice.make(params)
    for _ in range(3):
        optimizer.step()
    step = statistics.median(step_seconds(optimizer.step, repeats, on_gpu))
    synchronize(on_gpu)
    started = time.perf_counter()
    optimizer.step()
    issue = time.perf_counter() - started
    synchronize(on_gpu)
    return step, issue, optimizer.state_bytes()


def measure_shared(candidate: SharedCandidate, repeats: int) -> tuple[float, float, int]:
    """The slowest rank's times and the fullest rank's bytes. Raises as `in_ranks` does."""
    limits = candidate.ranks, candidate.device, candidate.most_seconds
    steps, issues, sizes = zip(*in_ranks(measure_rank, *limits, candidate, repeats), strict=True)
    return max(steps), max(issues), max(sizes)


def shared_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    step, issue, size = row.measured
    reference = result.reference.measured
    against_one = ratio(step, reference[0] if reference else None)
    return [f"{step * 1e3:.1f}", against_one, f"{issue * 1e3:.1f}", f"{size / 2**30:.2f}"]


SHARED_TABLE = Table(
    columns=("step ms", "/ one GPU", "host ms", "states GiB a rank"),
    measure=measure_shared,
    cells=shared_cells,
    legend="Parameters sharded by rows as FSDP2 does; medians of the slowest rank. *host*: the time until `step()` "
    "returns, nothing queued.",
)


@benchmark("muon_step_shared", "one step of Muon, shared by GPUs", table=SHARED_TABLE)
def muon_step_shared() -> Iterator[Problem]:
    chosen = [SharedCandidate(muon_choices()[0], LLAMA_1B, ranks=ranks) for ranks in (1, 2, 4)]
    yield Problem("Llama-3.2-1B", chosen, chosen[0].name)
