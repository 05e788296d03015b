"""A training step under FSDP2 on the GPUs of one host, low-bit beside plain bfloat16.

On one GPU nothing is exchanged, and the step shows what FSDP2 itself costs.

The models are the 1.2B Llama of `train_llama`, and one of the shape of Llama 3 8B.

Each block is sharded and compiled by itself; the last norm and the embedding, tied to the head, are sharded with the
model. Where a product will quantize a weight anyway, each rank quantizes its rows, and FSDP2 gathers the codes; the
embedding then looks up its rows in them. FSDP2 gathers a block before its forward and again before its backward. It
gathers the rest once, and keeps it from forward to backward. *recomputed*: `keep_products` around each block.

The host's time to issue forward and backward is measured apart, with nothing queued: where it is longer than the GPU's,
ranks wait for each other in collectives. A counter in FSDP2's all-gather counts the bytes. Each candidate runs in fresh
processes, which end with it or at its time limit. So a collective that hangs costs only a row of the report.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from benchmarks.optimizers import lowbit_choice, step_seconds, synchronize, torch_fused
from benchmarks.ranks import in_ranks
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio
from benchmarks.train_llama import (
    LLAMA_1B_CONFIG,
    WARM_UP,
    Training,
    TrainingCandidate,
    training_step,
)
from benchmarks.train_llama import SCHEMES as PRODUCT_SCHEMES
from benchmarks.train_peers import PEERS
from lowbit import (
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8MixedPrecision,
    Int8Weight,
    qat,
)
from lowbit.train import compress_collectives_
from lowbit_kernels.runtime import launches
from recipes.llama import Llama, LlamaConfig

LLAMA_8B_CONFIG = LlamaConfig(
    vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, context=4096
)
MOST_RANKS = 4


def ranks() -> int:
    """How many processes take part: one a GPU, and at most `MOST_RANKS`; without GPUs two."""
    return min(torch.cuda.device_count(), MOST_RANKS) or 2


def fake_quantize_blocks(model: Llama) -> None:
    """QAT of int4 weights in groups of 128, in the blocks."""
    qat.prepare_(model, {"head": None, "*": Int4WeightOnly(group_size=128)})


def in_int8(model: Llama) -> None:
    """QAT of int8 x int8 in the blocks, with gradients in int8."""
    gradients = Int8MixedPrecision()
    qat.prepare_(model, {"head": None, "*": Int8DynamicActivationInt8Weight()}, gradients=gradients)


SCHEMES: dict[str, Any] = {
    **{name: PRODUCT_SCHEMES[name] for name in ("int8", "float8 rowwise")},
    "int8 weights and products": Int8Weight(True, True, True),
    "QAT int4 g128": fake_quantize_blocks,
    "QAT int8 x int8": in_int8,
}


@dataclass(frozen=True)
class ShardedCandidate(TrainingCandidate):
    """Training in `ranks()` processes.

    Attributes:
        batch: sequences and tokens of each process.
        most_repeats: timed steps, at most.
        host_repeats: steps of which the host's shortest times are taken.
        most_seconds: the time limit of the processes.
        compress: `lowbit.train.compress_collectives_`.
    """

    compress: bool = False
    most_repeats: int = 10
    host_repeats: int = 25
    most_seconds: float = 120.0


@dataclass(frozen=True)
class ShardedCost:
    """The cost of one training step, on one rank or, joined, on all.

    Attributes:
        seconds: time of the step; joined, that of the slowest rank.
        tokens: tokens of the loss.
        parameters: elements of the whole model.
        sent: bytes passed to all-gathers.
        gathered: elements of the weights in these bytes.
        products: products in 8 bits, forward and backward.
        peak: the most GiB of tensors; joined, on the fullest rank. None on a CPU.
        forward, backward: seconds of the host to issue each; joined, of the slowest rank.
    """

    seconds: float
    tokens: int
    parameters: int
    sent: int
    gathered: int
    products: int
    peak: float | None
    forward: float
    backward: float

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
            forward=max(r.forward for r in ranks),
            backward=max(r.backward for r in ranks),
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


def shard(model: Llama, device: str, traffic: Traffic, compress: bool) -> None:
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
    if compress:
        compress_collectives_(model)
    torch.manual_seed(mesh.get_rank())


def measure_rank(candidate: ShardedCandidate, repeats: int) -> ShardedCost:
    """The cost on one rank of the process group. RuntimeError when the loss is not finite."""
    on_gpu = candidate.device == "cuda"
    traffic = Traffic()
    sharded = partial(shard, device=candidate.device, traffic=traffic, compress=candidate.compress)
    step = training_step(candidate, sharded)
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
    counts = traffic.parameters, sent, gathered, products
    return ShardedCost(
        statistics.median(times),
        tokens,
        *counts,
        peak,
        *issue_seconds(step, candidate.host_repeats, on_gpu),
    )


def issue_seconds(step: Training, repeats: int, on_gpu: bool) -> tuple[float, float]:
    """The host's time to issue forward and backward, each with nothing queued before it; the shortest of each, since
    other work on the host only makes them longer."""

    def timed(run: Callable[[], Any]) -> tuple[Any, float]:
        synchronize(on_gpu)
        dist.barrier()
        synchronize(on_gpu)
        start = time.perf_counter()
        result = run()
        return result, time.perf_counter() - start

    pairs = []
    for _ in range(repeats):
        loss, forward = timed(step.forward)
        _, backward = timed(loss.backward)
        step.update()
        pairs.append((forward, backward))
    forwards, backwards = zip(*pairs, strict=True)
    return min(forwards), min(backwards)


def measure_sharded(candidate: ShardedCandidate, repeats: int) -> ShardedCost:
    """Train in `ranks()` fresh processes. Raises as `in_ranks` does."""
    found = in_ranks(
        measure_rank, ranks(), candidate.device, candidate.most_seconds, candidate, repeats
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
        f"{cost.sent / cost.gathered:.2f}" if cost.gathered else "",
        str(cost.products),
        "" if cost.peak is None else f"{cost.peak:.2f}",
        f"{cost.forward * 1e3:.1f} / {cost.backward * 1e3:.1f}",
        ratio(cost.forward + cost.backward, reference and reference.forward + reference.backward),
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
        "host ms, forward / backward",
        "host / bf16",
    ),
    measure=measure_sharded,
    cells=sharded_cells,
    legend="All GPUs of one host, at most four. Forward, backward and optimizer step; the median of the slowest rank, "
    "the tokens of all. *gathered*: the bytes that all ranks pass to FSDP2's all-gathers in a step. The same for each "
    "parameter of the model, and for each element of the gathered weights (blocks twice a step). Gradients are reduced "
    "in bfloat16 and not counted. *compressed*: `compress_collectives_`; gradients travel as int8 codes. "
    "*8-bit products*: of all ranks in a step. *peak*: the most memory of tensors, by the "
    "allocator. *host*: the host's shortest time to issue forward and backward, each with nothing queued.",
)


def candidates(
    batch: tuple[int, int], config: LlamaConfig = LLAMA_1B_CONFIG
) -> Iterator[ShardedCandidate]:
    adamw8bit = lowbit_choice("AdamW8bit", "AdamW8bit")
    make = partial(ShardedCandidate, batch=batch, config=config)
    yield make(torch_fused(), products="bf16")
    for name, scheme in SCHEMES.items():
        yield make(adamw8bit, products=name, scheme=scheme)
    for name in ("bf16", "int8", "QAT int4 g128"):
        yield make(
            torch_fused() if name == "bf16" else adamw8bit,
            products=f"{name}, compressed",
            scheme=SCHEMES.get(name),
            compress=True,
        )
    recomputing = replace(config, recompute=True)
    for name in ("int8", "float8 rowwise"):
        label = f"{name}, recomputed"
        yield make(adamw8bit, products=label, scheme=SCHEMES[name], config=recomputing)
    for name in ("torchao float8 rowwise", "torchao float8 tensorwise"):
        yield make(torch_fused(), products=name, scheme=PEERS[name])


@benchmark("train_fsdp", "training under FSDP2 on the GPUs of one host", table=SHARDED_TABLE)
def train_fsdp() -> Iterator[Problem]:
    shapes = {"1.2B": (LLAMA_1B_CONFIG, (4, 4096)), "8B": (LLAMA_8B_CONFIG, (2, 4096))}
    for name, (config, batch) in shapes.items():
        chosen = list(candidates(batch, config))
        count = "1 rank" if ranks() == 1 else f"{ranks()} ranks"
        title = f"{name}, {count}, batch {batch[0]} x {batch[1]} a rank"
        yield Problem(title, chosen, chosen[0].name)
