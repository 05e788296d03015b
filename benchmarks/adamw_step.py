"""One AdamW step over bf16 weights: lowbit's state formats, and torch's own optimizer.

Timed call by call, host included, as a training loop meets it. The floor reads the gradient, and reads and writes
the weight and both moments in the format in which they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import lowbit
from benchmarks.registry import Candidate, Problem, benchmark

SHAPES = {
    "a layer of Llama 3 8B": [
        *[(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)],
        *[(14336, 4096), (14336, 4096), (4096, 14336)],
    ],
    "12 layers of width 768": [(768, 768)] * 48 + [(3072, 768), (768, 3072)] * 12,
}
STATE_BYTES = {  # of an element of one moment, its share of the scale included
    "4bit": 0.5 + 4 / 128,
    "8bit": 1 + 4 / 256,
    "float8": 1 + 4 / 256,
    "bf16": 2,
    "fp32": 4,
}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "lowbit AdamW8bit": (lowbit.optim.AdamW8bit, "8bit"),
    "lowbit AdamW4bit": (lowbit.optim.AdamW4bit, "4bit"),
    "lowbit AdamWFp8": (lowbit.optim.AdamWFp8, "float8"),
    "lowbit AdamW, bf16 states": (partial(lowbit.optim.AdamW, state="bf16"), "bf16"),
    "torch AdamW fused, bf16 states": (partial(torch.optim.AdamW, fused=True), "bf16"),
    "torch AdamW foreach, bf16 states": (partial(torch.optim.AdamW, foreach=True), "bf16"),
}


def new_optimizer(
    make: Callable[..., torch.optim.Optimizer], shapes: list[tuple[int, int]]
) -> tuple[torch.optim.Optimizer]:
    """An optimizer over random bf16 weights with gradients, after its first step."""
    params = [torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.02 for s in shapes]
    for param in params:
        param.requires_grad_()
        param.grad = torch.randn_like(param) * 1e-3
    optimizer = make(params, lr=1e-4)
    optimizer.step()
    return (optimizer,)


@benchmark("adamw_step", "one AdamW step over bf16 weights, by state format")
def adamw_step() -> Iterator[Problem]:
    for name, shapes in SHAPES.items():
        elements = sum(rows * cols for rows, cols in shapes)
        yield Problem(
            f"{name}, {elements / 1e6:.0f}M weights",
            [
                Candidate(
                    label,
                    lambda optimizer: optimizer.step(),
                    partial(new_optimizer, make, shapes),
                    int(elements * (2 + 2 * 2 + 2 * 2 * STATE_BYTES[state])),
                    graph=False,
                )
                for label, (make, state) in OPTIMIZERS.items()
            ],
        )
