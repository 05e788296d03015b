"""Products of quantized `nn.Linear`s on one core of a CPU, beside the plain layer in the same dtype.

The two take turns. The fastest call of each counts, since other work on the machine only makes calls slower. Page
faults show memory that the system clears in each call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from benchmarks.registry import Problem, Result, Row, Table, benchmark

REFERENCE = "plain"
SCHEMES: dict[str, Any] = {
    "int4, groups of 128": lowbit.Int4WeightOnly(128),
    "int4, groups of 32": lowbit.Int4WeightOnly(32),
    "int8": lowbit.Int8WeightOnly(),
    "float8": lowbit.Float8WeightOnly(),
    "nf4": lowbit.NF4WeightOnly(),
    "nf4, scales in 8 bits": lowbit.NF4WeightOnly(double_quantization=True),
    "mxfp4": lowbit.MXFP4WeightOnly(),
    "nvfp4": lowbit.NVFP4WeightOnly(),
    **{f"int{bits}": lowbit.IntxWeightOnly(bits, 128) for bits in (1, 2, 3, 5, 6, 7)},
    "int8 x int4": lowbit.Int8DynamicActivationInt4Weight(32),
    "int8 x int8": lowbit.Int8DynamicActivationInt8Weight(),
    REFERENCE: None,
}
EVERYDAY = (*list(SCHEMES)[:4], REFERENCE)
SECONDS = 0.5
"""Seconds that a measurement takes; it makes at least 8 calls of each layer."""


@dataclass(frozen=True)
class LinearCandidate:
    """A layer [size, size] of a scheme, or a plain one, and its number of tokens."""

    name: str
    scheme: Any
    size: int
    tokens: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Times:
    """Seconds of a call, and those of the plain layer beside it; page faults of a call."""

    own: float
    plain: float
    faults: int


def measure(candidate: LinearCandidate, repeats: int) -> Times:
    """Time the candidate and the plain layer in turn, `SECONDS` long, in place of `repeats`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _measure(candidate)
    finally:
        torch.set_num_threads(before)


def _measure(candidate: LinearCandidate) -> Times:
    torch.manual_seed(0)
    size, dtype = candidate.size, candidate.dtype
    plain = nn.Linear(size, size, bias=False, dtype=dtype).requires_grad_(False)
    low = nn.Linear(size, size, bias=False, dtype=dtype).requires_grad_(False)
    low.weight.copy_(plain.weight)
    own = nn.Sequential(low)
    if candidate.scheme is not None:
        lowbit.quantize_(own, candidate.scheme)
    x = torch.randn(candidate.tokens, size, dtype=dtype)
    seconds: dict[nn.Module, list[float]] = {own: [], plain: []}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(seconds[own]) < 8:
        for layer, found in seconds.items():
            found.append(_seconds(layer, x))
    first = _faults()
    own(x)
    return Times(min(seconds[own]), min(seconds[plain]), _faults() - first)


def _seconds(layer: nn.Module, x: Tensor) -> float:
    start = time.perf_counter()
    layer(x)
    return time.perf_counter() - start


def _faults() -> int:
    """Page faults of this thread until now, those that read no disk; 0 where the system does not count them."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    except (ImportError, AttributeError):
        return 0


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    times: Times = row.measured
    return [
        f"{times.own * 1e3:.3f}",
        f"{times.plain * 1e3:.3f}",
        f"{times.own / times.plain:.2f}",
        f"{times.faults}",
    ]


TABLE = Table(
    columns=("ms", "plain beside it", "/ plain", "page faults"),
    measure=measure,
    cells=cells,
    legend="Milliseconds of `layer(x)` on one thread, the fastest of the calls of half a second; the plain layer of "
    "the same dtype takes turns with it. *Page faults* of one call: pages of 4 KiB that the system cleared for it.",
)


@benchmark("cpu_linear", "linears with low-bit weights on a CPU", table=TABLE, device="cpu")
def cpu_linear() -> Iterator[Problem]:
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1024, 2048, 2880, 2912, 4096):
            names = EVERYDAY if size < 2912 else tuple(SCHEMES)
            yield _problem(names, size, 1, dtype)
        for size in (1024, 4096):
            for tokens in (16, 128, 256):
                yield _problem(EVERYDAY, size, tokens, dtype)


def _problem(names: tuple[str, ...], size: int, tokens: int, dtype: torch.dtype) -> Problem:
    each = [LinearCandidate(name, SCHEMES[name], size, tokens, dtype) for name in names]
    label = f"{size} x {size}, {tokens} token{'s' if tokens > 1 else ''}, {str(dtype)[6:]}"
    return Problem(label, each, REFERENCE)
