"""The sources of `lowbit.export`: a model in memory or a folder, as items one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from lowbit.tensor.core.base import LowbitTensor

Holder = Literal["linear", "float32", "embedding", "custom", "cache", "other"]
"""The kind of the module that holds a tensor. "custom": a matrix of a module of transformers that multiplies by it in a
way of its own, such as Conv1D, which stores [inputs, outputs], and routers. "float32": a linear that transformers keeps
in float32, such as T5's `wo`. "cache": the tensor is a static scale of the keys or values that this module caches
(`lowbit.layers.cache_scales`)."""


@dataclass(frozen=True)
class Item:
    """A tensor of a checkpoint: a low-bit tensor, or a plain one.

    Attributes:
        note: for the report, why the tensor is stored as it is.
        snr: the signal-to-noise ratio in dB, if the values were rounded on the way.
    """

    name: str
    value: Tensor
    holder: Holder
    note: str = ""
    snr: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes as it is stored."""
        value = self.value
        return value.nbytes_stored() if isinstance(value, LowbitTensor) else value.nbytes


class Source(Protocol):
    """A model in memory, or a folder."""

    config: dict[str, Any]
    """config.json without "quantization_config"."""
    nbytes: int
    """Bytes that all items take, for the progress bar."""

    @property
    def left_out(self) -> Sequence[str]:
        """Lines for the report: what the checkpoint holds but the items do not."""
        ...

    def items(self) -> Iterator[Item]:
        """The tensors, each read when its turn comes."""
        ...

    def names(self) -> list[str]:
        """The names of the items. A stack of experts that is split on the way has one name here."""
        ...

    def linears(self) -> set[str]:
        """Modules that are known to be linears, even if no item is a tensor of their own."""
        ...

    def copy_files(self, folder: Path) -> None:
        """Write the files of the checkpoint besides its weights: tokenizer, settings of generation …"""
        ...
