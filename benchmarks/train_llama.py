"""A whole training step of the 1.2B Llama of `train_memory` with low-bit products or weights, beside plain bfloat16.

In each block seven linears and in the end the head, which is tied to the embedding, are prepared; those that are too
small to gain stay plain, as `prepare_` reports. int8 weights are those of the blocks: the embedding and its head stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.optimizers import REFERENCE, lowbit_choice, torch_fused
from benchmarks.registry import Problem, benchmark
from benchmarks.train_memory import TRAINING_TABLE, TrainingCandidate
from benchmarks.train_peers import PEERS
from lowbit.train import Float8MixedPrecision, Int8MixedPrecision, Int8Weight

SCHEMES: dict[str, Any] = {
    "int8": Int8MixedPrecision(),
    "float8 rowwise": Float8MixedPrecision(),
    "float8 tensorwise": Float8MixedPrecision(tensorwise=True, backward="e5m2"),
}


def candidates(batch: tuple[int, int]) -> Iterator[TrainingCandidate]:
    adamw8bit = lowbit_choice("AdamW8bit", "AdamW8bit")
    for name, scheme in SCHEMES.items():
        without_head = {"head": None, "*": scheme}
        yield TrainingCandidate(adamw8bit, batch, products=name, scheme=scheme)
        yield TrainingCandidate(
            adamw8bit, batch, products=f"{name}, plain head", scheme=without_head
        )
    int8, int8_weights = SCHEMES["int8"], {"head": None, "*": Int8Weight()}
    yield TrainingCandidate(adamw8bit, batch, products="int8 weights", scheme=int8_weights)
    for name, convert in PEERS.items():
        yield TrainingCandidate(torch_fused(), batch, products=name, scheme=convert)
    yield TrainingCandidate(torch_fused(), batch, products="int8", scheme=int8)
    yield TrainingCandidate(adamw8bit, batch, products="bf16")
    yield TrainingCandidate(torch_fused(), batch)


@benchmark(
    "train_llama", "int8 and float8 products in a training step, 1.2B Llama", table=TRAINING_TABLE
)
def train_llama() -> Iterator[Problem]:
    batch = (4, 4096)
    yield Problem(f"batch {batch[0]} x {batch[1]}", list(candidates(batch)), REFERENCE)
