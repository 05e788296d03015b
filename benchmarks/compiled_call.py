"""The host's time of a call of a compiled model with frozen low-bit weights, beside the same model with plain ones.

The graph computes nothing: what is left is torch's own work at each call. TorchDynamo checks its guards and fetches the
inputs of the graph, and AOTAutograd hands them over. The two models take turns, and the fastest call of each counts.
On a machine with a GPU the models lie there, where q, k and v are one input, and gate and up another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

import lowbit
from benchmarks.registry import Problem, Result, Row, Table, benchmark

REFERENCE = "plain"
SCHEMES: dict[str, Any] = {
    "int4": lowbit.Int4WeightOnly(16),
    "int8": lowbit.Int8WeightOnly(),
    REFERENCE: None,
}
SIZE, BLOCKS = 16, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS = 20.0
"""Seconds that a measurement takes, after both models are compiled."""


class Block(nn.Module):
    """The seven linears of a block of a decoder, without all that is between them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        made = (nn.Linear(SIZE, SIZE, bias) for _ in range(7))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj, *others = made
        self.gate_proj, self.up_proj, self.down_proj = others

    def forward(self, x: Tensor) -> Tensor:
        x = self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x))
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


def model(scheme: Any, blocks: int, bias: bool) -> nn.Module:
    """`blocks` blocks and a head."""
    torch.manual_seed(0)
    layers = [*(Block(bias) for _ in range(blocks)), nn.Linear(SIZE, SIZE, bias)]
    made = nn.Sequential(*layers).requires_grad_(False).to(DEVICE)
    if scheme is not None:
        lowbit.quantize_(made, scheme)
    return made


@dataclass(frozen=True)
class CallCandidate:
    """A model whose linears have weights of a scheme, or plain ones."""

    name: str
    scheme: Any
    bias: bool
    blocks: int = BLOCKS


@dataclass(frozen=True)
class Call:
    """What the host does in a call: seconds, and how many guards, with the nodes of their tree, torch checks. How many
    seconds of the processor the first call took."""

    seconds: float
    guards: int
    first: float


def computes_nothing(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """A compiler of torch.compile, below AOTAutograd, whose graphs return zeros."""
    from torch._dynamo.backends.common import aot_autograd

    def zeros(inner: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        (outputs,) = next(iter(reversed(inner.graph.nodes))).args
        kinds = [n.meta["val"] for n in outputs]
        found: Any = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in kinds]

        def run(args: list[Any]) -> Any:
            args.clear()
            return found

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=zeros)(graph, examples)
    return compiled


def _call(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y


class Compiled:
    """A model that is compiled to a graph that computes nothing."""

    def __init__(self, candidate: CallCandidate) -> None:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        self.module = model(candidate.scheme, candidate.blocks, candidate.bias)
        self.x = torch.randn(2, SIZE, device=DEVICE)
        self.seconds = float("inf")
        code = _call.__code__.replace()  # graphs of one code stand in one list
        self.run = torch.compile(
            FunctionType(code, globals()), backend=computes_nothing, fullgraph=True, dynamic=False
        )
        start = time.process_time()
        self.run(self.module, self.x)
        self.first = time.process_time() - start
        (entry,) = _debug_get_cache_entry_list(code)
        self.guards = len(str(entry.guard_manager).splitlines())

    def time(self) -> None:
        for _ in range(5):
            start = time.perf_counter()
            self.run(self.module, self.x)
            self.seconds = min(self.seconds, time.perf_counter() - start)


@torch.no_grad()
def measure(candidate: CallCandidate, repeats: int) -> tuple[Call, Call]:
    """The candidate and the plain model, timed in turn, `SECONDS` long in place of `repeats`."""
    both = Compiled(replace(candidate, scheme=None)), Compiled(candidate)
    end = time.perf_counter() + SECONDS
    while both[0].seconds == float("inf") or time.perf_counter() < end:
        for each in both:
            each.time()
    plain, own = (Call(each.seconds, each.guards, each.first) for each in both)
    return own, plain


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    own, plain = row.measured
    return [
        f"{own.seconds * 1e6:.0f}",
        f"{plain.seconds * 1e6:.0f}",
        f"{own.seconds / plain.seconds:.2f}",
        f"{own.guards} / {plain.guards}",
        f"{own.first:.1f} / {plain.first:.1f}",
    ]


TABLE = Table(
    columns=("µs", "plain beside it", "/ plain", "guards / plain's", "first call / plain's"),
    measure=measure,
    cells=cells,
    legend="Microseconds of the host for a call of a graph that computes nothing, the fastest of all calls; the plain "
    "model takes turns with it. *Guards*: the lines of their tree. *First call*: seconds of the processor until the "
    "graph is made, before any kernel is compiled.",
)


@benchmark(
    "compiled_call", "the host's time of calls of compiled models", table=TABLE, device="cpu"
)
def compiled_call() -> Iterator[Problem]:
    for bias in (False, True):
        candidates = [CallCandidate(name, scheme, bias) for name, scheme in SCHEMES.items()]
        label = f"{7 * BLOCKS + 1} linears{', with biases' if bias else ''}"
        yield Problem(label, candidates, REFERENCE)
