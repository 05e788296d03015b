"""The report of an export."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lowbit.convert import Entry, Report
from lowbit.formats.sources import Item
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
