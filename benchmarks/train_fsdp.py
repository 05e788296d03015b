"""A training step of the 1.2B Llama of `train_llama` on two GPUs under FSDP2, low-bit beside plain bfloat16.

Each block is sharded and compiled by itself; the last norm and the embedding, tied to the head, are sharded with the
model. Where a product will quantize a weight anyway, each rank quantizes its rows, and FSDP2 gathers the codes; the
embedding then looks up its rows in them. FSDP2 gathers a block before its forward and again before its backward. It
gathers the rest once, and keeps it from forward to backward.

A counter in FSDP2's all-gather counts the bytes. Each candidate runs in two fresh processes, which end with it or at
its time limit. So a collective that hangs costs only a row of the report.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from benchmarks.optimizers import lowbit_choice, step_seconds, torch_fused
from benchmarks.ranks import in_ranks
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio
from benchmarks.train_llama import SCHEMES as PRODUCT_SCHEMES
from benchmarks.train_llama import WARM_UP, TrainingCandidate, training_step
from lowbit import Int8Weight
from lowbit_kernels import launches
from recipes.llama import Llama

RANKS = 2
SCHEMES: dict[str, Any] = {
    **{name: PRODUCT_SCHEMES[name] for name in ("int8", "float8 rowwise")},
    "int8 weights and products": Int8Weight(True, True, True),
}


@dataclass(frozen=True)
class ShardedCandidate(TrainingCandidate):
    """Training in `RANKS` processes. ``batch``: of each process; ``most_seconds``: the time limit of the processes."""

    most_repeats: int = 10
    most_seconds: float = 120.0


@dataclass(frozen=True)
class ShardedCost:
    """The cost of one training step, on one rank or, joined, on all.

    Attributes:
        seconds: of the step; joined, of the slowest rank.
        tokens: tokens of the loss.
        parameters: elements of the whole model.
        sent: bytes passed to all-gathers.
        gathered: elements of the weights in these bytes.
        products: products in 8 bits, forward and backward.
        peak: the most GiB of tensors; joined, on the fullest rank. None on a CPU.
    """

    seconds: float
    tokens: int
    parameters: int
    sent: int
    gathered: int
    products: int
    peak: float | None

    @classmethod
    def joined(cls, ranks: list[ShardedCost]) -> ShardedCost:
        peaks = [r.peak for r in ranks if r.peak is not None]
        return cls(
            seconds=max(r.seconds for r in ranks),
            tokens=sum(r.tokens for r in ranks),
            parameters=ranks[0].parameters,
            sent=sum(r.sent for r in ranks),
            gathered=sum(r.gathered for r in ranks),
            products=sum(r.products for r in ranks),
            peak=max(peaks, default=None),
        )


@dataclass
class Traffic:
    """Counts of this rank's all-gathers. ``parameters``: of the whole model."""

    parameters: int = 0
    sent: int = 0
    gathered: int = 0


class CountedAllGather(DefaultAllGather):
    """FSDP2's all-gather with counters; ``elements``: elements of weights in each call, in any format."""

    def __init__(self, traffic: Traffic, elements: int) -> None:
        self.traffic, self.elements = traffic, elements

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.traffic.sent += input_tensor.nbytes
        self.traffic.gathered += self.elements
        return super().__call__(output_tensor, input_tensor, group, async_op)


def shard(model: Llama, device: str, traffic: Traffic) -> None:
    """`fully_shard` each block and then the model, with counting all-gathers; give each rank its own random seed."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    left = traffic.parameters = sum(p.numel() for p in model.parameters())
    for module in [*model.blocks, model]:
        elements = left if module is model else sum(p.numel() for p in module.parameters())
        left -= elements
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(CountedAllGather(traffic, elements // mesh.size()))
        # gloo has no average
        module.set_force_sum_reduction_for_comms(device == "cpu")
    torch.manual_seed(mesh.get_rank())


def measure_rank(candidate: ShardedCandidate, repeats: int) -> ShardedCost:
    """The cost on one rank of the process group. RuntimeError when the loss is not finite."""
    on_gpu = candidate.device == "cuda"
    traffic = Traffic()
    step = training_step(candidate, partial(shard, device=candidate.device, traffic=traffic))
    for _ in range(WARM_UP):
        loss = step()
    if not loss.isfinite():
        raise RuntimeError(f"{candidate.name}: the loss is {loss.item()}")
    traffic.sent = traffic.gathered = 0
    with launches.counted() as calls:
        step()
    sent, gathered = traffic.sent, traffic.gathered
    products = sum(count for (op, _), count in calls.items() if op == "scaled_mm")
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = step_seconds(step, min(repeats, candidate.most_repeats), on_gpu)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    tokens = candidate.batch[0] * candidate.batch[1]
    return ShardedCost(
        statistics.median(times), tokens, traffic.parameters, sent, gathered, products, peak
    )


def measure_sharded(candidate: ShardedCandidate, repeats: int) -> ShardedCost:
    """Train in `RANKS` fresh processes. Raises as `in_ranks` does."""
    found = in_ranks(
        measure_rank, RANKS, candidate.device, candidate.most_seconds, candidate, repeats
    )
    return ShardedCost.joined(found)


def sharded_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    cost: ShardedCost = row.measured
    reference = result.reference.measured
    return [
        f"{cost.seconds * 1e3:.1f}",
        ratio(cost.seconds, reference and reference.seconds),
        f"{cost.tokens / cost.seconds / 1e3:.1f}",
        f"{cost.sent / 2**30:.2f}",
        f"{cost.sent / cost.parameters:.2f}",
        f"{cost.sent / cost.gathered:.2f}",
        str(cost.products),
        "" if cost.peak is None else f"{cost.peak:.2f}",
    ]


SHARDED_TABLE = Table(
    columns=(
        "step ms",
        "/ bf16",
        "ktok/s",
        "gathered GiB",
        "B/parameter",
        "B/element",
        "8-bit products",
        "peak GiB a rank",
    ),
    measure=measure_sharded,
    cells=sharded_cells,
    legend=f"{RANKS} GPUs of one host. Forward, backward and optimizer step; the median of the slower rank, the tokens "
    "of both. *gathered*: the bytes that both ranks pass to FSDP2's all-gathers in a step; with two ranks each byte "
    "crosses the link once. The same for each parameter of the model, and for each element of the gathered weights "
    "(blocks twice a step). Gradients are reduced in bfloat16 and not counted. *8-bit products*: of both ranks in a "
    "step. *peak*: the most memory of tensors, by the allocator.",
)


def candidates(batch: tuple[int, int]) -> Iterator[ShardedCandidate]:
    adamw8bit = lowbit_choice("AdamW8bit", "AdamW8bit")
    for name, scheme in SCHEMES.items():
        yield ShardedCandidate(adamw8bit, batch, products=name, scheme=scheme)
    yield ShardedCandidate(torch_fused(), batch, products="bf16")


@benchmark("train_fsdp", "int8 and float8 under FSDP2 on two GPUs, 1.2B Llama", table=SHARDED_TABLE)
def train_fsdp() -> Iterator[Problem]:
    batch = (4, 4096)
    chosen = list(candidates(batch))
    yield Problem(f"batch {batch[0]} x {batch[1]} a rank", chosen, chosen[-1].name)
