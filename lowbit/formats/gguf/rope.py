"""Rotary embeddings in GGUF.

| rope_type | in GGUF                                                                |
|-----------|------------------------------------------------------------------------|
| default   | rope.freq_base                                                         |
| linear    | and rope.scaling.type, rope.scaling.factor                             |
| llama3    | and a tensor rope_freqs.weight, which divides the frequencies of a head |

The factors of "llama3" for a frequency f = theta^(−2i/d), with the wavelength λ = 2π/f, the context length L of the
first training, and the configured `factor`, `low_freq_factor` and `high_freq_factor`:

    λ < L / high: 1      λ > L / low: factor      between: 1 / ((1 − t) / factor + t),  t = (L/λ − low) / (high − low)

GGUF does not store these four numbers. To find them again, lowbit tries lengths that are powers of two, with low = 1
and high = 4 as in Llama 3.1 and later releases.

Source: Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.base import FormatError

THETA, KIND, FACTOR = "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"
TENSOR = "rope_freqs.weight"
_PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LENGTHS = (8192, *(2**i for i in range(4, 21)))
_WRITTEN = ("default", "linear", "llama3")


def _rope_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], float]:
    """The rope_type, its settings and theta of a config.json."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _WRITTEN:
        raise FormatError(
            f"gguf is written with rotary embeddings {', '.join(_WRITTEN)}, got {kind!r}"
        )
    return kind, rope, float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def settings_of(config: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """The floats and the texts of GGUF, by names without the architecture in front. Raises FormatError for another kind
    of rotary embeddings."""
    kind, rope, theta = _rope_of(config)
    if kind != "linear":
        return {THETA: theta}, {}
    return {THETA: theta, FACTOR: float(_number(rope, "factor"))}, {KIND: "linear"}


def factors_of(config: Mapping[str, Any], size: int) -> Tensor | None:
    """The tensor `TENSOR`, float32 [size / 2], for heads of `size` elements; None if GGUF needs none."""
    kind, rope, theta = _rope_of(config)
    return _llama3(rope, theta, size) if kind == "llama3" else None


def _llama3(rope: Mapping[str, Any], theta: float, size: int) -> Tensor:
    factor, low, high = (
        _number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    length = _number(rope, "original_max_position_embeddings")
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    turns = length * theta**-exponents / (2 * math.pi)  # L / λ
    between = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - between) / factor + between)).float()


def _published(factors: Tensor, theta: float, size: int) -> dict[str, Any] | None:
    """Settings of "llama3" that give these factors; None if no setting that is tried does."""
    own: dict[str, Any] = {"rope_type": "llama3", "factor": float(factors.max()), **_PUBLISHED}
    for length in _LENGTHS:
        own["original_max_position_embeddings"] = length
        again = _llama3(own, theta, size)
        if again.shape == factors.shape and torch.allclose(again, factors, rtol=1e-4):
            return own
    return None


def _number(rope: Mapping[str, Any], key: str) -> float:
    value = rope.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise FormatError(
            f"the rotary embeddings of config.json have {key} {value!r}: a number > 0"
        )
    return float(value)


def config_of(stored: Mapping[str, Any], size: int, factors: Tensor | None) -> dict[str, Any]:
    """The part of a config.json for the settings that `settings_of` gives and the tensor `TENSOR`. Raises FormatError
    for rotary embeddings that lowbit does not know."""
    theta, kind = float(stored.get(THETA, 10000.0)), stored.get(KIND, "none")
    factor = float(stored.get(FACTOR, stored.get("rope.scale_linear", 1.0)))  # in older files
    if kind not in ("none", "linear"):
        raise FormatError(
            f"its rotary embeddings are scaled ({kind}), which lowbit does not read from gguf"
        )
    if factors is None:
        if factor == 1.0:
            return {"rope_theta": theta}
        own: dict[str, Any] = {"rope_type": "linear", "factor": factor}
    else:
        found = None if factor != 1.0 else _published(factors.float(), theta, size)
        if found is None:
            raise FormatError(
                f"its rotary frequencies are scaled by {TENSOR}, and not as those of Llama 3.1, which lowbit reads"
            )
        own = found
    return {
        "rope_theta": theta,
        "rope_scaling": own,
        "rope_parameters": {"rope_theta": theta, **own},
    }
