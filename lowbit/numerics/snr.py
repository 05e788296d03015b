"""The signal-to-noise ratio of rounded values, in decibels."""

from __future__ import annotations

import math

from torch import Tensor

from lowbit.numerics.long_norm import long_norm


def decibels(signal: float, noise: float) -> float:
    """10 · log10(signal / noise) of two sums of squares; ∞ without noise, -∞ for noise without a signal."""
    if noise == 0:
        return math.inf
    # A difference: the quotient of a finite signal and an infinite noise has no logarithm.
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf


def snr(values: Tensor, rounded: Tensor) -> float:
    """10 · log10(Σ w² / Σ (w − ŵ)²) in dB of `values` w and `rounded` ŵ, which have one shape.

    The sums go over chunks of rows, so that a large weight takes no second copy. The result is ∞ if nothing was lost.
    """
    signal = noise = 0.0
    if values.ndim == 0:
        values, rounded = values.view(1), rounded.view(1)
    step = max(1, 2**20 // max(1, values[0].numel() if len(values) else 1))
    for own, got in zip(values.split(step), rounded.split(step), strict=True):
        signal += float(long_norm(own.float())) ** 2
        noise += float(long_norm(own.float() - got)) ** 2
    return decibels(signal, noise)
