"""How much of an adapter's gain does a merge into packed weights keep? The quick start's tiny model.

    python -m recipes.recovery --preset tiny --seeds 0,1,2 --base-only --out runs/recovery
    python -m benchmarks.merge runs/recovery/seed* [--schemes int4,mxfp4] [--adapters short,long] [--draws 2]

    kept = (loss of the base − loss merged) / (loss of the base − loss with the adapter beside it)

The base was trained on the Python standard library. Its linears are packed, and LoRA of rank 8 on all of them trains on
another text, PyTorch's `torch/distributed`: "short" for 60 steps with small changes, "long" for 200 steps at ten times
the learning rate. Losses are in nats a token, over files of that text that nothing else reads. The merge learns from 8
batches of 8 x 256 tokens. Each draw is of other batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
import lowbit.peft
from benchmarks.autoquant import FIRST_STEP, tiny
from lowbit.inference import GPTQ
from lowbit.schemes.mixed_precision import BLOCK_WEIGHT, UE8M0_BLOCK_WEIGHT
from recipes import runs, text
from recipes.training import window_losses

CONTEXT, BATCH, BATCHES, HELD_OUT = 256, 8, 8, 60_000
SCHEMES = {
    "int4": lowbit.IntxWeightOnly(4, 32),
    "int3": lowbit.IntxWeightOnly(3, 32),
    "nf4": lowbit.NF4WeightOnly(32),
    "mxfp4": lowbit.MXFP4WeightOnly(),
    "nvfp4": lowbit.NVFP4WeightOnly(),
    "mxfp8": lowbit.MXFP8WeightOnly(),
    "float8": lowbit.Float8WeightOnly(),
    "blocks": lowbit.Scheme(BLOCK_WEIGHT),
    "ue8m0": lowbit.Scheme(UE8M0_BLOCK_WEIGHT),
}
ADAPTERS = {"short": (60, 5e-4), "long": (200, 5e-3)}
"""Steps, and the learning rate at the first, from which it falls to 0."""


def batch(tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return text.batch(tokens, step, batch_size=BATCH, context=CONTEXT, seed=0)


def adapt(model: nn.Module, tokens: Tensor, steps: int, lr: float) -> None:
    """Train adapters of all linears of the blocks."""
    from peft import LoraConfig, inject_adapter_in_model  # the other benchmarks need no PEFT

    names = "|".join(("query", "key", "value", "out", "gate", "up", "down"))
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=rf".*\.({names})"), model)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0
    )
    model.train()
    device = next(model.parameters()).device
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        inputs, targets = (t.to(device) for t in batch(tokens, step))
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


WAYS: dict[str, dict[str, Any]] = {
    "rounded to nearest": {},
    "GPTQ()": {"steps": [GPTQ()]},
    "learned": {"steps": None},
}
"""The options of `merge_` beside batches, which rounding to nearest takes none of."""


def measure(
    folder: Path,
    scheme: str,
    adapter: str,
    train: Tensor,
    windows: Tensor,
    draws: int = 1,
    ways: dict[str, dict[str, Any]] = WAYS,
) -> dict[str, list[float]]:
    """The share of the gain that each way keeps, for each draw of batches."""

    def loss() -> float:
        return float(window_losses(model, windows, False).mean())

    torch.manual_seed(0)
    model: Any = tiny(folder)[0]
    device = next(model.parameters()).device
    lowbit.quantize_(model, SCHEMES[scheme])
    base = loss()
    adapt(model, train, *ADAPTERS[adapter])
    gain = base - loss()
    print(f"{folder.name}, {scheme}, {adapter} adapter: {base:.4f} nats, gain {gain:.4f}")
    kept: dict[str, list[float]] = {}
    for name, options in ways.items():
        for draw in range(draws if options else 1):
            first = FIRST_STEP + draw * BATCHES
            given = [batch(train, first + i)[0].to(device) for i in range(BATCHES)]
            report = lowbit.peft.merge_(model, **options, batches=given if options else None)
            kept.setdefault(name, []).append((base - loss()) / gain)
            print(f"  {name:<20} keeps {kept[name][-1]:6.1%}", flush=True)
            if report.losses is not None:
                print(f"    {report.losses}", flush=True)
            report.unmerge_()
    return kept


def texts(folder: Path) -> tuple[Tensor, Tensor]:
    """What adapters train on, and the windows of text that losses are taken over."""
    tokenizer = text.load(runs.RunFolder(folder).data).tokenizer
    source = Path(torch.__file__).parent / "distributed"
    own, others, _ = text.read_split(source, "stdlib", 0.03)
    heldout = text.encode(tokenizer, others)
    return text.encode(tokenizer, own), text.windows_of(heldout, CONTEXT, HELD_OUT)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.merge", description=__doc__.splitlines()[0])
    parser.add_argument(
        "folders", type=Path, nargs="+", help="the run folders of seeds of recipes.recovery"
    )
    parser.add_argument("--schemes", default="int4,mxfp4", help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--adapters", default="short,long", help=f"of {', '.join(ADAPTERS)}")
    parser.add_argument("--draws", type=int, default=1, help="draws of batches")
    options = parser.parse_args(arguments)
    kept: dict[tuple[str, ...], list[float]] = {}
    for folder in options.folders:
        train, windows = texts(folder)
        for scheme in options.schemes.split(","):
            for adapter in options.adapters.split(","):
                found = measure(folder, scheme, adapter, train, windows, options.draws)
                for name, shares in found.items():
                    kept.setdefault((scheme, adapter, name), []).extend(shares)
    for (scheme, adapter, name), shares in kept.items():
        mean, least, most = statistics.mean(shares), min(shares), max(shares)
        case = f"{scheme}, {adapter} adapter, {name}"
        print(f"{case}: {mean:.1%} ({least:.1%} to {most:.1%}, {len(shares)} merges)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
