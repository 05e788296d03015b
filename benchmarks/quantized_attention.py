"""Attention of one token over a KV cache in 8 and 4 bits, against SDPA over one in bfloat16, all slots in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases.quantize_to_cache import Case as Cache
from benchmarks.registry import Candidate, Problem, benchmark
from lowbit_kernels.decoding.quantized_attention import reference

SHAPES = {
    "8B Llama, batch 16, 32,768 slots": (16, 8, 4, 32768, 128),
    "8B Llama, batch 16, 4,096 slots": (16, 8, 4, 4096, 128),
    "8B Llama, batch 1, 32,768 slots": (1, 8, 4, 32768, 128),
    "64 wide, batch 16, 8,192 slots": (16, 8, 8, 8192, 64),
    "256 wide, batch 4, 16,384 slots": (4, 8, 2, 16384, 256),
}
"""Sequences, key/value heads, queries of each, slots, channels."""
FORMATS = (("int8", "int8"), ("float8", "float8"), ("int8", "int4"))
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
Shape = tuple[int, int, int, int, int]


def codes_of(shape: Shape, keys: str, values: str) -> tuple:
    """The arguments of the op, of a full cache with random codes."""
    batch, heads, group, slots, width = shape
    cache = Cache("", 1, 0, slots, slots, width, batch, heads, keys, values).cache("cuda")
    for codes in (cache[0], cache[2]):
        codes.view(torch.uint8).random_(0, 120)  # no NaN of e4m3
    for scale in (cache[1], cache[3]):
        scale.uniform_(0.005, 0.015)
    query = torch.randn(batch, heads * group, 1, width, device="cuda", dtype=torch.bfloat16)
    length = torch.full((1,), slots, device="cuda")
    scaling = width**-0.5
    return (query, *cache[:4], length, cache[4], None, None, None, scaling, slots, 0.0, False)


def lowbit(*arguments: Any) -> Tensor:
    return torch.ops.lowbit.quantized_attention(*arguments)


def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return run


def candidates(shape: Shape) -> Iterator[Candidate]:
    batch, heads, group, slots, width = shape
    for keys, values in FORMATS if width == 128 else FORMATS[:1]:
        bits = {"int8": 8, "float8": 8, "int4": 4}
        row = width * (bits[keys] + bits[values]) // 8 + 2 * (3 if values == "int4" else 2)
        name = f"lowbit, {keys} keys, {values} values"
        make = lambda k=keys, v=values: codes_of(shape, k, v)  # noqa: E731
        yield Candidate(name, lowbit, make, batch * heads * slots * row)

    def plain() -> tuple:
        made = [
            torch.randn(batch, heads * n, s, width, device="cuda", dtype=torch.bfloat16)
            for n, s in ((group, 1), (1, slots), (1, slots))
        ]
        return tuple(made)

    for name, backend in BACKENDS.items():
        moved = batch * heads * slots * 4 * width
        yield Candidate(f"SDPA in bf16, {name}", sdpa(backend), plain, moved)


def check() -> None:
    """Raise AssertionError unless the kernel agrees with the formula."""
    for keys, values in FORMATS:
        query, *rest = codes_of((2, 2, 4, 1024, 128), keys, values)
        expected = reference(query.float(), *rest)
        error = (lowbit(query, *rest) - expected).norm() / expected.norm()
        assert error < 2e-3, f"{keys}, {values}: {error}"


@benchmark("quantized_attention", "attention of one token over a KV cache in 8 and 4 bits")
def attention() -> Iterator[Problem]:
    check()
    for name, shape in SHAPES.items():
        yield Problem(name, list(candidates(shape)))
