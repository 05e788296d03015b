"""`lowbit bench`: how fast this machine's optimizers and linears are, beside PyTorch's own.

The times are medians of repeated runs, including the wait for the device. They hold for this machine and for the sizes
in the table. `python -m benchmarks` of the source tree measures much more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

import lowbit
from lowbit.cli.output import print_json, print_table
from lowbit.progress import progress

TOKENS = (1, 16, 128)
_OPTIMIZERS = {"AdamW8bit": lowbit.optim.AdamW8bit, "AdamW4bit": lowbit.optim.AdamW4bit}
_SCHEMES = {"int8": lowbit.Int8WeightOnly, "int4": lowbit.Int4WeightOnly}


@dataclass(frozen=True)
class BenchSizes:
    """The measured sizes: a linear of `width` x `width`, optimizers of `matrices` such weights, `seconds` each."""

    width: int
    matrices: int
    seconds: float


_SIZES = {"cpu": BenchSizes(2048, 2, 0.5), "cuda": BenchSizes(4096, 16, 0.5)}
_QUICK = {"cpu": BenchSizes(2048, 1, 0.03), "cuda": BenchSizes(4096, 2, 0.03)}
"""The same width: smaller layers would fit the caches, and the overhead of calls would hide their products."""


@dataclass(frozen=True)
class BenchRow:
    """One measurement. speedup: how many times as fast as the baseline of its group."""

    group: str
    name: str
    milliseconds: float
    speedup: float
    bytes_per_parameter: float


def bench(device: str | None, quick: bool, json: bool) -> None:
    """The command `bench`. Args: those of `lowbit.cli.app.bench`."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in _SIZES:
        raise ValueError(f"--device {where} is not measured; accepted: {', '.join(_SIZES)}")
    sizes = (_QUICK if quick else _SIZES)[where.type]
    rows = measured(where, sizes)
    if json:
        print_json({"device": _name(where), **asdict(sizes), "rows": [asdict(row) for row in rows]})
        return
    width, millions = sizes.width, sizes.matrices * sizes.width**2 / 1e6
    header = ("", "", "time", "speed", "B/parameter")
    lines = [
        (r.group, r.name, f"{r.milliseconds:.3g} ms", f"{r.speedup:.2f} x", f"{r.bytes_per_parameter:.2f}")
        for r in rows
    ]  # fmt: skip
    title = f"{_name(where)}: optimizers of {millions:.1f} M parameters, linears {width} x {width}"
    print_table(title, header, lines)


def measured(device: torch.device, sizes: BenchSizes) -> list[BenchRow]:
    """All rows. In each group the first is PyTorch's, the baseline of the others."""
    runs = [*_optimizers(device, sizes), *_linears(device, sizes)]
    rows: list[BenchRow] = []
    with progress("measuring", len(runs), unit="runs") as advance:
        baseline: dict[str, float] = {}
        for group, name, make in runs:
            run, nbytes = make()
            run()  # compiles kernels and makes states
            seconds = Timer("run()", globals={"run": run}).blocked_autorange(
                min_run_time=sizes.seconds
            )
            first = baseline.setdefault(group, seconds.median)
            rows.append(
                BenchRow(group, name, 1e3 * seconds.median, first / seconds.median, nbytes())
            )
            advance(1)
    return rows


_Made = tuple[Callable[[], object], Callable[[], float]]
"""A call to time, and a call that afterwards gives the bytes kept for each parameter."""
_Run = tuple[str, str, Callable[[], _Made]]


def _optimizers(device: torch.device, sizes: BenchSizes) -> Iterator[_Run]:
    def weights() -> list[nn.Parameter]:
        torch.manual_seed(0)
        shape = sizes.matrices, sizes.width, sizes.width
        values = torch.randn(shape, dtype=torch.bfloat16, device=device)
        made = [nn.Parameter(v.clone()) for v in values]
        for weight in made:
            weight.grad = torch.randn_like(weight)
        return made

    def fused() -> _Made:
        optimizer = torch.optim.AdamW(weights(), fused=True)
        return optimizer.step, lambda: 4.0

    def low(kind: Any) -> Callable[[], _Made]:
        def make() -> _Made:
            parameters = weights()
            optimizer = kind(parameters)
            count = sum(p.numel() for p in parameters)
            return optimizer.step, lambda: optimizer.state_bytes() / count

        return make

    yield "optimizer step", "torch AdamW, fused, bf16", fused
    for name, kind in _OPTIMIZERS.items():
        yield "optimizer step", name, low(kind)


def _linears(device: torch.device, sizes: BenchSizes) -> Iterator[_Run]:
    def product(tokens: int, scheme: Any) -> Callable[[], _Made]:
        def make() -> _Made:
            torch.manual_seed(0)
            layer = nn.Linear(sizes.width, sizes.width, bias=False)
            model = nn.Sequential(layer).to(device, torch.bfloat16).requires_grad_(False)
            nbytes = 2.0
            if scheme is not None:
                report = lowbit.quantize_(model, scheme())
                nbytes = report.nbytes / report.parameters
            x = torch.randn(tokens, sizes.width, dtype=torch.bfloat16, device=device)

            def run() -> None:
                with torch.inference_mode():
                    model(x)

            return run, lambda: nbytes

        return make

    for tokens in TOKENS:
        group = f"linear, {tokens} token{'s' if tokens > 1 else ''}"
        yield group, "bf16", product(tokens, None)
        for name, scheme in _SCHEMES.items():
            yield group, name, product(tokens, scheme)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
