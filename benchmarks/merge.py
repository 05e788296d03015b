"""How much of an adapter's gain does a merge into packed weights keep? The quick start's tiny model.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m benchmarks.merge runs/recovery/seed0 [--schemes int4,mxfp4] [--adapters short,long]

    kept = (loss of the base − loss merged) / (loss of the base − loss with the adapter beside it)

The base was trained on the Python standard library. Its linears are packed, and LoRA of rank 8 on all of them trains on
another text, PyTorch's `torch/distributed`: "short" for 60 steps with small changes, "long" for 200 steps at ten times
the learning rate. Losses are in nats a token, over files of that text that nothing else reads. The merge learns from 8
batches of 8 x 256 tokens.
"""

from __future__ import annotations

import argparse
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
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        inputs, targets = batch(tokens, step)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def measure(folder: Path, scheme: str, adapter: str, train: Tensor, windows: Tensor) -> None:
    def loss() -> float:
        return float(window_losses(model, windows, False).mean())

    torch.manual_seed(0)
    model: Any = tiny(folder)[0]
    lowbit.quantize_(model, SCHEMES[scheme])
    base = loss()
    adapt(model, train, *ADAPTERS[adapter])
    gain = base - loss()
    print(f"{scheme}, {adapter} adapter: {base:.4f} nats, gain {gain:.4f}", flush=True)
    given = [batch(train, FIRST_STEP + i)[0] for i in range(BATCHES)]
    ways: dict[str, dict[str, Any]] = {
        "rounded to nearest": {},
        "GPTQ()": {"batches": given, "steps": [GPTQ()]},
        "learned": {"batches": given},
    }
    for name, options in ways.items():
        report = lowbit.peft.merge_(model, **options)
        print(f"  {name:<20} keeps {100 * (base - loss()) / gain:5.1f}%", flush=True)
        if report.losses is not None:
            print(f"    {report.losses}", flush=True)
        report.unmerge_()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.merge", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run folder of a seed of recipes.recovery")
    parser.add_argument("--schemes", default="int4,mxfp4", help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--adapters", default="short,long", help=f"of {', '.join(ADAPTERS)}")
    options = parser.parse_args(arguments)
    tokenizer = text.load(runs.RunFolder(options.folder).data).tokenizer
    source = Path(torch.__file__).parent / "distributed"
    own, others, _ = text.read_split(source, "stdlib", 0.03)
    train, heldout = text.encode(tokenizer, own), text.encode(tokenizer, others)
    windows = text.windows_of(heldout, CONTEXT, HELD_OUT)
    for scheme in options.schemes.split(","):
        for adapter in options.adapters.split(","):
            measure(options.folder, scheme, adapter, train, windows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
