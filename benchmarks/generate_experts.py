"""A stock mixture of experts in transformers' `generate` and lowbit's, and its prefill: as a user converts the model.

The model is transformers' Qwen3-MoE with random weights, 12 layers of the shape of Qwen3-30B-A3B. The router's choice
depends on the tokens, so random weights spread them over all experts.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.generate import GENERATE_TABLE, OWN_LOOP, PLAIN, PROMPT, random_model
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio
from lowbit import Int4WeightOnly, Int8WeightOnly, quantize_

QWEN3_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "int4 g128": lambda model: quantize_(model, Int4WeightOnly(128)),
    "int8": lambda model: quantize_(model, Int8WeightOnly()),
    PLAIN: lambda model: None,
}
LOOPS = (*CONVERSIONS, *(name + OWN_LOOP for name in CONVERSIONS))
"""The names of models that `generate_experts` continues, by both loops."""
TOKENS = 2048


@dataclass(frozen=True)
class Mixture:
    """A converted model. ``batch``: sequences that it continues, or reads, at once."""

    name: str
    batch: int
    shape: tuple[tuple[str, int], ...] = tuple(QWEN3_MOE.items())
    device: str = "cuda"

    def made(self) -> Any:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        no_ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        config = Qwen3MoeConfig(
            **dict(self.shape), **no_ends, norm_topk_prob=True, dtype="bfloat16"
        )
        model = random_model(Qwen3MoeForCausalLM, config, self.device)
        CONVERSIONS[self.name.removesuffix(OWN_LOOP)](model)
        return model


@dataclass(frozen=True)
class Prefill:
    """Seconds of a forward pass of the prompt, by the clock and on the GPU."""

    clock: float
    gpu: float


def measure_prefill(candidate: Mixture, repeats: int) -> Prefill:
    """The medians of `repeats` passes after two, and the time of as many passes that are queued at once."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model = candidate.made()
    last = dict(candidate.shape)["vocab_size"]
    tokens = torch.randint(0, last, (candidate.batch, TOKENS), device=candidate.device)

    @torch.no_grad()
    def run() -> None:
        model(tokens, use_cache=False, logits_to_keep=1)

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    seconds(2)
    return Prefill(statistics.median(seconds(1) for _ in range(repeats)), seconds(repeats))


def prefill_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    found: Prefill = row.measured
    plain = result.reference.measured
    speed = ratio(plain.clock, found.clock) if plain is not None else ""
    return [f"{1000 * found.clock:.2f}", speed, f"{1000 * found.gpu:.2f}"]


PREFILL_TABLE = Table(
    columns=("ms", "of bf16's speed", "ms in a queue"),
    measure=measure_prefill,
    cells=prefill_cells,
    legend=f"The forward pass of {TOKENS} tokens of a sequence, eager, the head for the last token alone.",
)


@benchmark("generate_experts", "generate on a mixture of experts", table=GENERATE_TABLE)
def generate_experts() -> Iterator[Problem]:
    for batch in (1, 16):
        models = [Mixture(name, batch) for name in LOOPS]
        yield Problem(
            f"Qwen3-MoE, {PROMPT} tokens of prompt, batch {batch}", models, reference=PLAIN
        )


@benchmark("prefill_experts", "the prefill of a mixture of experts", table=PREFILL_TABLE)
def prefill_experts() -> Iterator[Problem]:
    models = [Mixture(name, 1) for name in CONVERSIONS]
    yield Problem(f"Qwen3-MoE, {TOKENS} tokens", models, reference=PLAIN)
