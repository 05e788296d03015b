"""autoquant's plans beside single schemes: bytes and time at equal damage.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m benchmarks.autoquant bytes runs/recovery/seed0        # a trained model, on the CPU
    python -m benchmarks.autoquant encoder FOLDER                   # a sentence encoder of transformers, on the CPU
    python -m benchmarks.autoquant time [--layers 4] [--dim 2048]   # a briefly trained one, on a GPU

For each single scheme S the plan gets the damage of S as its budget: the KL divergence from the model in high precision
on held-out batches, in nats a token. Its own damage is measured on the same batches.
"""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit.inference.planning.units import whole
from lowbit.schemes.lines import line_of, scheme
from lowbit.tracing.damage import damages
from recipes import runs, text
from recipes.device import choose_device
from recipes.llama import Llama, LlamaConfig
from recipes.phases import Run, high_precision_model
from recipes.training import TrainingConfig

BYTES = [
    lowbit.IntxWeightOnly(bits, group, mapping, scale_dtype=torch.float16)
    for bits in range(2, 9)
    for group in (32, 128)
    for mapping in ((None, "asymmetric") if bits <= 4 else (None,))
]
TIME = ("int8", "int4", "int4(group_size=32)", "float8", "int8_int8", "float8_float8", "int8_int4")
REPLAYS, REPEATS = 61, 3
FIRST_STEP = 100_000
"""Batches of steps from here on are those that no training reaches."""


