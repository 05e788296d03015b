"""The signal-to-noise ratio of rounded values, in decibels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lowbit.numerics.long_norm import long_norm


def decibels(signal: float, noise: float) -> float:
    """10 · log10(signal / noise) of two sums of squares; ∞ without noise, -∞ for noise without a signal."""
    if noise == 0:
        return math.inf
    # A difference: the quotient of a finite signal and an infinite noise has no logarithm.
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf


@dataclass
class Energies:
    """Sums of squares over tensors, and over what rounding changed in them."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, values: Tensor, rounded: Tensor) -> None:
        own = values.float()
        self.signal += float(long_norm(own)) ** 2
        self.noise += float(long_norm(own - rounded)) ** 2

    def decibels(self) -> float:
        return decibels(self.signal, self.noise)

    def relative_error(self) -> float:
        """noise / signal; the noise itself without a signal."""
        return self.noise / self.signal if self.signal else self.noise


def snr(values: Tensor, rounded: Tensor) -> float:
    """10 · log10(Σ w² / Σ (w − ŵ)²) in dB of `values` w and `rounded` ŵ, which have one shape.

    The sums go over chunks of rows, so that a large weight takes no second copy. The result is ∞ if nothing was lost.
    """
    energies = Energies()
    if values.ndim == 0:
        values, rounded = values.view(1), rounded.view(1)
    step = max(1, 2**20 // max(1, values[0].numel() if len(values) else 1))
    for own, got in zip(values.split(step), rounded.split(step), strict=True):
        energies.add(own, got)
    return energies.decibels()
