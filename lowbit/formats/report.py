"""The report of an export, and the loss of rounding that it states."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.convert import Entry, Report
from lowbit.formats.sources import Item
from lowbit.numerics.long_norm import long_norm
from lowbit.tensor.core.base import LowbitTensor


@dataclass
class ExportReport(Report):
    """The report of an export; `print(report)`. `converted`: the weights that are in low bits in the result.

    The other attributes are those of `lowbit.Report`.

    Attributes:
        snr: for each weight whose values were rounded on the way, the signal-to-noise ratio in dB.
        format: the name of the format.
        path: the folder or file.
        notes: what is left out, and which readers take the result, a line each.
    """

    snr: dict[str, float] = field(default_factory=dict)
    format: str = ""
    path: str = ""
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  ! {note}" for note in self.notes)])

    def enter(self, item: Item, size: int) -> None:
        value: Tensor = item.value
        is_low = isinstance(value, LowbitTensor)
        self.parameters += value.numel()
        if value.ndim < 2:
            self.vectors += 1
            self.vector_nbytes += size
            return
        note = item.note
        if not note:
            note = (
                value.stored_format() if isinstance(value, LowbitTensor) else "plain in the source"
            )
        if item.snr is not None:
            self.snr[item.name] = item.snr
            note = f"SNR {item.snr:.1f} dB; {note}"
        self.low_bits += value.numel() if is_low else 0
        self.low_bit_nbytes += size if is_low else 0
        self.entries.append(Entry(item.name, tuple(value.shape), is_low, note, size))


def snr(values: Tensor, weight: Tensor) -> float:
    """10 · log10(Σ w² / Σ (w − ŵ)²) in dB, over chunks of rows; infinite if nothing was lost."""
    signal = noise = 0.0
    rounded = weight.dequantize() if isinstance(weight, LowbitTensor) else weight
    if values.ndim == 0:
        values, rounded = values.view(1), rounded.view(1)
    step = max(1, 2**20 // max(1, values[0].numel() if len(values) else 1))
    for own, got in zip(values.split(step), rounded.split(step), strict=True):
        own = own.to(torch.float32, copy=True)
        signal += float(long_norm(own)) ** 2
        noise += float(long_norm(own.sub_(got))) ** 2
    if noise == 0:
        return math.inf
    # A difference: the quotient of a finite signal and an infinite noise has no logarithm.
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf
