"""What a checkpoint format of another program is: how it stores one weight, and how its config.json says so.

A folder of such a checkpoint holds *.safetensors shards and a config.json, whose "quantization_config" describes the
weights. `Format` translates between that and lowbit's tensors, one weight at a time, so that a folder is read and
written in the memory of a few tensors. `lowbit.formats` lists the formats and walks the folders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lowbit.tensor.base import LowbitTensor

Parts = dict[str, Tensor]
"""The tensors that stand for `layer.weight`, by what follows `layer.` in their names, such as "weight_packed"."""


class FormatError(ValueError):
    """A weight or a checkpoint that a format cannot hold, or that cannot be read; and the way out."""


class Format(ABC):
    """A format of quantized weights in a folder of safetensors."""

    name: ClassVar[str]
    """What `lowbit.export(…, format=name)` takes."""

    @abstractmethod
    def reads(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json's "quantization_config" describes this format."""

    @abstractmethod
    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """What may follow `layer.` in the names of the tensors that stand for `layer.weight`, required ones first. A
        layer without the first is stored plainly."""

    @abstractmethod
    def encode(self, weight: LowbitTensor) -> Parts:
        """The parts of `weight`, with dequantized values equal to the bit.

        Raises FormatError for a weight that the format cannot hold.
        """

    @abstractmethod
    def decode(self, parts: Parts, config: Mapping[str, Any], layer: str) -> LowbitTensor:
        """The weight of the module `layer`. Raises FormatError for parts that are missing or misshapen, and for
        settings that lowbit cannot represent."""

    @abstractmethod
    def config(self, weights: Mapping[str, LowbitTensor], plain: list[str]) -> dict[str, Any]:
        """The "quantization_config" for these weights by their modules' names, which may be meta tensors, and for
        linears that stay plain. Raises FormatError for weights that one config cannot describe together."""
