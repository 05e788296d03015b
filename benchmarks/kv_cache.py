"""Tokens a second of an 8B Llama shape in int4 with a long context, by the format of its KV cache.

The forward of one token is that of a Llama with random weights: int4 linears, q, k and v in one and gate and up in one,
torch's RMS norm and activations. A CUDA graph captures all of it. The cache is full but for the last slot of each
sequence, which each replay writes again. SDPA over the 16-bit cache gets no mask, since all slots are in use, and no
copies of keys and values for each query; lowbit's attention gets a mask, as transformers makes one.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases.quantize_to_cache import Case as Cache
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio
from lowbit import Int4WeightOnly, quantize_
from lowbit_kernels.decoding.quantize_to_cache import quantize_to_cache
from lowbit_kernels.decoding.quantized_attention import quantized_attention

PLAIN = "bf16, cuDNN"
FORMATS = {
    "int8": ("int8", "int8"),
    "float8": ("float8", "float8"),
    "int8 keys, int4 values": ("int8", "int4"),
}
BACKENDS = {
    PLAIN: SDPBackend.CUDNN_ATTENTION,
    "bf16, flash attention": SDPBackend.FLASH_ATTENTION,
    "bf16, math": SDPBackend.MATH,
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Writes the key and value of one token to a layer's cache, and attends to it."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its context."""

    layers: int = 32
    batch: int = 16
    context: int = 32768
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    width: int = 4096
    hidden: int = 14336
    vocabulary: int = 128256
    device: str = "cuda"


class Model:
    """A Llama for one token of each sequence, whose layers share their values but not their memory."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head
        inner = shape.heads * shape.head
        sizes = (
            *((rows, shape.width), (shape.width, inner)),
            *((2 * shape.hidden, shape.width), (shape.width, shape.hidden)),
        )
        first = [self._linear(*size) for size in sizes]
        self.layers = [first] + [copy.deepcopy(first) for _ in range(shape.layers - 1)]
        self.head = self._linear(shape.vocabulary, shape.width)
        self.embedding = self._random(shape.vocabulary, shape.width)
        self.norm = self._random(shape.width)
        self.angles = self._random(2, 1, 1, shape.head)
        self.tokens = torch.randint(shape.vocabulary, (shape.batch,), device=shape.device)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.shape.device).to(torch.bfloat16)

    def _linear(self, rows: int, columns: int) -> nn.Linear:
        made = nn.Linear(columns, rows, bias=False, device="meta")
        weight = self._random(rows, columns) * columns**-0.5
        made.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(made, Int4WeightOnly())
        return made

    def __call__(self, caches: list[Attention]) -> Tensor:
        """The token after the next one, of each sequence."""
        shape, (cos, sin) = self.shape, self.angles
        x = self.embedding[self.tokens]
        for (first, out, both, down), attend in zip(self.layers, caches, strict=True):
            rows = first(F.rms_norm(x, x.shape[-1:], self.norm)).unflatten(-1, (-1, shape.head))
            turned, value = rows[:, : -shape.kv_heads], rows[:, -shape.kv_heads :]
            turned = torch.addcmul(turned * cos, turned.roll(shape.head // 2, -1), sin)
            query, key = (
                turned[:, : shape.heads, None],
                turned[:, shape.heads :, None],
            )
            x = x + out(attend(query, key, value[:, :, None]).flatten(1))
            gate, up = both(F.rms_norm(x, x.shape[-1:], self.norm)).chunk(2, -1)
            x = x + down(F.silu(gate) * up)
        logits: Tensor = self.head(F.rms_norm(x, x.shape[-1:], self.norm))
        return logits.argmax(-1)


def quantized(shape: Shape, name: str) -> tuple[Attention, int]:
    """The attention over a layer's cache of codes, and the bytes of the cache."""
    keys, values = FORMATS[name]
    whole = Cache(
        name,
        slots=shape.context,
        window=shape.context,
        width=shape.head,
        batch=shape.batch,
        heads=shape.kv_heads,
        keys=keys,
        values=values,
    )
    key_codes, key_scale, value_codes, value_scale, zero = whole.cache(shape.device)
    for codes in (key_codes, value_codes):
        codes.view(torch.uint8).random_(0, 120)  # no NaN of e4m3
    for scale in (key_scale, value_scale):
        scale.uniform_(0.005, 0.015)
    before = torch.full((1,), shape.context - 1, device=shape.device)
    mask = torch.ones(shape.batch, shape.context, dtype=torch.bool, device=shape.device)
    own = (key_codes, key_scale, value_codes, value_scale)
    window = shape.context

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = quantize_to_cache(key, value, *own, before, zero, window=window)
        scale = shape.head**-0.5
        return quantized_attention(query, *own, seen, zero, mask, scale=scale, window=window)

    return attend, sum(t.nbytes for t in (*own, zero) if t is not None)


