"""How much of the loss that rounding costs do searched scales and calibration win back? One trained language model.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m recipes.calibration runs/recovery/seed0 [--draws 3] [--batches 16] [--processes 8]
        [--schemes int3,"int3 values"] [--methods "GPTQ(),LearnedRounding()"]

    won back = (loss rounded − loss calibrated) / (loss rounded − loss in high precision), in nats of held-out text

"Rounded" is by the smallest and largest values, for integers in groups of 32 with the mapping "symmetric". Zero points
of "values" are the mapping "float_zero_point". The tied embedding is rounded as well. Each draw calibrates on other
batches of the training text, and methods that end in "sampled" on as many tokens that the model draws itself. The steps
see all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import lowbit
from lowbit.inference import GPTQ, LearnedRounding, Search, Step, sampled_batches
from recipes import runs, text
from recipes.device import choose_device
from recipes.phases import Run, high_precision_model
from recipes.training import TrainingConfig, window_losses

GROUP, BITS = 32, (4, 3, 2)
FIRST_STEP = 100_000
"""Calibration reads the batches of steps from here on, which no training reaches."""
SCHEMES: dict[str, tuple[lowbit.Scheme, lowbit.Scheme]] = {
    f"int{bits}{' values' if mapping == 'float_zero_point' else ''}": (
        lowbit.IntxWeightOnly(bits, GROUP, mapping),
        lowbit.IntxWeightOnly(bits, GROUP, "symmetric"),
    )
    for mapping in ("symmetric", "float_zero_point")
    for bits in BITS
} | {
    "nvfp4": (lowbit.NVFP4WeightOnly(), lowbit.NVFP4WeightOnly()),
    "mxfp4": (lowbit.MXFP4WeightOnly("symmetric"), lowbit.MXFP4WeightOnly("symmetric")),
}
"""By name: the scheme, and the one whose min-max rounding costs what is won back."""
MODEL = LearnedRounding(over="model")
WITHOUT_DATA, SAMPLED = "no data", "sampled"
"""How the names of methods end that calibrate without batches, or on those that the model draws."""
METHODS: dict[str, Sequence[Step] | str] = {
    "min-max": "minmax",
    "searched": "searched",
    "GPTQ(), no data": [GPTQ()],
    "GPTQ(sweeps=2), no data": [GPTQ(sweeps=2)],
    "GPTQ(), sampled": [GPTQ()],
    "Search()": [Search()],
    "GPTQ(asymmetric=0)": [GPTQ(asymmetric=0)],
    "GPTQ()": [GPTQ()],
    "GPTQ(sweeps=2)": [GPTQ(sweeps=2)],
    "learned over blocks": [LearnedRounding()],
    "learned over the model": [MODEL],
    "GPTQ, learned over blocks": [GPTQ(), LearnedRounding()],
    "GPTQ, learned over the model": [GPTQ(), MODEL],
    "GPTQ, vectors alone": [GPTQ(), LearnedRounding(over="model", reach=0, scale_rate=0)],
}


ONCE = ("min-max", "searched", WITHOUT_DATA, SAMPLED)
"""How the names of methods end that read no batches."""


class Case(NamedTuple):
    """One model to round and measure."""

    scheme: str | None
    method: str
    draw: int = 0


def open_run(path: Path) -> Run:
    """The finished run in a folder of `recipes.recovery`."""
    folder = runs.RunFolder(path)
    config = TrainingConfig.from_dict(folder.settings())
    tracker = runs.Tracker(folder, {}, "disabled")
    return Run(config, folder, text.load(folder.data), tracker, choose_device())


def batches_of(run: Run, draw: int, count: int) -> list[torch.Tensor]:
    """Batches of the training text that no training reads."""
    config = run.config
    return [
        text.batch(
            run.data.train,
            FIRST_STEP + i,
            batch_size=config.batch_size,
            context=config.model.context,
            seed=config.seed + draw,
        )[0]
        for i in range(count)
    ]


def loss_of(run: Run, case: Case, count: int, base: bool = False) -> float:
    """Mean held-out loss of the model, in high precision without a scheme. `base`: by the scheme of the base."""
    model = high_precision_model(run)
    if case.scheme is not None:
        scheme, method = SCHEMES[case.scheme][base], METHODS[case.method]
        if isinstance(method, str):
            lowbit.quantize_(model, scheme, scales=method)  # type: ignore[arg-type]
        elif case.method.endswith(WITHOUT_DATA):
            lowbit.calibrate(model, scheme, steps=list(method))
        elif case.method.endswith(SAMPLED):
            size, length = run.config.batch_size, run.config.model.context
            batches = sampled_batches(model, count * size, length, batch_size=size)
            lowbit.calibrate(model, scheme, batches, steps=list(method), held_out=[])
        else:
            batches = batches_of(run, case.draw, count)
            lowbit.calibrate(model, scheme, batches, steps=list(method), held_out=[])
    windows = run.heldout_windows(run.config.heldout_tokens)
    return float(window_losses(model, windows, run.config.bf16).mean())


def _measured(job: tuple[Path, Case, int, bool]) -> tuple[Case, bool, float]:
    path, case, count, base = job
    torch.set_num_threads(1)
    return case, base, loss_of(open_run(path), case, count, base)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("recipes.calibration", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="the run folder of a seed of recipes.recovery")
    add("--draws", type=int, default=3, help="draws of calibration batches (default: %(default)s)")
    add("--batches", type=int, default=16, help="batches of a draw (default: %(default)s)")
    add("--schemes", default=",".join(SCHEMES), help="names, with commas (default: %(default)s)")
    add("--methods", default=";".join(METHODS), help="names, with semicolons (default: all)")
    add("--processes", type=int, default=1, help="that measure at a time (default: %(default)s)")
    options = parser.parse_args(arguments)
    schemes, methods = options.schemes.split(","), options.methods.split(";")
    first = [(Case(None, ""), False), *((Case(name, "min-max"), True) for name in schemes)]
    cases = [
        (Case(name, method, draw), False)
        for method in methods
        for name in schemes
        for draw in range(1 if method.endswith(ONCE) else options.draws)
    ]
    high, rounded = 0.0, {}
    jobs = [(options.folder, case, options.batches, base) for case, base in (*first, *cases)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for case, base, loss in pool.imap(_measured, jobs):
            if case.scheme is None:
                high = loss
                print(f"high precision {high:.4f} nats")
            elif base:
                rounded[case.scheme] = loss
                print(f"{case.scheme} rounded {loss - high:+.4f}")
            else:
                share = 100 * (rounded[case.scheme] - loss) / (rounded[case.scheme] - high)
                print(
                    f"{case.scheme:<12} {case.method:<30} draw {case.draw}  won back {share:5.1f} %  "
                    f"{loss - high:+.4f} nats",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
