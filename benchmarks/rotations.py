"""Rotations on the quick start's tiny model, and on the same with planted outliers of activations.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m benchmarks.rotations runs/recovery/seed0

Damage is the KL divergence from the model in high precision on held-out batches, in nats a token, with the linears of
the blocks rounded. The head is untied from the embedding, so that the residual stream can be rotated.

Outliers stand where norms cannot take them: channels of the values of attention, and of what the down projection
multiplies, are 50 times as large, and the columns of the linears that multiply them 50 times as small. So the model
gives the same, and its activations are harder to round.
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
from benchmarks.folding import BLOCKS, FACTOR, calibrated
from lowbit.inference import GPTQ, Rotate, SmoothQuant, Step

OUTLIERS = 4
BY_TOKEN = lowbit.Spec(lowbit.Int(4), lowbit.PerToken(), "symmetric_no_clipping_err")
INT4 = lowbit.IntxWeightOnly(4, 32, "symmetric")


def with_activation(scheme: lowbit.Scheme) -> lowbit.Scheme:
    """The scheme with inputs in int4, a scale a token."""
    return lowbit.Scheme(scheme.weight, BY_TOKEN)


WEIGHTS = {
    "int4": lowbit.IntxWeightOnly(4, 32, "symmetric"),
    "MXFP4": lowbit.MXFP4WeightOnly(),
    "NVFP4": lowbit.NVFP4WeightOnly(),
}
INPUTS = {f"{name}, int4 inputs": with_activation(scheme) for name, scheme in WEIGHTS.items()}
STEPS: dict[str, list[Step]] = {
    "GPTQ": [GPTQ()],
    "Rotate(folded=False), GPTQ": [Rotate(folded=False), GPTQ()],
    "Rotate(), GPTQ": [Rotate(), GPTQ()],
}
MORE_STEPS: dict[str, list[Step]] = {
    **STEPS,
    "SmoothQuant, GPTQ": [SmoothQuant(), GPTQ()],
    "SmoothQuant, Rotate(), GPTQ": [SmoothQuant(), Rotate(), GPTQ()],
}
SIZES: dict[str, list[Step]] = {
    f"Rotate({size}, folded=False), GPTQ": [Rotate(size, folded=False), GPTQ()] for size in (16, 32)
}


def untied(model: nn.Module) -> nn.Module:
    changed: Any = copy.deepcopy(model)
    changed.head.weight = nn.Parameter(changed.head.weight.detach().clone())
    found: nn.Module = changed
    return found


def with_outliers(model: nn.Module) -> nn.Module:
    changed: Any = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for block in changed.blocks:
        attention, mlp = block.attention, block.mlp
        at = torch.randperm(len(mlp.up.weight), generator=generator)[:OUTLIERS]
        mlp.up.weight[at] *= FACTOR
        mlp.down.weight[:, at] /= FACTOR
        width = attention.config.head_dim
        heads = attention.config.heads // attention.config.kv_heads
        (channel,) = torch.randperm(width, generator=generator)[:1].tolist()
        attention.value.weight[channel] *= FACTOR
        for head in range(heads):
            attention.out.weight[:, head * width + channel] /= FACTOR
    found: nn.Module = changed
    return found


def table(
    schemes: dict[str, lowbit.Scheme],
    steps: dict[str, list[Step]],
    models: Sequence[nn.Module],
    batches: list[Any],
    held_out: list[Any],
) -> None:
    for name, scheme in schemes.items():
        for method, chosen in steps.items():
            cells = [
                f"{lost(m, held_out, calibrated(m, {BLOCKS: scheme}, batches, chosen)):.5f}"
                for m in models
            ]
            print(f"| {name}: {method} | {' | '.join(cells)} |", flush=True)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    (folder,) = sys.argv[1:] if arguments is None else arguments
    tied, get = tiny(Path(folder))
    plain = untied(tied)
    batches, held_out = get(0, 4), get(100, 8)
    models = plain, with_outliers(plain)
    print("| | as trained | with outliers |\n|---|--:|--:|")
    nvfp4 = "NVFP4, int4 inputs"
    most = {name: scheme for name, scheme in INPUTS.items() if name != nvfp4}
    table(most, MORE_STEPS, models, batches, held_out)
    table({nvfp4: INPUTS[nvfp4]}, STEPS, models, batches, held_out)
    table(WEIGHTS, STEPS, models, batches, held_out)
    table({"int4, int4 inputs": INPUTS["int4, int4 inputs"]}, SIZES, models, batches, held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
