"""Time of learned rounding, block by block, for blocks of the shape of an 8B decoder on one GPU.

    python -m benchmarks.learned_rounding [--blocks 4] [--scheme int4] [--steps 200]

Random weights and tokens: 128 sequences of 512 tokens, 8 of them a step, inputs and targets kept on the GPU. Prints for
each block the seconds between one block's end and the next one's, and the time that 32 blocks would take.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch

import lowbit
from lowbit.inference import LearnedRounding, Search
from lowbit.inference.calibration import learned_rounding
from recipes.llama import Llama, LlamaConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "dim": 4096,
    "heads": 32,
    "kv_heads": 8,
    "hidden": 14336,
    "context": 512,
}
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "dim": 64,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 128,
    "context": 32,
}
SCHEMES = {
    "int4": lowbit.IntxWeightOnly(4, 128, "symmetric"),
    "int2": lowbit.IntxWeightOnly(2, 64, "float_zero_point"),
    "nvfp4": lowbit.NVFP4WeightOnly(),
}


def model_of(shape: dict[str, Any], blocks: int, device: str) -> Llama:
    """Random weights whose products keep the size of their inputs."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(LlamaConfig(layers=blocks, tied=False, **shape))
    return model.to(torch.bfloat16).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--scheme", choices=SCHEMES, default="int4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--cache", choices=("gpu", "cpu"), default="gpu")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    shape, device = (SHAPE, "cuda") if on_gpu else (TINY, "cpu")
    model = model_of(shape, options.blocks, device)
    tokens = torch.randint(
        shape["vocab_size"], (options.sequences, shape["context"]), device=device
    )
    times: list[tuple[float, float]] = []
    learn = learned_rounding.LearnedRounding.learn

    def timed(self: Any, block: Any, weights: Any) -> Any:
        begun = _now(on_gpu)
        found = learn(self, block, weights)
        times.append((begun, _now(on_gpu)))
        print(f"{block.name}: learned in {times[-1][1] - begun:.2f} s, loss {found}", flush=True)
        return found

    learned_rounding.LearnedRounding.learn = timed  # type: ignore[method-assign]
    steps = [Search(), LearnedRounding(options.steps, 8)]
    start = _now(on_gpu)
    chosen = {"blocks.*": SCHEMES[options.scheme]}
    cache = None if options.cache == "gpu" else "cpu"
    batches = list(tokens.split(8))
    lowbit.calibrate(model, chosen, batches, steps=steps, cache=cache)
    end = _now(on_gpu)
    ends = [start, *(done for _, done in times)]
    each = [b - a for a, b in itertools.pairwise(ends)]
    usual = statistics.median(each[1:] or each)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{name}, {options.scheme}, {options.steps} steps, cache on {options.cache}")
    print("seconds a block: " + ", ".join(f"{t:.2f}" for t in each) + f"; all {end - start:.1f}")
    print(f"32 blocks by the median after the first: {32 * usual / 60:.2f} minutes")
    if on_gpu:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
