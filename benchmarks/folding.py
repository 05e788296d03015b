"""AWQ and SmoothQuant on the quick start's tiny model, and on the same with planted outliers of activations.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m benchmarks.folding runs/recovery/seed0

Damage is the KL divergence from the model in high precision on held-out batches, in nats a token. Outliers: four
channels of each norm before linears are 50 times as large, and the columns of the linears that multiply them 50 times
as small. So the model gives the same, and its activations are harder to round.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowbit
from benchmarks.autoquant import lost, tiny
from lowbit.inference import AWQ, GPTQ, Search, SmoothQuant, Step

OUTLIERS, FACTOR = 4, 50.0
BLOCKS = "blocks.*"
WEIGHTS: tuple[tuple[str, list[Step] | None], ...] = (
    ("min-max", None),
    ("AWQ", [AWQ()]),
    ("Search", [Search()]),
    ("AWQ, Search", [AWQ(), Search()]),
    ("GPTQ", [GPTQ()]),
    ("AWQ, GPTQ", [AWQ(), GPTQ()]),
)


def with_outliers(model: nn.Module) -> nn.Module:
    changed: Any = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for block in changed.blocks:
        attention, mlp = block.attention, block.mlp
        for norm, linears in (
            (block.attention_norm, (attention.query, attention.key, attention.value)),
            (block.mlp_norm, (mlp.gate, mlp.up)),
        ):
            at = torch.randperm(len(norm.weight), generator=generator)[:OUTLIERS]
            norm.weight[at] *= FACTOR
            for linear in linears:
                linear.weight[:, at] /= FACTOR
    found: nn.Module = changed
    return found


def calibrated(
    model: nn.Module, scheme: Any, batches: list[Any], steps: Sequence[Step] | None
) -> nn.Module:
    """A copy, calibrated; without steps rounded by min-max."""
    low = copy.deepcopy(model)
    if steps is None:
        lowbit.quantize_(low, scheme, scales="minmax")
    else:
        lowbit.calibrate(low, scheme, batches, steps=steps, held_out=[])
    return low


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    (folder,) = sys.argv[1:] if arguments is None else arguments
    plain, get = tiny(Path(folder))
    batches, held_out = get(0, 16), get(100, 16)
    outliers = with_outliers(plain)
    static = {BLOCKS: lowbit.Int8StaticActivationInt8Weight()}
    dynamic = {BLOCKS: lowbit.Int8DynamicActivationInt8Weight()}
    print("| W8A8 | as trained | with outliers |\n|---|--:|--:|")
    choices: list[tuple[str, Any, list[Step] | None]] = [
        ("dynamic, a scale a token", dynamic, None),
        ("static", static, [Search()]),
        ("static, SmoothQuant(0.5)", static, [SmoothQuant(0.5)]),
        ("static, SmoothQuant(0.65)", static, [SmoothQuant(0.65)]),
        ("static, SmoothQuant(0.8)", static, [SmoothQuant(0.8)]),
        ("dynamic, SmoothQuant()", dynamic, [SmoothQuant()]),
    ]
    for name, scheme, steps in choices:
        cells = [
            f"{lost(model, held_out, calibrated(model, scheme, batches, steps)):.5f}"
            for model in (plain, outliers)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\n| blocks, groups of 32 | as trained | with outliers |\n|---|--:|--:|")
    for bits in (4, 3, 2):
        scheme = {BLOCKS: lowbit.IntxWeightOnly(bits, 32, "symmetric")}
        for name, steps in WEIGHTS:
            cells = [
                f"{lost(model, held_out, calibrated(model, scheme, batches, steps)):.5f}"
                for model in (plain, outliers)
            ]
            print(f"| int{bits}, {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