def plain(shape: Shape, name: str) -> tuple[Attention, int]:
    """The same over a cache in bfloat16."""
    size = (shape.batch, shape.kv_heads, shape.context, shape.head)
    empty = [torch.empty(size, dtype=torch.bfloat16, device=shape.device) for _ in range(2)]
    keys, values = (t.normal_() for t in empty)
    before = torch.full((1,), shape.context - 1, device=shape.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.index_copy_(2, before, key)
        values.index_copy_(2, before, value)
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return attend, keys.nbytes + values.nbytes


@dataclass(frozen=True)
class Candidate:
    """A model with a cache of this name."""

    name: str
    shape: Shape = Shape()

    def made(self) -> tuple[list[Attention], int]:
        """The attention of each layer, and the bytes of all caches."""
        make = quantized if self.name in FORMATS else plain
        layers = [make(self.shape, self.name) for _ in range(self.shape.layers)]
        return [attend for attend, _ in layers], sum(nbytes for _, nbytes in layers)


@dataclass(frozen=True)
class Speed:
    """Seconds of a token of every sequence, of the attention in it, and the bytes of the cache."""

    token: float
    attention: float
    nbytes: int


def measure_token(candidate: Candidate, repeats: int) -> Speed:
    """Medians of `repeats` replays."""
    gc.collect()
    torch.cuda.empty_cache()
    shape = candidate.shape
    with torch.no_grad():
        model, (caches, nbytes) = Model(shape), candidate.made()
        size = (shape.batch, shape.heads + 2 * shape.kv_heads, 1, shape.head)
        query, key, value = torch.randn(size, device=shape.device, dtype=torch.bfloat16).split(
            [shape.heads, shape.kv_heads, shape.kv_heads], dim=1
        )
        token = replayed(lambda: model(caches), repeats)
        attention = replayed(lambda: [attend(query, key, value) for attend in caches], repeats)
    return Speed(token, attention, nbytes)


def replayed(run: Callable[[], Any], repeats: int) -> float:
    """The median seconds of replays of a CUDA graph of `run`."""
    run()  # compiles kernels
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
    return statistics.median(times[2:])


def token_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    found: Speed = row.measured
    base = result.reference.measured
    speed = ratio(base.token, found.token) if base is not None else ""
    times = [f"{1000 * t:.2f}" for t in (found.token, found.attention)]
    tokens = row.candidate.shape.batch / found.token
    return [f"{tokens:,.0f}", speed, *times, f"{found.nbytes / 2**30:.1f}"]


TOKEN_TABLE = Table(
    columns=("tokens/s", "of bf16", "ms a token", "attention, ms", "cache, GiB"),
    measure=measure_token,
    cells=token_cells,
    legend="*attention*: of all layers, with the writing of the token.",
)


@benchmark(
    "kv_cache", "an 8B Llama with a long context, by the format of its KV cache", table=TOKEN_TABLE
)
def kv_cache() -> Iterator[Problem]:
    names = ("int8", PLAIN, "int8 keys, int4 values", "bf16, flash attention", "float8")
    yield Problem(
        "8B, int4, 16 sequences of 32,768 tokens", [Candidate(n) for n in names], reference=PLAIN
    )
