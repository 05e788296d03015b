"""The ways to keep weights and states that the convergence recipe compares, and its presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import lowbit
from lowbit.train import TrainingScheme
from recipes import presets
from recipes.llama import Llama, LlamaConfig
from recipes.memory_savers import BlockAdamW, LowRank
from recipes.training import TrainingConfig

REFERENCE = "fp32"


@dataclass(frozen=True)
class ConvergenceRun:
    """One way to keep weights and states.

    Attributes:
        about: a description for the table.
        weights: dtype of the weights that the optimizer updates.
        make: makes AdamW over parameter groups with lr, betas and weight_decay.
        allowed: the largest loss above the reference's, as a share of it; None sets no limit.
        scheme: a scheme of `lowbit.train` for the linear layers of the blocks.
        saved_in_int8: True if autograd keeps activations in int8 (`lowbit.train.save_in_int8`).
    """

    name: str
    about: str
    weights: torch.dtype
    make: Callable[..., torch.optim.Optimizer]
    allowed: float | None = None
    scheme: TrainingScheme | None = None
    saved_in_int8: bool = False


def variants() -> dict[str, ConvergenceRun]:
    """Every layer takes part, however small it is: `always=True`."""
    fp32, bf16 = torch.float32, torch.bfloat16
    torch_adamw: Any = torch.optim.AdamW
    adamw: Any = partial(lowbit.optim.AdamW, state="fp32")
    stochastic: Any = partial(adamw, bf16_stochastic_round=True)
    dropped: Any = partial(stochastic, weight_correction=False)
    corrected: Any = partial(adamw, weight_correction="8bit")
    exact: Any = partial(adamw, weight_correction="16bit")
    into_momentum: dict[str, Any] = {"weight_correction": "momentum"}
    compensated: Any = partial(adamw, **into_momentum)
    int8, float8 = lowbit.Int8MixedPrecision(always=True), lowbit.Float8MixedPrecision(always=True)
    int8_weight, int4_weight, bitnet = lowbit.Int8Weight(), lowbit.Int4Weight(), lowbit.BitNet()
    found = [
        ConvergenceRun(REFERENCE, "fp32 weights, fp32 states (torch)", fp32, torch_adamw),
        ConvergenceRun("8bit", "fp32 weights, 8-bit states", fp32, lowbit.optim.AdamW8bit, 0.003),
        ConvergenceRun("float8", "fp32 weights, float8 states", fp32, lowbit.optim.AdamWFp8, 0.003),
        ConvergenceRun("4bit", "fp32 weights, 4-bit states", fp32, lowbit.optim.AdamW4bit, 0.01),
        ConvergenceRun("bf16-nearest", "bf16 weights, rounded to nearest", bf16, adamw),
        ConvergenceRun(
            "bf16-stochastic", "bf16 weights, rounded stochastically", bf16, stochastic, 0.005
        ),
        ConvergenceRun("bf16-corrected", "bf16 weights, 8-bit correction", bf16, corrected, 0.005),
        ConvergenceRun("bf16-exact", "bf16 weights, 16-bit correction", bf16, exact, 0.005),
        ConvergenceRun(
            "bf16-momentum", "bf16 weights, error into momentum", bf16, compensated, 0.005
        ),
        ConvergenceRun("int8-products", "int8 products", fp32, torch_adamw, 0.005, int8),
        ConvergenceRun(
            "float8-products", "float8 products, a scale a row", fp32, torch_adamw, 0.005, float8
        ),
        ConvergenceRun(
            "int8-weights", "int8 weights, no copy", bf16, stochastic, None, int8_weight
        ),
        ConvergenceRun("int4-weights", "int4 weights, no copy", bf16, dropped, None, int4_weight),
        *[
            ConvergenceRun(
                f"{bits}-weights-{states}",
                f"{bits} weights, error into momentum, {states} states",
                bf16,
                partial(lowbit.optim.AdamW, state=states, **into_momentum),
                None,
                scheme,
            )
            for bits, scheme in (("int8", int8_weight), ("int4", int4_weight))
            for states in ("fp32", "8bit", "4bit")
        ],
        ConvergenceRun(
            "int8-saved", "activations saved in int8", fp32, torch_adamw, 0.005, saved_in_int8=True
        ),
        ConvergenceRun("galore", "fp32 weights, GaLore of rank 16", fp32, LowRank),
        ConvergenceRun(
            "apollo", "fp32 weights, APOLLO of rank 16", fp32, partial(LowRank, random=True)
        ),
        ConvergenceRun("badam", "fp32 weights, BAdam of 4 blocks", fp32, BlockAdamW),
        ConvergenceRun("bitnet", "BitNet b1.58: ternary weights", fp32, torch_adamw, None, bitnet),
    ]
    return {variant.name: variant for variant in found}


RUNS = variants()


def gpu() -> TrainingConfig:
    """The quick start's 99M parameters, 1,000 steps of 8,192 tokens: less than one pass over the text, so no dropout.
    About 16 s a run on a datacentre GPU.

    The quick start's learning rate of 1.5e-3 is at the edge of stability for these short runs: equal runs ended up to
    2% apart, and 4-bit states, which were rounded to nearest then, 4 to 11% below float32 ones, as damped updates help
    there. Its updates are also so large that bfloat16 has enough bits for them. This rate avoids both.
    """
    base = presets.gpu()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dropout=0.0),
        batch_size=8,
        lr=3e-4,
        bf16=False,  # no autocast: the weights that compute are bfloat16 themselves
        compile=True,
    )


def tiny() -> TrainingConfig:
    """0.1M parameters, to try the program: a second or two a run on a CPU, too small for any conclusion."""
    return dataclasses.replace(
        presets.tiny(),
        model=LlamaConfig(
            vocab_size=512, dim=64, layers=1, heads=2, kv_heads=1, hidden=128, context=64
        ),
        batch_size=4,
        steps=40,
        branch_steps=10,
        warmup_steps=4,
        decay_steps=12,
        heldout_tokens=4096,
        probe_sequences=8,
        probe_every=10,
        sample_tokens=8,
    )


PRESETS = {"tiny": tiny, "gpu": gpu}


def computing_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which all runs compute. Most CPUs emulate bfloat16, which takes fifteen times as long."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class Weights:
    """The model computes with `computing`; the optimizer updates `trained`.

    They are the same tensors, or `trained` has another dtype, and `computing` is its copy, converted after each step.
    So all runs compute alike, and a difference of loss comes from the optimizer.
    """

    def __init__(self, model: Llama, variant: ConvergenceRun) -> None:
        """`model` comes in float32, as initialized. It gets its device's `computing_dtype` and the variant's scheme."""
        initial = [p.detach().clone() for p in model.parameters()]
        dtype = computing_dtype(initial[0].device)
        model.to(dtype)
        if variant.scheme is not None:
            lowbit.train.prepare_(model.blocks, variant.scheme)
        self.computing = list(model.parameters())
        self.trained = self.computing
        has_no_copy = isinstance(variant.scheme, (lowbit.Int8Weight, lowbit.Int4Weight))
        if variant.weights != dtype and not has_no_copy:
            self.trained = [nn.Parameter(tensor.to(variant.weights)) for tensor in initial]
            self.round()

    def take_gradients(self) -> None:
        """Give `trained` the gradients of `computing`."""
        if self.trained is not self.computing:
            for trained, computing in zip(self.trained, self.computing, strict=True):
                assert computing.grad is not None
                trained.grad = computing.grad.to(trained.dtype)

    @torch.no_grad()
    def round(self) -> None:
        """Copy `trained` to `computing`, to nearest."""
        if self.trained is not self.computing:
            for trained, computing in zip(self.trained, self.computing, strict=True):
                computing.copy_(trained)
