"""Presets, and the rows of the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowbit import Int4WeightOnly, Int8WeightOnly, Scheme
from recipes.decode.capture import WARM_UP
from recipes.llama import LlamaConfig


@dataclass(frozen=True)
class DecodeConfig:
    """What is measured. Decoding runs over a cache of `positions`, of which `start` are taken before it begins."""

    model: LlamaConfig
    dtype: torch.dtype
    group_size: int
    batches: tuple[int, ...] = (1, 16)
    prompt: int = 2048
    """Tokens of a prefill, a sequence."""
    positions: int = 1024
    start: int = 512
    tokens: int = 128
    """Decoded in one timing, a sequence."""
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.start + self.tokens > self.positions:
            raise ValueError(
                f"DecodeConfig: start={self.start} and tokens={self.tokens} pass the cache of {self.positions}"
            )
        if self.start < WARM_UP:
            raise ValueError(
                f"DecodeConfig: start={self.start} leaves no {WARM_UP} positions to warm up"
            )
        longest = max(self.prompt, self.positions)
        if longest > self.model.context:
            raise ValueError(
                f"DecodeConfig: {longest} positions pass the model's context of {self.model.context}"
            )


def llama_8b() -> DecodeConfig:
    """The shapes of Llama-3.1-8B."""
    model = LlamaConfig(
        vocab_size=128_256,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        context=2048,
        tied=False,
        rope_theta=500_000.0,
    )
    return DecodeConfig(model, torch.bfloat16, group_size=128)


def tiny() -> DecodeConfig:
    """Seconds on one CPU core."""
    model = LlamaConfig(
        vocab_size=256, dim=64, layers=3, heads=4, kv_heads=2, hidden=160, context=64, tied=False
    )
    return DecodeConfig(
        *(model, torch.float32, 32, (1, 3)), prompt=32, positions=48, start=16, tokens=8, repeats=2
    )


PRESETS = {"8b": llama_8b, "tiny": tiny}


@dataclass(frozen=True)
class Row:
    """One line of the table. `scheme` None: weights as they are, or torch's tinygemm."""

    name: str
    about: str
    scheme: dict[str, Scheme | None] | None = None
    tinygemm: bool = False
    longest_prefill: int | None = None
    """Tokens of all sequences, beyond which a prefill is left out."""


def rows(config: DecodeConfig) -> dict[str, Row]:
    """Every row by its name."""
    int4, int8 = Int4WeightOnly(config.group_size), Int8WeightOnly()
    group = f"group {config.group_size}"
    high = str(config.dtype).removeprefix("torch.")
    head = f"{high} head"
    found = [
        Row("bf16", f"{high} weights"),
        Row("int8", f"one scale a row, {head}", {"head": None, "*": int8}),
        Row("int4", f"{group}, {head}", {"head": None, "*": int4}),
        Row("int4-int8-head", f"{group}, int8 head", {"head": int8, "*": int4}),
        Row(
            *("tinygemm", f"int4, {group}, {head}, in torch's own kernel"),
            tinygemm=True,
            longest_prefill=config.prompt,  # 16 times as many would take it 13 s, a dozen times
        ),
    ]
    return {row.name: row for row in found}
