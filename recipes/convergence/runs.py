"""The runs that are compared, and the settings that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import lowbit
from lowbit.train import TrainingScheme
from recipes.llama import LlamaConfig
from recipes.quickstart import config as quickstart
from recipes.quickstart.config import QuickstartConfig, UserError

REFERENCE = "fp32"


@dataclass(frozen=True)
class Run:
    """One way to keep weights and states.

    Attributes:
        about: in the table.
        weights: dtype of what the optimizer updates.
        make: makes AdamW over parameter groups with lr, betas and weight_decay.
        allowed: by how much of the reference's loss its own may exceed it; None sets no limit.
        scheme: of `lowbit.train`, for the linear layers of the blocks.
    """

    name: str
    about: str
    weights: torch.dtype
    make: Callable[..., torch.optim.Optimizer]
    allowed: float | None = None
    scheme: TrainingScheme | None = None


def _runs() -> list[Run]:
    fp32, bf16 = torch.float32, torch.bfloat16
    adamw = lowbit.optim.AdamW
    plain: Any = partial(adamw, state="fp32")
    stochastic: Any = partial(adamw, state="fp32", bf16_stochastic_round=True)
    corrected: Any = partial(adamw, state="fp32", weight_correction="8bit")
    return [
        Run(REFERENCE, "fp32 weights, fp32 states (torch)", fp32, torch.optim.AdamW),
        Run("8bit", "fp32 weights, 8-bit states", fp32, lowbit.optim.AdamW8bit, 0.003),
        Run("float8", "fp32 weights, float8 states", fp32, lowbit.optim.AdamWFp8, 0.003),
        Run("4bit", "fp32 weights, 4-bit states", fp32, lowbit.optim.AdamW4bit, 0.01),
        Run("bf16-nearest", "bf16 weights, rounded to nearest", bf16, plain),
        Run("bf16-stochastic", "bf16 weights, rounded stochastically", bf16, stochastic, 0.005),
        Run("bf16-corrected", "bf16 weights, 8-bit correction", bf16, corrected, 0.005),
        *_products(torch.optim.AdamW, plain),
    ]


def _products(adamw: Any, lowbit_adamw: Any) -> list[Run]:
    """What `lowbit.train` does, every layer of it, however small; float32 weights and states as in the reference."""
    fp32, bf16 = torch.float32, torch.bfloat16
    int8_weight, bitnet = lowbit.train.Int8Weight(), lowbit.train.BitNet()
    int8 = lowbit.train.Int8MixedPrecision(always=True)
    float8 = lowbit.train.Float8MixedPrecision(always=True)
    return [
        Run("int8-products", "int8 products", fp32, adamw, 0.005, int8),
        Run("float8-products", "float8 products, a scale a row", fp32, adamw, 0.005, float8),
        Run("int8-weights", "int8 weights, no copy", bf16, lowbit_adamw, None, int8_weight),
        Run("bitnet", "BitNet b1.58: ternary weights", fp32, adamw, None, bitnet),
    ]


RUNS = {run.name: run for run in _runs()}


def chosen_runs(text: str) -> list[Run]:
    """The runs of a list of names with commas, all for "". UserError for a name that there isn't."""
    names = [name.strip() for name in text.split(",")] if text else list(RUNS)
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        raise UserError(
            f"--runs {text}: there is no run {unknown[0]!r}; accepted: {', '.join(RUNS)}"
        )
    return [RUNS[name] for name in names]


def chosen_seeds(text: str) -> list[int]:
    """The seeds of a list of whole numbers with commas. UserError for anything else."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError as error:
        raise UserError(
            f"--seeds {text}: expected whole numbers with commas, as in 0,1,2"
        ) from error


def gpu() -> QuickstartConfig:
    """The quick start's 99M parameters, 1,000 steps of 8,192 tokens: less than one pass over the text, so no dropout.
    About a quarter of a minute a run on a datacentre GPU.

    At the quick start's rate of 1.5e-3 equal runs ended up to 2% apart, and 4-bit states 4 to 11% below float32 ones:
    at the edge of what is stable, what damps the updates helps. And it moves weights so far at a step that bfloat16
    has bits enough for it.
    """
    base = quickstart.gpu()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dropout=0.0),
        batch_size=8,
        lr=3e-4,
        bf16=False,  # no autocast: the weights that compute are bfloat16 themselves
        compile=True,
    )


def tiny() -> QuickstartConfig:
    """0.1M parameters, to try the program: a second or two a run on a processor, and no figure to go by."""
    return dataclasses.replace(
        quickstart.tiny(),
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
