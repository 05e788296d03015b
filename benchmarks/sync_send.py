"""Sending an 8B model in training to a server: seconds and memory, by `lowbit.sync`.

The trainers are the ranks of FSDP2, one a GPU. The server is another process on the GPU of rank 0. It gets the
tensors through a `multiprocessing` connection, so in the trainer's memory, and digests them. Without a GPU the
trainers are two processes and the model is small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowbit
from benchmarks.ranks import in_ranks
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.train_fsdp import LLAMA_8B_CONFIG, ranks
from lowbit.files.digests import mixed_sums
from recipes.llama import Llama, LlamaConfig

SMALL = LlamaConfig(vocab_size=512, dim=128, layers=2, heads=4, kv_heads=2, hidden=256, context=64)
PREPARED: dict[str, Callable[[Llama], object]] = {
    "bf16": lambda model: None,
    "QAT int4 g128": lambda model: lowbit.qat.prepare_(
        model, {"head": None, "*": lowbit.Int4WeightOnly(128)}
    ),
    "QAT int8 x int8": lambda model: lowbit.qat.prepare_(
        model, {"head": None, "*": lowbit.Int8DynamicActivationInt8Weight()}
    ),
}


@dataclass(frozen=True)
class Sending:
    """How a model trains. ``device``: "cuda" or "cpu"."""

    name: str
    config: LlamaConfig = LLAMA_8B_CONFIG
    device: str = "cuda"
    most_seconds: float = 200.0


@dataclass(frozen=True)
class Transfer:
    """``seconds``: of each transfer, the first one included. ``nbytes``: what a transfer sends. ``peak``: GiB beyond
    the model on the fullest rank, None on a CPU. ``skipping``: seconds where the server has all tensors."""

    seconds: list[float]
    nbytes: int
    peak: float | None
    skipping: float


def serve(connection: Any, transfers: int) -> None:
    """Receive `transfers` times. The first reply has digests; the last transfer finds everything known."""
    known: dict[str, Any] = {}
    for i in range(transfers):
        asks = {"known": known} if i >= transfers - 2 else {}
        found = lowbit.sync.receive(connection, **asks)
        sums = {name: mixed_sums(t) if i == 0 else "" for name, t in found}
        connection.send(sums)


def measure_rank(candidate: Sending, repeats: int) -> tuple[list[float], int, float | None]:
    on_gpu = candidate.device == "cuda"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(candidate.device):
        model = Llama(candidate.config)
    torch.set_default_dtype(before)
    PREPARED[candidate.name](model)
    mesh = init_device_mesh(candidate.device, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    format = "compressed-tensors" if "QAT" in candidate.name else None
    transfers = repeats + 3
    sums: dict[str, str] = {}
    server, connection = None, None
    if dist.get_rank() == 0:
        context = multiprocessing.get_context("spawn")
        connection, other = context.Pipe()
        server = context.Process(target=serve, args=(other, transfers))
        server.start()
    seconds, sent, peak = [], 0, None
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    for _ in range(transfers):
        if connection is not None and not connection.poll(120):
            raise RuntimeError("the server has not started within 120 s")
        dist.barrier()
        start = time.perf_counter()
        result = lowbit.sync.send(model, connection, format)
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        if connection is not None:
            found = connection.recv()
            sums = sums or found
            sent = max(sent, result.nbytes)
    if on_gpu:
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    streamed = {name: mixed_sums(t) for name, t in lowbit.sync.stream(model, format)}
    if server is not None:
        server.join(60)
        if sums != streamed:
            raise AssertionError("the server got other bytes than the stream has")
    return seconds, sent, peak


def measure_sending(candidate: Sending, repeats: int) -> Transfer:
    found = in_ranks(
        measure_rank, ranks(), candidate.device, candidate.most_seconds, candidate, min(repeats, 3)
    )
    slowest = [max(times) for times in zip(*(seconds for seconds, _, _ in found), strict=True)]
    peaks = [peak for _, _, peak in found if peak is not None]
    return Transfer(slowest[1:-2], found[0][1], max(peaks, default=None), slowest[-1])


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    cost: Transfer = row.measured
    return [
        f"{min(cost.seconds):.2f} to {max(cost.seconds):.2f}",
        f"{cost.nbytes / 2**30:.2f}",
        "" if cost.peak is None else f"{cost.peak:.2f}",
        f"{cost.skipping:.2f}",
    ]


SYNC_TABLE = Table(
    columns=("s", "sent GiB", "peak GiB beyond the model", "s, all known"),
    measure=measure_sending,
    cells=cells,
    legend="bfloat16 weights under FSDP2, a unit a block. QAT's weights travel as the compressed-tensors folder of the "
    "converted model has them; the server's bytes equal the stream's. *s*: after a first transfer. *all known*: the "
    "server has every tensor, so digests are compared and nothing is sent. *peak*: of tensors, on the fullest rank.",
)


@benchmark("sync_send", "sending a model in training to a server", table=SYNC_TABLE)
def sync_send() -> Iterator[Problem]:
    yield Problem(f"8B, {ranks()} ranks", [Sending(name) for name in PREPARED], "bf16")