def every(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def quantized(model: nn.Module, one: Any, filter_fn: Any = None) -> nn.Module:
    """A quantized copy."""
    low = copy.deepcopy(model)
    lowbit.quantize_(low, one, filter_fn)
    return low


def lost(model: nn.Module, batches: list[Any], low: nn.Module) -> float:
    """What a quantized copy of the model loses."""
    given: list[Tensor] = [low(batch) for batch in batches]
    outputs = iter(given)
    return damages(model, batches, [_swapped(model, outputs)], "kl").added[0]


def _swapped(model: nn.Module, outputs: Iterable[Tensor]) -> Callable[[], Any]:
    """A context in which the model gives these outputs."""

    class Context:
        def __enter__(self) -> None:
            self.hook = model.register_forward_hook(lambda *_: next(outputs))  # type: ignore[call-overload]

        def __exit__(self, *_: object) -> None:
            self.hook.remove()

    return Context


def tiny(folder: Path) -> tuple[nn.Module, Callable[[int, int], list[Tensor]]]:
    """The model of a run folder; and a function that gives batches, from a number on, so many."""
    found = runs.RunFolder(folder)
    config = TrainingConfig.from_dict(found.settings())
    tracker = runs.Tracker(found, {}, "disabled")
    run = Run(config, found, text.load(found.data), tracker, choose_device())

    def batches(first: int, count: int) -> list[Tensor]:
        sizes = {"batch_size": config.batch_size, "context": config.model.context}
        steps = range(FIRST_STEP + first, FIRST_STEP + first + count)
        return [text.batch(run.data.train, i, seed=config.seed, **sizes)[0] for i in steps]

    return high_precision_model(run), batches


def of_bytes(folder: Path) -> None:
    """The tiny model of a run folder."""
    model, batches = tiny(folder)
    with torch.no_grad():
        _table(model, batches(0, 4), batches(100, 8), BYTES, "kl", True)


def of_encoder(folder: Path) -> None:
    """A sentence encoder of transformers, on sentences of these pages; damage is 1 − cosine to the original."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    words = " ".join(page.read_text(encoding="utf-8") for page in pages)
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+|\n\n", words) if 40 < len(s) < 300]
    sentences = [s for s in sentences if "`" not in s]
    torch.manual_seed(0)
    order = torch.randperm(len(sentences)).tolist()

    def embedded(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        states, counts = model(**given).last_hidden_state, batch["attention_mask"][..., None]
        return F.normalize((states * counts).sum(1) / counts.sum(1), dim=-1)

    batches = []
    with torch.no_grad():
        for first in range(0, 6 * 24, 24):
            chosen = [sentences[i] for i in order[first : first + 24]]
            options = {"padding": True, "truncation": True, "max_length": 48}
            batch = dict(tokenizer(chosen, return_tensors="pt", **options))
            batches.append({**batch, "expected": embedded(model, batch)})

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (1 - (embedded(model, batch) * batch["expected"]).sum(-1)).mean()

    sizes = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 128)]
    candidates = [lowbit.IntxWeightOnly(*size, scale_dtype=torch.float16) for size in sizes]
    with torch.no_grad():
        _table(model, batches[:2], batches[2:], candidates, loss, False)


def _table(
    model: nn.Module,
    seen: list[Any],
    held_out: list[Any],
    candidates: list[lowbit.Scheme],
    loss: Any,
    estimates: bool,
) -> None:
    """Print the table of bytes."""

    def costs(estimate: bool) -> lowbit.inference.Costs:
        options = {"bits": 5, "held_out": held_out[:1], "loss": loss, "estimate": estimate}
        began = time.perf_counter()
        found: Any = lowbit.autoquant(model, seen, candidates, every, **options).costs
        print(f"{'estimated' if estimate else 'measured'} in {time.perf_counter() - began:.0f} s")
        return found

    every_way = [costs(False), *([costs(True)] if estimates else ())]
    measured = every_way[0]
    if estimates:
        pairs = zip(measured.choices, every_way[1].choices, strict=True)
        ratios = sorted(b.damage / a.damage for a, b in pairs if a.damage > 0)
        shown = [f"{ratios[int(len(ratios) * q)]:.3f}" for q in (0.05, 0.5, 0.95)]
        print(f"estimated / measured: 5% {shown[0]}, median {shown[1]}, 95% {shown[2]}")
    rows = []
    for one in candidates:
        single = next(p for p in measured.uniform() if set(p.values()) == {one})
        low = whole(model, one, every, None)
        rows.append((single.bits, damages(model, held_out, [low.changed()], loss).added[0], one))
    least = float("inf")
    more = " estimated: bits | damage |" if estimates else ""
    print(f"| single scheme | bits | damage | plan: bits | damage | fewer bytes |{more}")
    print(f"|---|--:|--:|--:|--:|--:|{'--:|--:|' if estimates else ''}")
    for bits, damage, one in sorted(rows, key=lambda row: row[:2]):
        beaten = "" if damage < least else " (a smaller one loses less)"
        least = min(least, damage)
        plans = [
            lowbit.autoquant(model, [], own, every, damage=damage, held_out=held_out, loss=loss)
            for own in every_way
        ]
        cells = [f"{p.bits:.3f} | {p.measured:.5f}" for p in plans]
        cells.insert(1, f"{100 * (1 - plans[0].bits / bits):.1f}%")
        print(
            f"| {line_of(one)}{beaten} | {bits:.3f} | {damage:.5f} | {' | '.join(cells)} |",
            flush=True,
        )


# ---- time -----------------------------------------------------------------------------------------------------


def trained(dim: int, layers: int, steps: int) -> tuple[nn.Module, list[Tensor]]:
    """A Llama of bytes, trained on the sources of Python's library, in bfloat16; and batches for it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(source), dtype=torch.uint8).cuda().long()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, dim=dim, layers=layers, heads=dim // 128, kv_heads=dim // 512,
        hidden=11 * dim // 4, context=1024, tied=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator("cuda").manual_seed(0)

    def batch(size: int) -> Tensor:
        at = torch.randint(len(data) - 513, (size, 1), generator=generator, device="cuda")
        return data[at + torch.arange(513, device="cuda")]

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (step + 1) / 30, (steps - step) / (0.3 * steps))
        ids = batch(16)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, loss {float(loss.detach()):.3f} nats a byte")
    return model.to(torch.bfloat16).eval().requires_grad_(False), [
        batch(8)[:, :-1] for _ in range(4)
    ]


def milliseconds(models: list[nn.Module], timed: list[tuple[Tensor, float]]) -> list[float]:
    """The time of each whole model over the batches, by CUDA graphs that run in turns."""
    totals = [0.0] * len(models)
    for ids, count in timed:
        graphs, kept = [], []
        for model in models:
            for _ in range(3):
                model(ids)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                kept.append(model(ids))
        seconds: list[list[float]] = [[] for _ in models]
        for _ in range(REPLAYS):
            for graph, own in zip(graphs, seconds, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                own.append(start.elapsed_time(end))
        for i, own in enumerate(seconds):
            totals[i] += count * sorted(own)[REPLAYS // 2]
        del kept
    return totals


def of_time(dim: int, layers: int, steps: int, bytes_too: bool) -> None:
    """A briefly trained model on this machine's GPU."""
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {what}", flush=True)

    warming = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.autoquant", "warm", one, "--dim", str(dim)]
        )
        for one in TIME
    ]
    model, batches = trained(dim, layers, steps)
    say(torch.cuda.get_device_name())
    for process in warming:
        process.wait()
    say("kernels are compiled")
    ids = batches[0]
    requests = {
        "decode": [(ids[:1, :1].contiguous(), 256.0)],
        "prefill": [(ids[:1].contiguous(), 16.0)],
        "both": [(ids[:1].contiguous(), 8.0), (ids[:1, :1].contiguous(), 128.0)],
    }
    schemes = [scheme(one) for one in TIME]
    with torch.no_grad():
        _compare(model, batches, schemes, requests, say)
        if bytes_too:
            sizes = [(bits, group) for bits in (3, 4, 5, 6) for group in (32, 128)]
            candidates = [lowbit.IntxWeightOnly(*size) for size in sizes]
            _table(model, batches[:2], batches[2:], candidates, "kl", False)
            say("bytes")


