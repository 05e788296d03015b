"""How much of the loss that rounding costs do searched scales and calibration win back? One trained language model.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m recipes.calibration runs/recovery/seed0 [--draws 3] [--batches 16]

    won back = (loss rounded − loss calibrated) / (loss rounded − loss in high precision), in nats of held-out text

"Rounded" is by the smallest and largest values of groups of 32, with the mapping "symmetric". The tied embedding is
rounded as well. Each draw calibrates on other batches of the training text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import lowbit
from lowbit.inference import GPTQ, Search, Step
from recipes import runs, text
from recipes.device import choose_device
from recipes.phases import Run, high_precision_model
from recipes.training import TrainingConfig, window_losses

GROUP, BITS = 32, (4, 3, 2)
FIRST_STEP = 100_000
"""Calibration reads the batches of steps from here on, which no training reaches."""
METHODS: dict[str, Callable[[], Step] | None] = {
    "searched": None,
    "Search()": Search,
    "GPTQ(asymmetric=0)": lambda: GPTQ(asymmetric=0),
    "GPTQ()": GPTQ,
}


def loss_of(run: Run, scheme: lowbit.Scheme | None, method: str, draw: int, count: int) -> float:
    """Mean held-out loss of the model, rounded by this scheme and method; None: in high precision."""
    model = high_precision_model(run)
    step = METHODS.get(method)
    if scheme is not None and step is None:
        scales = "searched" if method == "searched" else "minmax"
        lowbit.quantize_(model, scheme, scales=scales)  # type: ignore[arg-type]
    elif scheme is not None and step is not None:
        config = run.config
        batches = [
            text.batch(
                run.data.train,
                FIRST_STEP + i,
                batch_size=config.batch_size,
                context=config.model.context,
                seed=config.seed + draw,
            )[0]
            for i in range(count)
        ]
        lowbit.calibrate(model, scheme, batches, steps=[step()])
    windows = run.heldout_windows(run.config.heldout_tokens)
    return float(window_losses(model, windows, run.config.bf16).mean())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("recipes.calibration", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="the run folder of a seed of recipes.recovery")
    add("--draws", type=int, default=3, help="draws of calibration batches (default: %(default)s)")
    add("--batches", type=int, default=16, help="batches of a draw (default: %(default)s)")
    options = parser.parse_args(arguments)
    folder = runs.RunFolder(options.folder)
    config = TrainingConfig.from_dict(folder.settings())
    tracker = runs.Tracker(folder, {}, "disabled")
    run = Run(config, folder, text.load(folder.data), tracker, choose_device())
    high = loss_of(run, None, "", 0, 0)
    print(f"high precision {high:.4f} nats")
    for bits in BITS:
        scheme = lowbit.IntxWeightOnly(bits, GROUP, "symmetric")
        rounded = loss_of(run, scheme, "minmax", 0, 0)
        print(f"int{bits} rounded {rounded - high:+.4f}")
        for mapping in ("symmetric", "float_zero_point"):
            own = lowbit.IntxWeightOnly(bits, GROUP, mapping)
            for method, step in METHODS.items():
                draws = range(1 if step is None else options.draws)
                left = [loss_of(run, own, method, d, options.batches) - rounded for d in draws]
                shares = " ".join(f"{100 * x / (high - rounded):5.1f}" for x in left)
                print(f"int{bits} {mapping:<16} {method:<20} won back, % {shares}", flush=True)
    tracker.close(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
