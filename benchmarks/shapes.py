"""Weight-only linears at shapes drawn from published models, beside bf16 by cuBLAS.

The draw has a fixed seed, so a change of the kernels or of `linear_table` is judged on shapes that nobody chose for it.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from benchmarks.cases.weight_linear import Case
from benchmarks.registry import Candidate, Problem, Result, Row, Table, benchmark
from benchmarks.report import readable
from benchmarks.timing import measure_in_turns
from benchmarks.weight_linear import GROUP, _bf16
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.weight_only import weight_mm_large_batch_sm90 as large_batch
from lowbit_kernels.weight_only.weight_linear import run
from lowbit_kernels.weight_only.weight_lookup_sm90 import unpacking_of
from lowbit_kernels.weight_only.weight_mm_decode_sm90 import MAX_TOKENS
from lowbit_kernels.weight_only.weight_operands import WeightOperands

SEED = 34
DRAWN = 300
SHARDS = (1, 2, 4, 8)
ROTATED_BYTES = 2**27
MOST_SETS = 16
CUDA = torch.device("cuda")
TOKENS = (1, 4, 16, 24, 48, 100, 200, 384, 777, 1024, 2048)


class Model(NamedTuple):
    """A published model's sizes: of the residual stream, the MLP, all queries, all keys, and the vocabulary."""

    hidden: int
    mlp: int
    queries: int
    keys: int
    vocabulary: int


MODELS = {
    "Llama-2-13B": Model(5120, 13824, 5120, 5120, 32000),
    "Llama-3.2-1B": Model(2048, 8192, 2048, 512, 128256),
    "Llama-3.2-3B": Model(3072, 8192, 3072, 1024, 128256),
    "Llama-3.1-8B": Model(4096, 14336, 4096, 1024, 128256),
    "Llama-3.1-70B": Model(8192, 28672, 8192, 1024, 128256),
    "Qwen2.5-0.5B": Model(896, 4864, 896, 128, 151936),
    "Qwen2.5-1.5B": Model(1536, 8960, 1536, 256, 151936),
    "Qwen2.5-7B": Model(3584, 18944, 3584, 512, 152064),
    "Qwen2.5-14B": Model(5120, 13824, 5120, 1024, 152064),
    "Qwen2.5-32B": Model(5120, 27648, 5120, 1024, 152064),
    "Qwen3-0.6B": Model(1024, 3072, 2048, 1024, 151936),
    "Qwen3-4B": Model(2560, 9728, 4096, 1024, 151936),
    "Qwen3-8B": Model(4096, 12288, 4096, 1024, 151936),
    "Mistral-7B": Model(4096, 14336, 4096, 1024, 32768),
    "Mistral-Nemo": Model(5120, 14336, 4096, 1024, 131072),
    "Mistral-Small-24B": Model(5120, 32768, 4096, 1024, 131072),
    "Gemma-2-2B": Model(2304, 9216, 2048, 1024, 256000),
    "Gemma-2-9B": Model(3584, 14336, 4096, 2048, 256000),
    "Gemma-3-27B": Model(5376, 21504, 4096, 2048, 262208),
    "Phi-2": Model(2560, 10240, 2560, 2560, 51200),
    "Phi-3-mini": Model(3072, 8192, 3072, 3072, 32064),
    "Phi-4": Model(5120, 17920, 5120, 1280, 100352),
}


class Drawn(NamedTuple):
    """A linear of a model, or a shard of it under tensor parallelism, and a number of tokens."""

    name: str
    m: int
    n: int
    k: int


