"""The quick start's models and lengths, by name. The other recipes change a few of their fields."""

from __future__ import annotations

import dataclasses

from recipes.llama import LlamaConfig
from recipes.training import TrainingConfig


def tiny() -> TrainingConfig:
    """0.4M parameters, a few minutes on two CPU cores. Rounding hurts a model that has seen many tokens for each of
    its weights, so the model is small on purpose."""
    return TrainingConfig(
        preset="tiny",
        model=LlamaConfig(
            vocab_size=512, dim=128, layers=2, heads=4, kv_heads=2, hidden=320, context=256
        ),
        batch_size=8,
        steps=1200,
        branch_steps=360,
        warmup_steps=40,
        decay_steps=440,
        lr=2.5e-3,
        probe_sequences=32,
        save_every=200,
    )


def small() -> TrainingConfig:
    """3M parameters, under an hour on a few CPU cores or a few minutes on a GPU."""
    return TrainingConfig(
        preset="small",
        model=LlamaConfig(
            vocab_size=2048, dim=256, layers=4, heads=8, kv_heads=4, hidden=640, context=256
        ),
        batch_size=16,
        steps=1800,
        branch_steps=540,
        warmup_steps=80,
        decay_steps=650,
        lr=2e-3,
    )


def gpu() -> TrainingConfig:
    """99M parameters in bfloat16 autocast, a few minutes on one datacentre GPU."""
    model = LlamaConfig(
        vocab_size=8192, dim=1024, layers=8, heads=16, kv_heads=4, hidden=2816, context=1024
    )
    return TrainingConfig(
        preset="gpu",
        model=dataclasses.replace(model, dropout=0.1),
        batch_size=32,
        steps=1000,
        branch_steps=250,
        warmup_steps=50,
        decay_steps=375,
        lr=1.5e-3,
        corpus="stdlib+torch",
        heldout_tokens=1_000_000,
        probe_sequences=32,
        bf16=True,
    )


PRESETS = {"tiny": tiny, "small": small, "gpu": gpu}
