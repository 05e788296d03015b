"""What 2:4 pruning costs the quick start's tiny model, in nats a token above high precision.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m benchmarks.pruning runs/recovery/seed0 [--schemes int8,int4,float8] [--tokens 60000]

Linears of the blocks are pruned and rounded; the tied embedding is rounded by the same scheme, and stays dense.
Calibrated by 16 batches of 8 x 256 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lowbit
from lowbit.inference import GPTQ, LearnedRounding, Prune24, Search, Step
from recipes.calibration import batches_of, open_run
from recipes.phases import high_precision_model
from recipes.training import window_losses

SCHEMES = {
    "int8": lowbit.Int8WeightOnly(),
    "int4": lowbit.IntxWeightOnly(4, 32, "symmetric"),
    "float8": lowbit.Float8WeightOnly(),
    "int3": lowbit.IntxWeightOnly(3, 32, "symmetric"),
}
PRUNED = {name: Prune24(name) for name in ("magnitude", "wanda", "sparsegpt")}
STEPS: dict[str, list[Step]] = {
    "dense, GPTQ()": [GPTQ()],
    **{f"{name}, Search()": [step, Search()] for name, step in PRUNED.items()},
    **{f"{name}, GPTQ()": [step, GPTQ()] for name, step in PRUNED.items()},
    "sparsegpt, GPTQ(), learned over the model": [
        *(PRUNED["sparsegpt"], GPTQ()),
        LearnedRounding(over="model", reach=1.0),
    ],
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.pruning", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run folder of a seed of recipes.recovery")
    parser.add_argument("--schemes", default="int8,int4,float8", help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--steps", default=";".join(STEPS), help="names, with semicolons")
    parser.add_argument("--tokens", type=int, default=60_000, help="held out (%(default)s)")
    options = parser.parse_args(arguments)
    run = open_run(options.folder)
    windows = run.heldout_windows(options.tokens)

    def loss(scheme: lowbit.Scheme | None, steps: list[Step]) -> float:
        model = high_precision_model(run)
        if scheme is not None:
            lowbit.calibrate(model, scheme, batches_of(run, 0, 16), steps=steps)
        return float(window_losses(model, windows, run.config.bf16).mean())

    high = loss(None, [])
    print(f"high precision {high:.4f} nats", flush=True)
    for name in options.steps.split(";"):
        for scheme in options.schemes.split(","):
            print(
                f"{scheme:<7} {name:<42} {loss(SCHEMES[scheme], STEPS[name]) - high:+.4f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
