"""The report of a conversion: the new form of each weight, or the reason why it was left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn

from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local

followers: list[Callable[[nn.Module], None]] = []
"""Functions that get each model whose weights were replaced, once the model is complete."""


def tell(model: nn.Module) -> None:
    """Call the `followers` of a model whose weights were replaced."""
    for follow in followers:
        follow(model)


@dataclass(frozen=True)
class Entry:
    """One weight: its fully qualified name, its shape, if it was converted, and how or why not.

    nbytes: the bytes that the weight takes now; for a tied weight, only in the first entry.
    """

    fqn: str
    shape: tuple[int, ...]
    converted: bool
    note: str
    nbytes: int = 0


@dataclass
class Report:
    """The report of a conversion: `print(report)`, or read `converted` and `left`.

    Attributes:
        entries: every weight of two or more dimensions that was looked at.
        parameters: elements of all parameters of the model.
        low_bits: elements that are now stored in low bits.
        prepared: elements that stay in high precision, with products in low bits.
        nbytes: bytes that all parameters take now.
        low_bit_nbytes: bytes of the parameters in low bits.
        vectors: parameters of fewer than two dimensions, such as biases and norms.
        vector_nbytes: bytes of these vectors.
    """

    entries: list[Entry] = field(default_factory=list)
    parameters: int = 0
    low_bits: int = 0
    prepared: int = 0
    nbytes: int = 0
    low_bit_nbytes: int = 0
    vectors: int = 0
    vector_nbytes: int = 0

    @property
    def converted(self) -> list[str]:
        """Fully qualified names of the weights that were converted."""
        return [e.fqn for e in self.entries if e.converted]

    @property
    def left(self) -> dict[str, str]:
        """Fully qualified name → reason, for the weights that were left alone."""
        return {e.fqn: e.note for e in self.entries if not e.converted}

    def count(self, model: nn.Module) -> Self:
        """Fill in the numbers of `model` as it is now, and call the `followers`. Returns the report."""
        self.parameters = self.low_bits = self.prepared = 0
        self.nbytes = self.low_bit_nbytes = self.vectors = self.vector_nbytes = 0
        sizes: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, param in model.named_parameters():  # a tied parameter once
            if isinstance(param, nn.UninitializedParameter):
                continue
            sizes[name] = size = nbytes_of(param)
            shapes[name] = tuple(param.shape)
            self.parameters += param.numel()
            self.nbytes += size
            own = local(param)
            if isinstance(own, LowbitTensor):
                if own.updated_in_place() is None:
                    self.low_bits += param.numel()
                    self.low_bit_nbytes += size
                else:
                    self.prepared += param.numel()
            elif param.ndim < 2:
                self.vectors += 1
                self.vector_nbytes += size
        self.entries = [
            replace(e, nbytes=sizes.get(e.fqn, 0), shape=shapes.get(e.fqn, e.shape))
            for e in self.entries
        ]
        tell(model)
        return self

    def __str__(self) -> str:
        count = len(self.converted)
        head = f"{count} weights converted, {len(self.entries) - count} left alone"
        if self.parameters:
            share = _share(self.low_bits, self.parameters)
            head += f"; {share} of {self.parameters:,} parameters are now in low bits"
        if self.low_bits:
            head += f" and take {_share(self.low_bit_nbytes, self.nbytes)} of the bytes"
        if self.prepared:
            head += f", {_share(self.prepared, self.parameters)} have low-bit products"
        lines = [head]
        width = max((len(e.fqn) for e in self.entries), default=0)
        for e in self.entries:
            tied = "counted above" if self.parameters and e.shape else ""
            share = f"{_share(e.nbytes, self.nbytes):>6} of bytes" if e.nbytes else tied
            shape = "x".join(map(str, e.shape))
            mark = "+" if e.converted else "-"
            lines.append(f"  {mark} {e.fqn:<{width}}  {shape:<14}  {share:>15}  {e.note}")
        if self.vectors:
            share = _share(self.vector_nbytes, self.nbytes)
            lines.append(f"    and {self.vectors} vectors (biases, norms): {share} of bytes")
        return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole if whole else 0.0
    return "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


def nbytes_of(param: Any) -> int:
    """Bytes of the whole parameter, sharded or not."""
    own = local(param)
    if not isinstance(own, LowbitTensor) or own.numel() == 0:
        return param.numel() * param.element_size()
    return own.nbytes_stored() * param.numel() // own.numel()