def linears(model: Model, shards: int) -> dict[str, tuple[int, int]]:
    """N and K of one shard of each linear of a model; what the shards don't divide is left out."""
    hidden, mlp, queries, keys, vocabulary = model
    split = {
        "q-k-v": (queries + 2 * keys, hidden),
        "gate-up": (2 * mlp, hidden),
        "head": (vocabulary, hidden),
    }
    found = {name: (n // shards, k) for name, (n, k) in split.items() if n % shards == 0}
    joined = {"out": (hidden, queries), "down": (hidden, mlp)}
    return found | {name: (n, k // shards) for name, (n, k) in joined.items() if k % shards == 0}


def drawn(count: int = DRAWN, seed: int = SEED) -> list[Drawn]:
    """Different shapes, in the order in which they are drawn."""
    chance = random.Random(seed)
    found: dict[tuple[int, int, int], Drawn] = {}
    while len(found) < count:
        name = chance.choice(sorted(MODELS))
        shards = chance.choice(SHARDS)
        of_model = linears(MODELS[name], shards)
        layer = chance.choice(sorted(of_model))
        shape = (chance.choice(TOKENS), *of_model[layer])
        label = f"{name} {layer}" + (f" / {shards}" if shards > 1 else "")
        found.setdefault(shape, Drawn(label, *shape))
    return list(found.values())


@dataclass(frozen=True)
class Shape:
    """A drawn shape: the one candidate of its problem."""

    drawn: Drawn
    name: str = "bf16, int4, int8"

    def operands(self, bits: int, device: str = "meta") -> tuple:
        """The arguments of `weight_linear`."""
        _, m, n, k = self.drawn
        return Case("", m, n, k, GROUP if bits == 4 else k, bits).arguments(device)


class Times(NamedTuple):
    """Seconds of a linear in bfloat16 by cuBLAS, and with an int4 and an int8 weight; these two as shares of bfloat16's
    in the same round: medians."""

    bf16: float
    int4: float
    int8: float
    int4_share: float
    int8_share: float

    @classmethod
    def of(cls, rounds: list[list[float]]) -> Times:
        """The medians over rounds of the three times."""
        shares = [[own / bf16 for own in others] for bf16, *others in rounds]
        return cls(
            *map(statistics.median, [*zip(*rounds, strict=True), *zip(*shares, strict=True)])
        )


def _measure(candidate: Shape, repeats: int) -> Times:
    _, m, n, k = candidate.drawn
    found = [_rotated(F.linear, partial(_bf16, m, n, k), 2 * n * k)]
    for bits in (4, 8):
        found.append(_rotated(run, partial(candidate.operands, bits, "cuda"), n * k * bits // 8))
    return Times.of(measure_in_turns(found, repeats))


def _rotated(call: Callable, arguments: Callable[[], tuple], moved: int) -> tuple[Candidate, int]:
    """What is timed, and over how many weights of `moved` bytes."""
    return Candidate("", call, arguments, moved), max(1, min(MOST_SETS, ROTATED_BYTES // moved))


def _cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    times: Times = row.measured
    shares = times.int4_share, times.int8_share
    return [*map(readable, times[:3]), *(f"{share:.2f}" for share in shares)]


TABLE = Table(
    columns=("bf16", "int4", "int8", "int4 / bf16", "int8 / bf16"),
    measure=_measure,
    cells=_cells,
    legend=f"Medians, in CUDA graphs that are replayed in turns, over {ROTATED_BYTES >> 20} MiB of weights in turn; "
    "ratios to bf16's replay of the same round. "
    f"bf16: cuBLAS. int4 in groups of {GROUP}, int8 with a scale a row.",
)


def compile_kernels(shapes: list[Drawn]) -> None:
    """Compile the kernels of all shapes in threads: NVRTC lets others run, and one kernel takes it seconds."""
    sources = set()
    for one, bits in itertools.product(shapes, (4, 8)):
        *tensors, group = Shape(one).operands(bits)
        operands = WeightOperands.of(*tensors, group_size=group)
        own = unpacking_of(operands)
        if one.m <= MAX_TOKENS or own is None:
            continue
        chosen = large_batch.plan(one.m, one.n, one.k, own, nvrtc.multiprocessors(CUDA))
        shape = chosen[:8], chosen.last_tokens, chosen.joined
        sources.add(large_batch.source(torch.bfloat16, torch.bfloat16, own, *shape))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: nvrtc.compiled(source, "sm_90a"), sorted(sources)))


@benchmark("shapes", "int4 and int8 weights at shapes drawn from published models", table=TABLE)
def shapes() -> Iterator[Problem]:
    """int4 in groups of 128 and int8 in rows, at every drawn shape."""
    if nvrtc.runs_on_hopper(CUDA):
        compile_kernels(drawn())
    for one in drawn():
        name = f"{one.name}, {one.n} x {one.k}, {one.m} tokens"
        yield Problem(name, [Shape(one)])
