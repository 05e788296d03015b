"""Tokens a second of an 8B Llama in int4 with a long context, by the format of its KV cache.

The model is transformers' Llama with random weights and 4 of its 32 layers. The cache is full but for one slot of each
sequence. The forward of one token is compiled and captured in a CUDA graph, and each replay writes the last slot again.
The 16-bit cache is transformers' StaticCache. Its own SDPA gets a mask, and then repeats keys and values for each
query; "flash, no mask" is the fastest that SDPA has, where all slots are in use.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.generate import LLAMA_8B
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio
from lowbit import Int4WeightOnly, quantize_

LAYERS, CONTEXT, BATCH = 4, 32768, 16
PLAIN = "bf16, flash, no mask"
FORMATS = {
    "int8": ("int8", "int8"),
    "float8": ("float8", "float8"),
    "int8 keys, int4 values": ("int8", "int4"),
}


def flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """SDPA over all slots, without copies of keys and values."""
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=options["scaling"], enable_gqa=True
    )
    return found.transpose(1, 2), None


@dataclass(frozen=True)
class Model:
    """A model with a cache of this name."""

    name: str
    layers: int = LAYERS
    context: int = CONTEXT
    batch: int = BATCH
    shape: tuple[tuple[str, int], ...] = tuple(LLAMA_8B.items())
    device: str = "cuda"

    def made(self) -> tuple[Any, Any]:
        """The model and its cache, full of random tokens but for the last slots."""
        from transformers import (
            AttentionInterface,
            AttentionMaskInterface,
            LlamaConfig,
            LlamaForCausalLM,
            StaticCache,
        )
        from transformers.masking_utils import sdpa_mask

        from lowbit.hf import KVCache

        AttentionInterface.register("no_mask", flash)
        AttentionMaskInterface.register("no_mask", sdpa_mask)
        own = {PLAIN: "no_mask", "bf16, transformers' sdpa": "sdpa"}
        sizes = dict(self.shape) | {"num_hidden_layers": self.layers}
        config = LlamaConfig(**sizes, max_position_embeddings=self.context, dtype="bfloat16")
        with torch.device(self.device):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.eval().requires_grad_(False)
        quantize_(model, Int4WeightOnly())
        model.set_attn_implementation(own.get(self.name, "lowbit"))
        cache: Any
        if self.name in own:
            cache = StaticCache(config=config, max_cache_len=self.context)
        else:
            cache = KVCache(config, self.context, *FORMATS[self.name])
        head = config.hidden_size // config.num_attention_heads
        cache.early_initialization(
            self.batch,
            config.num_key_value_heads,
            head,
            torch.bfloat16,
            torch.device(self.device),
        )
        for layer in cache.layers:
            fill(layer, self.context - 1)
        return model, cache


def memory(layer: Any) -> tuple[Tensor, ...]:
    """The tensors of a layer's keys and values."""
    found = getattr(layer, "codes", None)
    return (layer.keys, layer.values) if found is None else found.tensors()


def fill(layer: Any, tokens: int) -> None:
    """Fill a layer's slots with random numbers."""
    for tensor in memory(layer):
        if tensor.dim() == 3:
            tensor.uniform_(0.005, 0.015)  # scales
        elif tensor.dtype == torch.bfloat16:
            tensor.normal_()
        else:
            tensor.view(torch.uint8).random_(0, 120)  # no NaN of e4m3
    layer.is_empty = False
    layer.cumulative_length.fill_(tokens)


@dataclass(frozen=True)
class Speed:
    """Seconds of a token of every sequence, and bytes of a token of one sequence in all layers of the whole model."""

    token: float
    row: float


def measure_token(candidate: Model, repeats: int) -> Speed:
    """The median of `repeats` replays."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model, cache = candidate.made()
    first = torch.zeros((candidate.batch, 1), dtype=torch.int64, device=candidate.device)
    mask = torch.ones(
        candidate.batch, 1, 1, candidate.context, dtype=torch.bool, device=candidate.device
    )
    position = torch.full_like(first, candidate.context - 1)

    @torch.compile(fullgraph=True)
    def step() -> Tensor:
        options = {"attention_mask": mask, "position_ids": position}
        found: Tensor = model(first, past_key_values=cache, **options).logits.argmax(-1)
        return found

    def again() -> None:
        step()
        for layer in cache.layers:
            layer.cumulative_length.sub_(1)

    with torch.no_grad():
        times = replays(again, repeats)
    row = sum(x.nbytes for x in memory(cache.layers[0])) / candidate.batch / candidate.context
    return Speed(statistics.median(times), row * dict(candidate.shape)["num_hidden_layers"])


def replays(run: Callable[[], None], repeats: int) -> list[float]:
    """Seconds of replays of a CUDA graph of `run`, after two."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return times[2:]


def token_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    found: Speed = row.measured
    plain = result.reference.measured
    speed = ratio(plain.token, found.token) if plain is not None else ""
    kib = f"{found.row / 1024:.1f}"
    return [f"{row.candidate.batch / found.token:.0f}", speed, f"{1000 * found.token:.3f}", kib]


TOKEN_TABLE = Table(
    columns=("tokens/s", "of bf16", "ms a token", "KiB a token of context"),
    measure=measure_token,
    cells=token_cells,
    legend=f"{BATCH} sequences of {CONTEXT:,} tokens; {LAYERS} of 32 layers, the embedding and the head, all linears "
    "in int4; a CUDA graph of the compiled forward of a token. *KiB a token of context*: of all 32 layers.",
)


@benchmark(
    "kv_cache", "an 8B Llama with a long context, by the format of its KV cache", table=TOKEN_TABLE
)
def kv_cache() -> Iterator[Problem]:
    names = ("int8", PLAIN, "int8 keys, int4 values", "float8", "bf16, transformers' sdpa")
    yield Problem(f"8B, {LAYERS} layers, batch {BATCH}", [Model(n) for n in names], reference=PLAIN)