def _compare(
    model: nn.Module,
    batches: list[Tensor],
    schemes: list[lowbit.Scheme],
    requests: dict[str, list[tuple[Tensor, float]]],
    say: Callable[[str], None],
) -> None:
    """Print the tables of time: the ratios of the plan by modules, of the plan that is chosen by whole models, and of
    the single scheme to itself, in the same turns; medians and extremes of `REPEATS`."""
    seen, held_out = batches[:2], batches[2:4]
    singles = []
    for one in schemes:
        low = quantized(model, one)
        singles.append((one, lost(model, held_out, low), low))
    say("single schemes are measured")
    for name, timed in requests.items():
        first = lowbit.autoquant(
            model, seen, schemes, damage=1e9, timed=timed, held_out=held_out[:1]
        )
        (plain,) = milliseconds([model], timed)
        say(f"{name}: bf16 {plain:.3f} ms, with the modules alone {_plain_ms(first):.3f} ms")
        assert first.costs is not None
        uniform = {
            id(s): p for s in schemes for p in first.costs.uniform() if set(p.values()) == {s}
        }
        for one, damage, low in singles:
            options: dict[str, Any] = {"damage": damage, "held_out": held_out}
            # By the times of modules alone, and as a user gets it
            plans = [
                lowbit.autoquant(model, [], first.costs, **options, timed=own)
                for own in ([], timed)
            ]
            # Weights of its own: a graph that follows one of the same weights finds parts of them in the cache
            models = [low, *(quantized(model, plan) for plan in plans), copy.deepcopy(low)]
            turns = [milliseconds(models, timed) for _ in range(REPEATS)]
            ratios = [sorted(own[i] / own[0] for own in turns) for i in (1, 2, 3)]
            shown = [f"{r[REPEATS // 2]:.3f} ({r[0]:.3f} to {r[-1]:.3f})" for r in ratios]
            kinds = [
                ", ".join(sorted({"-" if s is None else str(line_of(s)) for s in plan.values()}))
                for plan in plans
            ]
            print(
                f"| {name} | {line_of(one)} | {damage:.5f} | {uniform[id(one)].milliseconds:.3f} | {turns[0][0]:.3f} | "
                f"{plans[1].measured:.5f} | {plans[1].milliseconds:.3f} | {turns[0][2]:.3f} | {' | '.join(shown)} | "
                f"{' | '.join(kinds)} |",
                flush=True,
            )
        say(name)


def _plain_ms(plan: lowbit.Plan) -> float:
    assert plan.costs is not None
    return sum(own[0].milliseconds or 0.0 for own in plan.costs.units.values())


def warm(line: str, dim: int) -> None:
    """Compile the kernels of a scheme, into the cache that all processes share."""
    hidden, pairs = 11 * dim // 4, []
    pairs = [(dim, dim), (dim, dim // 4), (dim, hidden), (hidden, dim), (dim, 256)]
    with torch.no_grad():
        for inputs, outputs in pairs:
            layer = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).to("cuda", torch.bfloat16)
            lowbit.quantize_(layer, scheme(line))
            for rows in (1, 512, 8 * 512):
                layer(torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.autoquant", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("bytes", "encoder", "time", "warm"))
    parser.add_argument("given", nargs="?", help="a run folder; for warm a scheme")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--bytes", action="store_true", help="with time: the table of bytes, too")
    options = parser.parse_args(arguments)
    if options.what == "bytes":
        of_bytes(Path(options.given))
    elif options.what == "encoder":
        of_encoder(Path(options.given))
    elif options.what == "warm":
        warm(options.given, options.dim)
    else:
        of_time(options.dim, options.layers, options.steps, options.bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
