"""The time that modules take on this machine, with plain or quantized weights, for the inputs that they get.

A module is timed alone, on the inputs that it got when the model ran on a batch. It runs with one copy of its weights
after another, so that each run reads them from memory, as in a model whose weights exceed the caches. On a GPU a CUDA
graph of these runs is replayed, as `lowbit.hf.generate` and servers do. A module that waits for the device cannot be
captured; its time then includes that of the host. Modules of one class with weights and inputs of the same sizes are
timed once. `in_turns` times whole models, one after the other many times, since the clock of a GPU changes meanwhile.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lowbit.inference.planning.units import Option, Unit
from lowbit.layers.exchange import Held, exchanged
from lowbit.layers.frozen import shown_class
from lowbit.schemes.scheme import Scheme
from lowbit.tracing.batches import call, eval_mode, hooked
from lowbit.tracing.damage import Changed

_CACHE = {"cpu": 2**26}
"""Bytes of the last cache, where torch does not say."""
_ROUNDS, _MOST_COPIES, _RUNS, _REPEATS = 3, 32, 16, 9
_CPU_SECONDS = 0.02
_TURNS = 61

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Clock:
    """Times of the modules of a model.

    Args:
        model: in high precision.
        timed: batches, and how often each counts.
        modules: those that may be timed.
    """

    def __init__(
        self, model: nn.Module, timed: Iterable[tuple[Any, float]], modules: Iterable[nn.Module]
    ) -> None:
        self.calls: dict[int, Counter[Hashable]] = {}
        """How often a module, by its id, got inputs of a signature, times the counts of the batches."""
        self.inputs: dict[Hashable, Call] = {}
        self.seconds: dict[Hashable, float] = {}
        for batch, count in timed:
            self._trace(model, batch, count, modules)

    @torch.no_grad()
    def _trace(
        self, model: nn.Module, batch: Any, count: float, modules: Iterable[nn.Module]
    ) -> None:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            signature = _signature(module, args, kwargs)
            self.inputs.setdefault(signature, tree_map(_own, (args, kwargs)))
            self.calls.setdefault(id(module), Counter())[signature] += count  # type: ignore[assignment]

        hooks = (m.register_forward_pre_hook(seen, with_kwargs=True) for m in modules)
        with hooked(*hooks), eval_mode(model), torch.compiler.set_stance("force_eager"):
            call(model, batch)

    def milliseconds(self, unit: Unit, option: Option) -> float:
        """The time of the modules of a unit over all timed batches, stored by `option`."""
        schemes: dict[int, list[tuple[str, Scheme]]] = {}
        for target in option.targets:
            for owner in target.owners:
                schemes.setdefault(id(owner.module), []).append((owner.attribute, target.scheme))
        held: dict[int, Held] | None = None
        total = 0.0
        for module in unit.modules:
            for signature, count in self.calls.get(id(module), Counter()).items():
                key = signature, tuple(schemes.get(id(module), ()))
                if key not in self.seconds:
                    if held is None:
                        held = {id(h.module): h for h in option.held(option.weights())}
                    own = held.get(id(module))
                    self.seconds[key] = _time(module, own, self.inputs[signature])
                total += 1e3 * count * self.seconds[key]
        return total


def _own(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _signature(module: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """What the time of a call follows from."""
    leaves, spec = tree_flatten((args, kwargs))
    inputs = tuple(_size(x) if isinstance(x, Tensor) else type(x) for x in leaves)
    parameters = tuple((n, _size(p)) for n, p in module._parameters.items() if p is not None)
    return shown_class(module), parameters, inputs, str(spec)


def _size(t: Tensor) -> Hashable:
    return tuple(t.shape), t.dtype, t.device


@torch.no_grad()
def _time(module: nn.Module, held: Held | None, inputs: Call) -> float:
    """Seconds of one call of the module, as it holds `held`."""
    plain = {n: p for n, p in module._parameters.items() if p is not None}
    changed = plain if held is None else {**plain, **held.parameters}
    stored: list[Any] = [p for p in changed.values() if p is not None]
    sizes = [p.nbytes_stored() if hasattr(p, "nbytes_stored") else p.nbytes for p in stored]
    device = next(iter(plain.values())).device
    cache = _CACHE.get(device.type) or torch.cuda.get_device_properties(device).L2_cache_size
    count = max(1, min(_MOST_COPIES, -(-_ROUNDS * cache // max(sum(sizes), 1))))
    copies = [
        Held(
            module,
            shown_class(module),
            {n: _copied(p) for n, p in changed.items() if p is not None},
        )
        for _ in range(count)
    ]
    args, kwargs = inputs

    def run(copy: Held) -> Any:
        with exchanged([copy]):
            return module(*args, **kwargs)

    with eval_mode(module):
        for copy in copies:
            run(copy)  # compiles kernels, and lays out weights
        if device.type != "cuda":
            return _of_calls(lambda: module(*args, **kwargs), copies)
        try:
            return _replayed(run, copies)
        except RuntimeError:
            return _of_events(run, copies)


def _copied(parameter: Any) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=False)


def _replayed(run: Callable[[Held], Any], copies: Sequence[Held]) -> float:
    """The median time over replays of a CUDA graph."""
    torch.cuda.synchronize()
    rounds = -(-_RUNS // len(copies))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run(copy) for _ in range(rounds) for copy in copies]
    graph.replay()
    found = _medians(graph.replay) / len(kept)
    del kept
    return found


def _of_events(run: Callable[[Held], Any], copies: Sequence[Held]) -> float:
    torch.cuda.synchronize()
    return _medians(lambda: [run(copy) for copy in copies]) / len(copies)


def _medians(run: Callable[[], object]) -> float:
    return statistics.median(_event_seconds(run) for _ in range(_REPEATS))


def _event_seconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _of_calls(run: Callable[[], Any], copies: Sequence[Held]) -> float:
    """The median time of plain calls."""
    seconds: list[float] = []
    until = time.perf_counter() + _CPU_SECONDS
    while len(seconds) < 3 or time.perf_counter() < until:
        with exchanged([copies[len(seconds) % len(copies)]]):
            seconds.append(_seconds(run))
    return statistics.median(seconds)


@torch.no_grad()
def in_turns(
    model: nn.Module, timed: Sequence[tuple[Any, float]], contexts: Sequence[Changed]
) -> list[float]:
    """The milliseconds that the whole model takes for the batches in each context: medians over runs in turns.

    Args:
        model, timed: those of `Clock`.
        contexts: each gives a context in which the model is changed, with the same weights each time.
    """
    device = next(model.parameters()).device
    totals = [0.0] * len(contexts)
    with eval_mode(model), torch.compiler.set_stance("force_eager"):
        for batch, count in timed:
            runs: list[Callable[[], object]] = [_whole(model, batch, own) for own in contexts]
            kept: list[Any] = []
            if device.type == "cuda":
                with suppress(RuntimeError):  # what waits for the device is not captured
                    kept = [_captured(run) for run in runs]
                    runs = [graph.replay for graph, _ in kept]
            turns = _timed_in_turns(runs, device.type == "cuda")
            for i, seconds in enumerate(turns):
                totals[i] += 1e3 * count * statistics.median(seconds)
            del kept
    return totals


def _whole(model: nn.Module, batch: Any, changed: Changed) -> Callable[[], Any]:
    def run() -> Any:
        with changed():
            return call(model, batch)

    run()  # compiles kernels, and lays out weights
    return run


def _captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of one run, and its output. The caller keeps the output, whose memory the graph writes."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph, output


def _timed_in_turns(runs: Sequence[Callable[[], object]], on_gpu: bool) -> list[list[float]]:
    """Seconds of each run, one after the other up to `_TURNS` times. On a CPU as often as `_TURNS` times
    `_CPU_SECONDS` allow, three times at least."""
    turns: list[list[float]] = [[] for _ in runs]
    until = math.inf if on_gpu else time.perf_counter() + _TURNS * _CPU_SECONDS
    for number in range(_TURNS):
        if number >= 3 and time.perf_counter() > until:
            break
        for run, own in zip(runs, turns, strict=True):
            own.append(_event_seconds(run) if on_gpu else _seconds(run))
    return turns
